"""The trainer of the shipped models: python -m train.target."""
