"""What can be found out before a run: whether it can start, what it takes, whether it learns."""
