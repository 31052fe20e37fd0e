"""Measuring drafters: the same prompts, the same loop, one report."""
