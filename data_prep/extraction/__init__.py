"""A dump whose target runs in vLLM: its process, the program that it runs there, and what writes shards there."""
