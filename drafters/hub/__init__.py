"""Checkpoints, publishing, and the layouts of released heads and of other engines."""
