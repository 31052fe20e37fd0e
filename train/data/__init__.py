"""What a step trains on: packed micro-batches from a store or from the target itself."""
