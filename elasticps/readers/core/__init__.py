"""What a reader decides: pure."""
