"""Methods of papers: training-free ones, and those of draft models, to compare with."""
