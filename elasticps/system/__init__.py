"""What all parts stand on: temporary files, open files, memory, logs, the event loop of control traffic, the store."""
