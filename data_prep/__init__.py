"""Conversations in, tokens and features out."""
