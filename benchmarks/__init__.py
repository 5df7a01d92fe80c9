"""Benchmarks: whole paths measured beside the limits of the machine they run on."""
