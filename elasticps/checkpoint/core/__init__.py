"""Decisions about checkpoints, without I/O."""
