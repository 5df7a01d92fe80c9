"""Exports models to files that other libraries read, and loads such files."""
