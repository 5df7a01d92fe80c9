"""Limits of the servers that some stories make so small that they are met all the time."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

SMALL: dict[str, int] = {
    "elasticps.server.protocol.reads.CHUNK_BYTES": 2 << 10,
    "elasticps.server.connection.WRITE_HIGH_BYTES": 1 << 10,
    "elasticps.server.connection.LINK_HIGH_BYTES": 512,
    "elasticps.server.connection.MAX_WAITING_ANSWERS": 4,
    "elasticps.server.handshake.MAX_WORKERS": 40,
    "elasticps.server.fast.path.TURN_BYTES": 4 << 10,
    "elasticps.server.fast.chunks.SMALLEST_BYTES": 16 << 10,
    "elasticps.server.snapshots.PIECE_BYTES": 1 << 10,
    "elasticps.server.snapshots.BACKLOG_BYTES": 2 << 10,
    "replication.replica._LET_IN_BYTES": 1 << 10,
}


@contextmanager
def turned(small: bool) -> Iterator[None]:
    """Makes them small."""
    with ExitStack() as stack:
        for path, value in SMALL.items() if small else ():
            module, _, name = path.rpartition(".")
            stack.enter_context(patch.object(importlib.import_module(module), name, value))
        yield
