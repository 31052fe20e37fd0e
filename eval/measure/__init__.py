"""Runs: prompts, drafters, machine, tokens and times."""
