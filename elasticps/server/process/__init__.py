"""The process around a server: start and end, registration, signals, ports."""
