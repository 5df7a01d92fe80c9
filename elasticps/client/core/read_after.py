"""Has a worker's pulls see the steps that it has pushed, be they committed or not. Pure.

Where the newest step has ticked all ranges, its clock in the header of a PULL says so. Else servers are told in which
of the ranges that they answer for something is outstanding, in a READ_AFTER before the PULL.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from elasticps.client.core.routing import Readers, Routes
from elasticps.wire.clocks import ReadAfter
from elasticps.wire.frames import Buffer
from replication.chain import Member
from replication.progress import Progress


def read_clock(unread: int | Progress) -> int:
    """What the header of a PULL says that has to see this (`PushSession.unread`)."""
    return unread if isinstance(unread, int) else 0


def read_after(
    unread: int | Progress, frames: Mapping[Member, list[Buffer]], routes: Routes, readers: Iterable[Readers]
) -> Mapping[Member, list[Buffer]]:
    """PULL frames for servers, behind what each server has to wait for where headers cannot say it. readers: who
    answers each pull."""
    if isinstance(unread, int):
        return frames
    ranges = np.flatnonzero(unread)
    answers = [each.of[ranges] for each in set(readers)]
    for member, buffers in frames.items():
        server = routes.index_of[member]
        some = ranges[np.logical_or.reduce([of == server for of in answers])]
        if len(some):
            buffers.insert(0, ReadAfter(some, unread[some], routes.epoch).frame())
    return frames
