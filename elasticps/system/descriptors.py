"""How many connections a server may have, by how many files the system lets its process have open.

A process without a descriptor left can neither look at its own memory nor write what it has to: so connections never
take the last ones. Those of etcd, coordinators, other servers and files have theirs in reserve.
"""

from __future__ import annotations

import resource
from contextlib import suppress
from typing import NamedTuple

from elasticps.errors import ConfigError

MOST_FILES = 1 << 20  # as much as most kernels allow at all
RESERVE = (
    128  # for all but connections of workers and of those that have not said who they are; or a part of the limit:
)
RESERVE_SHARE = 8
UNKNOWN_SHARE = 8  # of what is left is for connections that have not said yet who they are, and for TLS handshakes
LEAST = 16  # connections without which there is no point in a server


class ConnectionLimits(NamedTuple):
    """How many a server may have of workers, and of those that have not said who they are, which have proved it before
    with TLS or are about to; files: the limit of open files that this comes from, 0 for none."""

    workers: int
    unknown: int
    files: int = 0


NO_LIMIT = ConnectionLimits(1 << 30, 1 << 30)


def raise_limit() -> int:
    """Lets this process have as many files open as it may, and returns how many these are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(OSError, ValueError):  # a system that allows less than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_FILES if soft == resource.RLIM_INFINITY else soft


def connections_for(files: int) -> ConnectionLimits:
    """What a limit of open files leaves to connections. ConfigError if that is next to nothing."""
    left = files - max(RESERVE, files // RESERVE_SHARE)
    if left < LEAST:
        raise ConfigError(
            f"this process may have {files} files open (`ulimit -n`), and a server needs {RESERVE} beside its "
            f"connections: allow {RESERVE + LEAST} or more"
        )
    unknown = left // UNKNOWN_SHARE
    return ConnectionLimits(left - 2 * unknown, unknown, files)
