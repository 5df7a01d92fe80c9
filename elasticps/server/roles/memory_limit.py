"""Keeps pushes from adding rows where memory runs out: here, or at the servers down the chains."""

from __future__ import annotations

import numpy as np

from elasticps.memory import give_back
from elasticps.server.core.headroom import UNLIMITED, Headroom, Memory, full
from elasticps.server.core.requests import Body, RequestError
from elasticps.server.core.validation import PushRows
from elasticps.server.network.connection import Connection, Handler
from elasticps.server.roles.context import Context
from elasticps.server.roles.replica_links import ReplicaLinks
from elasticps.store import Table
from elasticps.wire.frames import Block, Header, Kind, json_body, json_frame

TIDIED_ROWS = 20_000  # in a look: some milliseconds
SHARES_BYTES = 256 << 20  # of shares of open rounds, as far as the limit lets it, need no room: rounds go on without
GIVE_BACK_LOOKS = 20  # where memory is short, one of so many also has the C library return what it keeps


class MemoryLimit:
    """What `headroom` knows, for pushes to take from, and for neighbours. What is left is in the compiled path."""

    def __init__(self, context: Context, headroom: Headroom, links: ReplicaLinks) -> None:
        self._headroom = headroom
        self._store = context.executor.store
        self._path = context.path
        self._links = links
        self._server = context.me.name
        self._short_looks = 0
        self.handlers: dict[int, Handler] = {Kind.ROOM: self._hear}

    def look(self) -> None:
        """Called several times a second: sets how much room pushes may take, and tells neighbours. Memory of rows that
        were dropped goes back a little at a time: only their own table could use it."""
        self._store.reclaim(TIDIED_ROWS)
        self._headroom.look(self._store.reusable_bytes)
        if self._headroom.short:
            self._short_looks += 1
            if self._short_looks % GIVE_BACK_LOOKS == 1:
                give_back()
                self._headroom.look(self._store.reusable_bytes)
        self._path.room = self._headroom.least.nbytes
        if self._headroom.limited:
            self._links.broadcast(json_frame(Kind.ROOM, self._headroom.told()))

    def take(self, blocks: list[Block]) -> None:
        """Room for the rows that blocks add, in all tables or in none. Raises `RequestError` if there is none."""
        rows = PushRows(blocks)
        self.limit(rows)
        if rows.error is not None:
            raise rows.error

    def limit(self, push: PushRows, share: int = 0, kept: int = 0) -> None:
        """Takes room for the rows that a push adds, or refuses all of these; rows that are there need none. share:
        bytes that it takes as a share of a round, beside `kept` of those that there are; more than some need room too,
        and without room all of the share is refused."""
        room, needed = self._path.room, 0
        if room > UNLIMITED // 2:
            return
        tables = self._store.tables
        if share and share + kept > Memory(self._headroom.limit).share(SHARES_BYTES):
            needed = share
            if needed > room:
                push.refuse_all(self._full(tables[push.blocks[0].table], 0, share))
                return
        missing = [tables[block.table].missing(block.keys) for block in push.blocks]
        taken = needed
        for block, mask in zip(push.blocks, missing, strict=True):
            table, rows = tables[block.table], int(np.count_nonzero(mask))
            taken += rows * table.row_bytes
            if rows and taken > room:
                push.refuse(self._full(table, rows, rows * table.row_bytes), missing)
                taken = needed
                break
        self._path.room = room - taken

    def _full(self, table: Table, rows: int, nbytes: int) -> RequestError:
        least = self._headroom.least
        left = least._replace(nbytes=min(least.nbytes, self._path.room))
        return full(left, self._server, table.spec.name, rows, nbytes)

    def _hear(self, connection: Connection, header: Header, body: Body) -> None:
        if connection.member is not None and self._links.link(connection.member) is connection:
            self._headroom.heard(connection.member, json_body(body.data))
            self._path.room = min(self._path.room, self._headroom.behind.nbytes)
