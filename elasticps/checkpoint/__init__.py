"""Checkpoints: where they lie, what is in them, and how a cluster comes back from one."""
