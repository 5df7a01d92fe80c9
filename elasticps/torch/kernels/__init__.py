"""Compiled loops over ids and rows: distinct keys, sums by key. Pure."""
