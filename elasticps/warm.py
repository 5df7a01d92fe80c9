"""`python -m elasticps.warm`: compiles every kernel of servers and workers, once for a machine or an image."""

from __future__ import annotations

from elasticps.client import warm as client
from elasticps.server import process as server


def warm() -> None:
    """Compiles what the cache does not have."""
    server.warm()
    client.warm()


if __name__ == "__main__":
    warm()
