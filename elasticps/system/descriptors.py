"""Limits a server's connections by the number of files that its process may have open.

A process without a descriptor left can neither look at its own memory nor write what it has to: so connections never
take the last ones. Those of etcd, coordinators, other servers and files have theirs in reserve.
"""

from __future__ import annotations

import resource
from contextlib import suppress
from typing import NamedTuple

from elasticps.errors import ConfigError

MOST_FILES = 1 << 20  # as much as most kernels allow at all
# Descriptors for everything but connections of workers and unknown peers: so many, or this share of the limit.
RESERVE, RESERVE_SHARE = 128, 8
UNKNOWN_SHARE = 8  # of what is left is for connections that have not said yet who they are, and for TLS handshakes
LEAST = 16  # connections without which there is no point in a server


class ConnectionLimits(NamedTuple):
    """The most connections of a server. workers: of workers; unknown: of peers that have not introduced themselves yet,
    and as many again in TLS handshakes; files: the limit of open files that these come from, 0 for none."""

    workers: int
    unknown: int
    files: int = 0


NO_LIMIT = ConnectionLimits(1 << 30, 1 << 30)


def raise_limit() -> int:
    """Raises this process's limit of open files as far as allowed, and returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(OSError, ValueError):  # a system that allows less than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_FILES if soft == resource.RLIM_INFINITY else soft


def connections_for(files: int) -> ConnectionLimits:
    """The connections that a limit of open files allows. Raises ConfigError if hardly any."""
    left = files - max(RESERVE, files // RESERVE_SHARE)
    if left < LEAST:
        raise ConfigError(
            f"this process may have {files} files open (`ulimit -n`), and a server needs {RESERVE} beside its "
            f"connections: allow {RESERVE + LEAST} or more"
        )
    unknown = left // UNKNOWN_SHARE
    return ConnectionLimits(left - 2 * unknown, unknown, files)
