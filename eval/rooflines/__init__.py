"""Models of known shapes with random weights, and what one forward of them costs."""
