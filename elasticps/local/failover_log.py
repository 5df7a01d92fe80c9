"""Reads from a cluster's logs when a failover was detected, written and adopted. Times are Unix time in seconds."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime

_FAILOVER = re.compile(r"event=failover epoch=(\d+) gone=(\S+) detected=([\d.]+) written=([\d.]+)")
_ADOPTED = re.compile(r"ts=(\S+) .*\bepoch=(\d+) .*event=adopted ")


@dataclass(frozen=True)
class Failover:
    """The view without a server that is gone: its epoch, when the leader knew, and when the view stood."""

    epoch: int
    detected: float
    written: float


def failover(log: str, member: str) -> Failover | None:
    """The failover from `member` ("s1#3"), as a coordinator logged it; None if it did not."""
    for found in _FAILOVER.finditer(log):
        if member in found[2].split(","):
            return Failover(int(found[1]), float(found[3]), float(found[4]))
    return None


def adoption(log: str, epoch: int) -> float | None:
    """Returns when a server adopted the view of that epoch or a later one; None if it has not."""
    for found in _ADOPTED.finditer(log):
        if int(found[2]) >= epoch:
            return datetime.fromisoformat(found[1].replace("Z", "+00:00")).timestamp()
    return None
