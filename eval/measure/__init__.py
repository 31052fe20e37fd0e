"""Runs: what is decoded, by which drafters, on which machine, and how long it took."""
