"""The target, its cache and its engines: one forward pass."""
