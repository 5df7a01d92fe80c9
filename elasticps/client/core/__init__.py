"""A worker's side of the protocol, without I/O: time, chance and answers are arguments."""
