"""Compiled loops over ids, rows and weights: distinct keys, sums by key, comparisons. Pure."""
