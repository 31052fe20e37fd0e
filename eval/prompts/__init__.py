"""Prompt files, suites, and the prompts that a run measures."""
