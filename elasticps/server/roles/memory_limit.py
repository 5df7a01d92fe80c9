"""Refuses rows that pushes add where memory runs out: here, or at the servers down the chains."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from elasticps.model.spec import TableSpec
from elasticps.server.core.headroom import UNLIMITED, Headroom, ServerMemory, full
from elasticps.server.core.requests import Body, RequestError
from elasticps.server.core.validation import PushRows
from elasticps.server.network.connection import Connection, Handler
from elasticps.server.roles.context import Context
from elasticps.server.roles.replica_links import ReplicaLinks
from elasticps.store import Table
from elasticps.store.admission import ADDS_CANDIDATE, ADDS_NOTHING, ADDS_ROW, BLOCKS, sketch_width
from elasticps.store.index import GROWN_BYTES
from elasticps.system.memory import give_back
from elasticps.wire.frames import Block, Header, Kind, json_body, json_frame

RECLAIMED_ROWS = 20_000  # rows freed in one look: some milliseconds
SHARES_BYTES = 256 << 20  # shares of open rounds up to this, or less under a small limit, need no room
GIVE_BACK_LOOKS = 20  # where memory is short, every so many looks the C library returns what it has freed


class MemoryLimit:
    """Takes room for rows that pushes add, and tells predecessors how much is left. The compiled path has the room that
    is left in `path.room`."""

    def __init__(self, context: Context, headroom: Headroom, links: ReplicaLinks) -> None:
        self._headroom = headroom
        self._store = context.executor.store
        self._path = context.path
        self._links = links
        self._serving = context.serving
        self._server = context.me.name
        self._short_looks = 0
        self.handlers: dict[int, Handler] = {Kind.ROOM: self._hear}

    def look(self) -> None:
        """Called several times a second: measures memory, sets how much room pushes may take, and tells predecessors.
        Memory of dropped rows is freed a little at a time; until then only their own table can use it."""
        self._store.reclaim(RECLAIMED_ROWS)
        if self._headroom.skips():
            return  # `path.room` is what was left, less what rows have taken since
        self._headroom.look(self._store.reusable_bytes)
        if self._headroom.short:
            self._short_looks += 1
            if self._short_looks % GIVE_BACK_LOOKS == 1:
                give_back()
                self._headroom.look(self._store.reusable_bytes)
        self._path.room = self._headroom.least.nbytes
        if (report := self._headroom.report()) is not None:
            self._links.tell(self._headroom.predecessors, json_frame(Kind.ROOM, report))

    def take(self, blocks: list[Block]) -> None:
        """Room for the rows that blocks add, in all tables or in none. Raises `RequestError` if there is none."""
        rows = PushRows(blocks)
        self.limit(rows)
        if rows.error is not None:
            raise rows.error

    def limit(self, push: PushRows, share: int = 0, open_bytes: int = 0, step: tuple[int, int] | None = None) -> None:
        """Takes room for the rows that a push adds, or refuses those rows; existing rows need none. share: bytes of the
        push as a share of a round; open_bytes: of all shares of open rounds. Above a limit shares need room, too, and
        without it the whole share is refused. step: its worker and progress, by which keys get a row, or wait for one
        and need less; None: all get one."""
        room, needed = self._path.room, 0
        if room > UNLIMITED // 2:
            return
        tables = self._store.tables
        if share and share + open_bytes > ServerMemory(self._headroom.limit).share(SHARES_BYTES):
            needed = share
            if needed > room:
                push.refuse_all(self._full(tables[push.blocks[0].table], 0, share))
                return
        missing = [tables[block.table].missing(block.keys) for block in push.blocks]
        several = [_bytes_of(tables[b.table], b.keys, mask, step) for b, mask in zip(push.blocks, missing, strict=True)]
        taken = needed
        for block, mask, nbytes in zip(push.blocks, missing, several, strict=True):
            taken += nbytes
            if nbytes and taken > room:
                push.refuse(self._full(tables[block.table], int(np.count_nonzero(mask)), nbytes), missing)
                taken = needed
                break
        self._path.room = room - taken

    def take_waiting(self, table: Table, keys: int) -> None:
        """Room for so many keys that wait for a row of a table. Raises `RequestError` if there is none."""
        if self._path.room > UNLIMITED // 2:
            return
        if keys * GROWN_BYTES > max(0, self._path.room):
            raise self._full(table, keys, keys * GROWN_BYTES)
        self._path.room -= keys * GROWN_BYTES

    def take_sketch(self, spec: TableSpec, table: Table | None = None) -> None:
        """Room for the sketches that a table under the policies of `spec` has in ranges headed here, less those that
        are there. Raises `RequestError` if there is none."""
        if self._path.room > UNLIMITED // 2:
            return
        width, there = sketch_width(spec.admission, self._store.ranges), {}
        if table is not None and table.lifecycle is not None:
            there = table.lifecycle.waiting.sketches
        made = [r for r in self._serving.headed.tolist() if r not in there or there[r].shape[1] != width]
        nbytes, least = len(made) * BLOCKS * width, self._headroom.least
        if nbytes > max(0, self._path.room):
            raise RequestError(
                "memory",
                f"server {least.server} uses {least.used:,} bytes, and takes rows and sketches up to {least.mark:,} of "
                f"its limit of {least.limit:,}; the sketch of table {spec.name!r} needs {nbytes:,} for the ranges that "
                f"server {self._server} heads. Give MinCountSketch a smaller nbytes, add servers (`elasticps scale`), "
                "or give them more memory (--memory-limit)",
                server=least.server, table=spec.name, bytes=nbytes,
            )  # fmt: skip
        self._path.room -= nbytes

    def _full(self, table: Table, rows: int, nbytes: int) -> RequestError:
        least = self._headroom.least
        left = least._replace(nbytes=min(least.nbytes, self._path.room))
        evicts = table.lifecycle is not None and table.lifecycle.evicts
        return full(left, self._server, table.spec.name, rows, nbytes, evicts)

    def _hear(self, connection: Connection, header: Header, body: Body) -> None:
        if connection.member is not None and self._links.link(connection.member) is connection:
            self._headroom.receive_report(connection.member, json_body(body.data))
            self._path.room = min(self._path.room, self._headroom.down_chain.nbytes)


def _bytes_of(table: Table, keys: NDArray[np.int64], mask: NDArray[np.bool_], step: tuple[int, int] | None) -> int:
    """Bytes that keys [n] without a row, as bool [n] has them, take in a step of a worker. Leaves those in the mask
    that take any."""
    if table.lifecycle is None or step is None or not mask.any():
        return int(np.count_nonzero(mask)) * table.row_bytes
    found = table.lifecycle.waiting.foresee(keys[mask], *step)
    mask[mask] = found != ADDS_NOTHING
    rows, candidates = (int(np.count_nonzero(found == kind)) for kind in (ADDS_ROW, ADDS_CANDIDATE))
    return rows * table.row_bytes + candidates * GROWN_BYTES
