"""What is found out before a run: whether it can run, what it takes, whether it learns."""
