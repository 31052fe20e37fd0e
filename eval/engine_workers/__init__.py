"""What eval.engines runs with another environment's Python: these import the engine and the standard library alone."""
