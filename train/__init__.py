"""Training of targets and of learned drafters."""
