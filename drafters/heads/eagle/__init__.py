"""EAGLE head: one decoder layer that extrapolates features."""
