"""Learned heads: the shape of each (one schema), its module, and its stored forms."""
