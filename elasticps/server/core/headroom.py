"""Headroom: how many bytes new rows may still take, here and at the servers down the chains of ranges headed here.

A replica cannot refuse what its head has logged, so the head has to know how its successors are: each server tells its
predecessors how much room it has, once a second, and a few times a second where that is little or changes. As many of
these numbers travel up as a chain is long: the first is the server's own, the second the least of its successors, and
so on. Between two looks a head that has a tenth of a server's ranges takes a tenth of its room at most, so all heads
together do not take more than there is. Of ample room they may have heard a little more than there is by now: less than
a 64th of the lower mark.

Below a server's limit are two marks. Above the lower one no push may add rows, and no range moves there. Between the
two is room for repairs after a neighbour has died, which may go up to the upper one; what is above that is for logs,
buffers and what was on its way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from coordinator.core.sizing import fill_mark, rows_mark
from coordinator.core.view import View
from elasticps.server.core.requests import RequestError
from elasticps.system.memory import Reading
from elasticps.wire.frames import MAX_RANGES, FrameError, text, whole, wholes
from replication.chain import Member, Role, place

_MOST, _LEAST = 1 << 62, 1 << 46  # of a neighbour's numbers, so that a server's share of them fits an int64
MAX_NAME = 255
BUFFER_SHARE = 32  # of its limit a server gives at most such a part to each buffer: all fit above the upper mark
REUSABLE_SHARE = 64  # of its limit: so much of what dropped rows have left counts as room; only their table can use it
NEARLY = 0.9  # of the lower mark
AMPLE_SHARE = 4  # of the lower mark: of more room than such a part predecessors hear less often
CHANGE_SHARE = 64  # of the lower mark: of such a change they hear at once
REPORT_LOOKS = 10  # they hear of it at least at every so many looks
AMPLE_BYTES = 4 << 30  # more than pushes can take in AMPLE_LOOKS looks
AMPLE_LOOKS = 5  # with so much room only every so many looks read how much memory is used
SPARE_SHARE = 0.05  # of the limit: so much is left to others in the same group, or on the same machine


class ServerMemory(NamedTuple):
    """What a server may use: `limit` bytes, 0 for all it can get; how much it uses is read with `read`."""

    limit: int = 0
    read: Callable[[], Reading] | None = None

    def share(self, nbytes: int) -> int:
        """So many bytes, or the part of the limit that one buffer may take, if that is less."""
        return min(nbytes, self.limit // BUFFER_SHARE) if self.limit else nbytes


NO_LIMIT = ServerMemory()


class Room(NamedTuple):
    """Bytes that new rows may take at a server that holds so many ranges; what it uses, up to where it takes rows, and
    its limit."""

    nbytes: int
    held: int = 1
    server: str = ""
    used: int = 0
    mark: int = 0
    limit: int = 0


UNLIMITED = 1 << 62  # bytes
ENDLESS = Room(UNLIMITED)


class Headroom:
    """The memory of one server and its successors, in bytes.

    predecessors: who hears of it. limit: 0 for none; used: by this server at the last look, less what dropped rows
    have left; mark: up to where it takes new rows.
    """

    def __init__(self, server: str, memory: ServerMemory) -> None:
        self.limit = memory.limit
        self.used = 0
        self.mark = rows_mark(self.limit, 1, 1)
        self._server = server
        self._read = memory.read
        self._own = ENDLESS
        self._hops = 0
        self._headed = self._held = 1
        self.predecessors: frozenset[Member] = frozenset()
        self._successors: frozenset[Member] = frozenset()
        self._reported: list[Room] = []
        self._looks = 0  # since then
        self._heard: dict[Member, list[Room]] = {}
        self._unread = AMPLE_LOOKS  # looks since memory was read

    def adopt(self, view: View, me: Member) -> None:
        """Follows a view: how many servers there are, and which ones follow this one in some chain."""
        chains = view.as_chains
        where = place(chains, me)
        successors, predecessors = np.unique(where.down[where.down >= 0]), np.unique(where.up[where.up >= 0])
        self.mark = rows_mark(self.limit, len(view.servers), view.replicas)
        self._hops = view.replicas  # a joiner stands behind the tail
        self._headed = int(np.count_nonzero(where.head))
        self._held = max(1, int(np.count_nonzero(where.role != Role.OUT)))
        self._successors = frozenset(chains.members[i] for i in successors.tolist())
        self.predecessors = frozenset(chains.members[i] for i in predecessors.tolist())
        self._reported = []
        self._heard = {member: rooms for member, rooms in self._heard.items() if member in self._successors}

    def look(self, reusable: int) -> None:
        """Reads how much is used. reusable: bytes of the store that the next rows of some of its tables take first;
        what is more than a little of that goes back to the system soon."""
        self._unread = 0
        if self._read is None:
            return
        used, available, left = self._read()
        used = max(used, self.limit - left)  # what counts for a limit of the process is more than it has in memory
        self.used = max(0, used - min(reusable, self.limit // REUSABLE_SHARE))
        room = min(self.mark - self.used, available - int(SPARE_SHARE * self.limit))
        self._own = Room(room, self._held, self._server, self.used, self.mark, self.limit)

    def skips(self) -> bool:
        """Counts a look; returns whether it need not read anything: there was ample room, lately."""
        self._unread += 1
        if self._unread >= AMPLE_LOOKS or self.least.nbytes <= max(AMPLE_BYTES, self.mark // AMPLE_SHARE):
            return False
        self._looks += 1
        return True

    @property
    def short(self) -> bool:
        """Whether pushes may add no rows, or soon."""
        return self.limit > 0 and NEARLY * self.mark < self.used

    @property
    def exceeded(self) -> bool:
        """Whether more is used than rows may take."""
        return self.limit > 0 and fill_mark(self.limit) < self.used

    def receive_report(self, member: Member, document: Mapping[str, Any]) -> None:
        """Takes a neighbour's report; it counts if it is a successor. FrameError for one that cannot be read."""
        try:
            rooms = [
                Room(
                    whole(n, _MOST, -_LEAST),
                    max(1, whole(h, MAX_RANGES)),
                    text(s, MAX_NAME),
                    *wholes(more, _MOST, -_LEAST),
                )
                for n, h, s, *more in document["rooms"]
            ]
        except (KeyError, TypeError, ValueError) as error:
            raise FrameError(f"no rooms: {error}") from None
        if member in self._successors:
            self._heard[member] = rooms

    def report(self) -> dict[str, Any] | None:
        """The report to predecessors: its own room, then the least of its successors by distance. Called at each look;
        None if there is nothing to say: there is no limit here or down a chain, or they know enough."""
        if not self.predecessors or not (self.limit or self._heard):
            return None
        heard = self._heard.values()
        rooms = [self._own]
        rooms += [min((r[hop] for r in heard if hop < len(r)), default=ENDLESS) for hop in range(self._hops - 1)]
        self._looks += 1
        if self._looks < REPORT_LOOKS and len(rooms) == len(self._reported) and all(map(_known, rooms, self._reported)):
            return None
        self._reported, self._looks = rooms, 0
        return {"rooms": rooms}

    @property
    def least(self) -> Room:
        """The smallest room for what is headed here: the server's own, or its part of one down the chains."""
        return min(self._own, self.down_chain)

    @property
    def down_chain(self) -> Room:
        """The smallest room down the chains: this server's part of it."""
        parts = [
            room if room == ENDLESS else room._replace(nbytes=room.nbytes * max(1, self._headed) // room.held)
            for rooms in self._heard.values()
            for room in rooms
        ]
        return min(parts, default=ENDLESS)


def _known(room: Room, reported: Room) -> bool:
    """Whether whoever has heard of `reported` need not hear of `room` yet."""
    same = room[1:3] == reported[1:3] and room[4:] == reported[4:]
    changed = abs(room.nbytes - reported.nbytes) * CHANGE_SHARE > room.mark
    return same and not changed and room.nbytes * AMPLE_SHARE > room.mark


def full(room: Room, server: str, table: str, rows: int, nbytes: int, evicts: bool = False) -> RequestError:
    """Refusal, by `server`, of new rows of `table` that take more than `room`; with no rows, of a worker's share of a
    round. evicts: the table has eviction policies, by which sweeps go on meanwhile."""
    left = f", of which {max(0, room.nbytes):,} are left to pushes at {server}" if room.used < room.mark else ""
    if rows:
        what = f"rows that are there can still be updated, but {rows:,} new rows of table {table!r} need"
    else:
        what = f"gradients for table {table!r}, which are kept until their round closes, need"
    advice = "Add servers (`elasticps scale`), or give them more memory (--memory-limit)"
    if evicts and rows:
        wait = (
            "Sweeps of the table are under way: push the rows of `error.refused` again in a moment. If that is no help"
        )
        advice = f"{wait}: {advice[0].lower()}{advice[1:]}"
    text = (
        f"server {room.server} uses {room.used:,} bytes, and takes new rows up to {room.mark:,} of its limit of "
        f"{room.limit:,}{left}; {what} {nbytes:,}. {advice}"
    )
    return RequestError("memory", text, server=room.server, table=table, bytes=nbytes)
