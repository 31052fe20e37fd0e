"""The feature store: written by a dump, read by training."""
