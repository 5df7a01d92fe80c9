"""Frames and how they are cut out of a byte stream."""
