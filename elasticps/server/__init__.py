"""The server process: one event loop that owns the rows of its ranges."""

from elasticps.server.process import serve

__all__ = ["serve"]
