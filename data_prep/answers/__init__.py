"""Answers of a target to the dialogues' questions."""
