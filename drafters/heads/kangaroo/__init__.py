"""Kangaroo adapter: attention over the target's shallow states."""
