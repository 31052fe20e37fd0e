"""The files of a run: its state, its log, its picture."""
