"""Settings of one server, checked by those who use them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from elasticps.checkpoint.row_writer import RowWriter
from elasticps.security.gate import Gate
from elasticps.server.core.headroom import NO_LIMIT, ServerMemory
from elasticps.server.network.busy_poll import BusyPoll
from elasticps.system.descriptors import NO_LIMIT as MANY
from elasticps.system.descriptors import ConnectionLimits

LOG_BUDGET_BYTES = 256 << 20


@dataclass(frozen=True)
class ServerOptions:
    """How a server is set up. The simulator and tests replace `clock`, `busy_poll` and `row_writer`.

    log_budget_bytes: what the replication log may hold before pushes wait; a small memory limit lowers it.
    memory: the limit of the process, and how its use is read.
    gate: lets connections pass, with TLS or in the clear.
    connections: how many workers and unknown peers may connect.
    clock: seconds, never going back, and not standing still while the event loop does.
    wall: seconds since 1970.
    busy_poll: keeps the loop awake between requests; None for one of its own.
    row_writer: writes the files of checkpoints; None for threads.
    """

    log_budget_bytes: int = LOG_BUDGET_BYTES
    memory: ServerMemory = NO_LIMIT
    gate: Gate = field(default_factory=Gate)
    connections: ConnectionLimits = MANY
    clock: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    busy_poll: BusyPoll | None = None
    row_writer: RowWriter | None = None


DEFAULTS = ServerOptions()
