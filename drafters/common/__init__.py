"""Files, paths, dtypes, threads, energy: what every room may import."""
