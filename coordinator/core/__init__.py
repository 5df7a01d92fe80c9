"""Pure parts of the coordinator: views, plans, health. Time, randomness and I/O are arguments."""
