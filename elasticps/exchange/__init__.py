"""Models go out and come in: tables as files that others read."""
