"""A server's part in a consistent cut: makes its workers hold, logs the cut, reports the state at it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

import numpy as np

from elasticps.admin.interface import CutState, CutTaken, CutWritten, WorkerHeld, Writing
from elasticps.server.core.cut import CutHold, by_column
from elasticps.server.core.operations import CutMark
from elasticps.server.core.requests import Asker, Body
from elasticps.server.network.connection import Connection, Handler
from elasticps.server.roles.context import Context
from elasticps.wire.frames import FrameError, Header, Kind
from elasticps.wire.headers import HeldHeader, ReleaseHeader
from replication.effects import Status
from replication.messages import OperationKind
from replication.progress import MAX_CLOCK

AT_ONCE = 64  # ranges of one operation: their clocks are copied as it is applied


class CutHandler:
    """Holds workers for a cut, logs it, and reports what was there. workers: their connections; writing: waits some
    seconds for the checkpoint of a cut, and tells how far it is; None if this server writes none."""

    def __init__(
        self, context: Context, workers: Callable[[], Iterable[Connection]],
        writing: Callable[[int, float], Awaitable[Writing | None]],
    ) -> None:  # fmt: skip
        self._serving = context.serving
        self._executor = context.executor
        self._workers = workers
        self._clock = context.clock
        self._holding = CutHold()
        self._writing = writing
        self.handlers: dict[int, Handler] = {Kind.HELD: self._held}

    # --- workers ----------------------------------------------------------------------------------------------------

    def greet(self, connection: Asker) -> None:
        """Tells a worker that was welcomed whether to hold, or that it need not any more: it may have been told to on
        other connections, which have ended since."""
        hold = self._holding.tells(connection.app, self._clock())
        if hold is not None:
            connection.send(hold.header().pack())
        elif self._holding.released:
            connection.send(ReleaseHeader(self._holding.released).header().pack())

    def _held(self, connection: Connection, header: Header, body: Body) -> None:
        held = HeldHeader.of(header)
        if held.worker != connection.worker or held.clock >= MAX_CLOCK:
            raise FrameError(f"worker {connection.worker} says that {held.worker} holds at clock {held.clock}")
        if self._holding.hear(connection.app, held, self._clock()):
            for other in self._workers():
                if other.app == connection.app:
                    self.greet(other)

    # --- the coordinator of a cut -----------------------------------------------------------------------------------

    def hold(self, cut: int, hold_s: float) -> bool:
        """Makes all workers hold, also those that connect later; False if that time is over, or a newer cut is
        taken."""
        new = cut > self._holding.cut
        held = self._holding.begin(cut, hold_s, self._clock())
        if held and new:
            for connection in self._workers():
                self.greet(connection)
        return held

    def held(self, cut: int) -> dict[int, WorkerHeld]:
        """The workers that hold, and what they report."""
        return self._holding.held(cut, self._clock())

    def release(self, cut: int) -> None:
        """Lets workers go on."""
        if self._holding.release(cut):
            frame = ReleaseHeader(cut).header().pack()
            for connection in self._workers():
                connection.send(frame)

    async def take(self, cut: int, since: int, url: str) -> bool:
        """Logs a cut once in each range headed here that has not passed it; returns when all replicas have. False if
        the view changed meanwhile: ask again."""
        me, passed, tickets = self._serving.me, self._executor.store.cuts.newest, []
        mark = CutMark(cut, since, me.name, me.incarnation, url)
        headed = self._serving.headed
        for at in range(0, len(headed), AT_ONCE):
            some = headed[at : at + AT_ONCE]
            ranges = some[passed[some] < cut]
            if len(ranges):
                tickets.append(self._executor.log(self._serving.epoch, OperationKind.CUT, ranges, mark, 64))
                await asyncio.sleep(0)
        replies = [await ticket.future for ticket in tickets]
        done = all(reply.status is Status.COMMITTED and not len(reply.moved) for reply in replies)
        return done and not np.count_nonzero(passed[self._serving.headed] < cut)

    def state(self, cut: int) -> CutState:
        """The state at a cut, of the ranges in which this server has logged it."""
        me, notes = self._serving.me, self._executor.cuts
        mine = list(notes.by(cut, me.name, me.incarnation))
        taken = [CutTaken(tuple(ranges), column.clocks(), dict(column.closed), column.retained)
                 for column, ranges in by_column(mine).items()]  # fmt: skip
        homes = {r: noted.home for r, noted in mine if noted.home is not None}
        roster = self._executor.replica.admission.roster or ()
        records = [(worker, one) for _, noted in mine for worker, one in noted.records if worker not in roster]
        passed = int(self._executor.store.cuts.newest.max())  # a range may have come with it, or from a checkpoint
        newest = max(notes.newest, self._holding.cut, passed)
        return CutState(me.incarnation, self._serving.epoch, newest, taken, homes, records)

    async def written(self, cut: int, wait_s: float) -> CutWritten:
        """Starts to write the cut if that has not begun; reports how far it is, when it is done or after `wait_s`."""
        writing, me = await self._writing(cut, wait_s), self._serving.me
        return CutWritten(me.incarnation, sum(1 for _ in self._executor.cuts.by(cut, me.name, me.incarnation)), writing)
