"""Limits that some stories make so small that they are met all the time.

Compiled code reads limits from the arrays that it works on, never from a module: so a limit that is set before a server
is built holds for Python and for compiled code.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

MOST_RANGES = 16  # of a story's cluster

SMALL: dict[str, float] = {
    "elasticps.server.core.reads.CHUNK_BYTES": 2 << 10,
    "elasticps.server.network.connection.WRITE_HIGH_BYTES": 1 << 10,
    "elasticps.server.network.connection.LINK_HIGH_BYTES": 512,
    "elasticps.server.network.connection.MAX_WAITING_ANSWERS": 4,
    "elasticps.server.roles.handshake.MAX_WORKERS": 40,
    "elasticps.server.fast.path.TURN_BYTES": 4 << 10,
    "elasticps.server.fast.buffers.SMALLEST_BYTES": 16 << 10,
    "elasticps.server.fast.recent_log.LEAST_STRIDE": 1,
    "elasticps.server.roles.readers.KEYS_AT_ONCE": 8,
    "elasticps.server.roles.readers.CREDIT_BYTES": 4 << 10,
    "elasticps.server.roles.range_parts.READ_BYTES": 600,
    "elasticps.store.cells.ROWS_AT_ONCE": 20,
    "elasticps.server.server.JOURNAL_WORDS": 1 << 8,
    "elasticps.readers.connections.ACK_BYTES": 512,
    "elasticps.readers.core.following.ROWS_AT_ONCE": 5,
    "replication.progress.FIRST_COLUMNS": 2,
    "elasticps.server.roles.snapshots.PIECE_BYTES": 1 << 10,
    "elasticps.server.roles.snapshots.BACKLOG_BYTES": 2 << 10,
    "replication.admission._LET_IN_BYTES": 1 << 10,
    "elasticps.client.push_batch.AT_ONCE_BYTES": 1 << 10,
    "elasticps.client.connections.UNUSED_S": 0.2,
    "chaos.sim.cluster.LOG_BUDGET_BYTES": 4 << 10,
}
TIGHT_ROWS = 18  # of sums: so many just fit into a frame that names all ranges, and not into a FORWARD to half of them
TIGHT_BODY_BYTES = 24 + 104 * TIGHT_ROWS + 8 + 4 * MOST_RANGES
TIGHT_MOST_BYTES = TIGHT_BODY_BYTES // 2  # of a piece of a snapshot: headers of blocks come on top of it
TIGHT: dict[str, int] = {
    "elasticps.server.network.connection.MAX_BODY_BYTES": TIGHT_BODY_BYTES,
    "elasticps.server.network.connection.MAX_LINK_BODY_BYTES": TIGHT_BODY_BYTES + 12 * MOST_RANGES + 64,
    "elasticps.server.roles.snapshots.MOST_BYTES": TIGHT_MOST_BYTES,
    "elasticps.server.roles.snapshots.PIECE_BYTES": TIGHT_MOST_BYTES // 4,  # as everywhere: larger ones are cut
}
"""Limits of frames. What workers send has to fit, see `Free`."""
SHORT: dict[str, int] = {
    "elasticps.client.short_keys.LIST_KEYS": 150,
    "elasticps.client.short_keys.MOST_KEYS": 70,
    "elasticps.client.short_keys.LEAST_KEYS": 2,
}
"""Limits of the lists of keys that servers keep for workers: their memory is used again all the time."""
GROWS: dict[str, float] = {
    "elasticps.server.roles.sweeper.TIME_EVERY_S": 0.1,
    "elasticps.server.roles.sweeper.PLAN_EVERY_S": 0.1,
    "elasticps.server.core.sweeps._LEAST_S": 0.1,
    "elasticps.server.core.sweeps.NORM_EVERY_S": 0.2,
    "elasticps.server.core.sweeps.SLICE_ROWS": 6,
    "elasticps.server.roles.snapshots.PIECE_BYTES": 256,
    "elasticps.server.roles.snapshots.BACKLOG_BYTES": 512,
}
"""How often time is logged and rows are looked at, of which there are few; and how much of a range is sent at once."""
MANY: dict[str, float] = {
    "elasticps.server.fast.buffers.SMALLEST_BYTES": 4 << 10,
    "elasticps.wire.stream.STAGING_BYTES": 4 << 10,
    "elasticps.client.connections.UNUSED_S": 0.25,
}
"""What each end of a connection receives into, and when it is closed, where one process has all of a large cluster."""


@contextmanager
def turned(small: bool, tight: bool, short: bool, grows: bool, many: bool = False) -> Iterator[None]:
    """Makes these limits small until the block ends."""
    limits: dict[str, float] = {}
    for turn, of in ((small, SMALL), (tight, TIGHT), (short, SHORT), (grows, GROWS), (many, MANY)):
        limits |= of if turn else {}
    with ExitStack() as stack:
        for path, value in limits.items():
            module, _, name = path.rpartition(".")
            stack.enter_context(patch.object(importlib.import_module(module), name, value))
        yield
