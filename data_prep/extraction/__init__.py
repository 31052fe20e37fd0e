"""Hidden states of the target for feature stores: by our own engine, or by vLLM in its own process."""
