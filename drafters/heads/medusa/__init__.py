"""Medusa heads: residual blocks that predict the next tokens in parallel."""
