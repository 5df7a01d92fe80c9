"""Functions over all rows of a range, for workers that ask: computed a slice at a time, one slice in a turn of the
loop, so that pushes and pulls go on in between. Connections take turns."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from coordinator.core import fields
from elasticps.errors import SpecError
from elasticps.server.core.partial import Partial
from elasticps.server.core.requests import Body, RequestError
from elasticps.server.core.validation import unknown_table
from elasticps.server.network.connection import Connection, Handler
from elasticps.server.roles.context import Context
from elasticps.server.roles.pulls import PullHandler
from elasticps.store import Table
from elasticps.store.reductions import reduction
from elasticps.wire.frames import Buffer, FrameError, Header, Kind, json_frame
from elasticps.wire.reducing import ReducedHeader, ReduceHeader, read_function

log = fields.logger(__name__)

MAX_WAITING = 4096  # of all connections


class _Job(NamedTuple):
    asked: ReduceHeader
    table: Table
    partial: Partial
    slices: Iterator[None]
    name: str


class ReduceHandler:
    """Queues reductions of ranges, and computes one slice in each turn of the loop. waiting: how many ranges wait."""

    def __init__(self, context: Context, pulls: PullHandler) -> None:
        self._loop = context.loop
        self._serving = context.serving
        self._held = context.held
        self._notifier = context.notifier
        self._store = context.executor.store
        self._registered = context.registered
        self._pulls = pulls
        self._jobs: dict[Connection, deque[_Job]] = {}  # whose turn it is comes first
        self.waiting = 0
        self._running = False
        self.handlers: dict[int, Handler] = {Kind.REDUCE: self._reduce}

    def forget(self, connection: Connection) -> None:
        """Nobody waits for its answers any more."""
        self.waiting -= len(self._jobs.pop(connection, ()))

    def _reduce(self, connection: Connection, header: Header, body: Body) -> None:
        if self._held.wait_for_view(connection, header, body):
            return
        asked = ReduceHeader.of(header)
        if asked.range >= self._serving.ranges:
            raise FrameError(f"there is no range {asked.range}, there are {self._serving.ranges}")
        name, constants = read_function(body.data)
        self._check(asked)
        self._registered.permit(asked.table, connection.app)
        table = self._store.live.get(asked.table)
        if table is None:
            raise unknown_table(self._serving.me.name, asked.table)
        try:
            how = reduction(name, constants)
        except SpecError as error:
            raise RequestError("spec", f"server {self._serving.me.name}: {error}") from None
        if self.waiting >= MAX_WAITING:
            raise RequestError("busy", f"{MAX_WAITING} ranges wait already to be reduced here")
        partial = Partial(table, asked.range, how, constants)
        self._jobs.setdefault(connection, deque()).append(_Job(asked, table, partial, partial.slices(), name))
        self.waiting += 1
        self._go_on()

    def _check(self, asked: ReduceHeader) -> None:
        """The range is read here, and has been since the epoch of whoever asks."""
        if not self._serves(asked):
            me, epoch = self._serving.me.name, self._serving.epoch
            text = f"server {me} is at epoch {epoch}, the request at {asked.epoch}"
            raise RequestError("stale-view", text, epoch=epoch)

    def _serves(self, asked: ReduceHeader) -> bool:
        serving = self._serving
        return serving.serves(asked.epoch, anywhere=False) and bool((serving.tailed == asked.range).any())

    def _go_on(self) -> None:
        if self._jobs and not self._running:
            self._running = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        """One slice of the oldest range of the connection whose turn it is."""
        self._running = False
        if not self._jobs:
            return
        connection, jobs = next(iter(self._jobs.items()))
        job = jobs[0]
        try:
            done = self._work(connection, job)
        except RequestError as error:
            done = True
            self._notifier.refuse(connection, job.asked.request, error)
        except Exception as error:
            done = True
            connection.fail(error)
        if self._jobs.pop(connection, None) is not None:
            if done:
                jobs.popleft()
                self.waiting -= 1
            if jobs:
                self._jobs[connection] = jobs
        self._go_on()

    def _work(self, connection: Connection, job: _Job) -> bool:
        """False: there is more to do."""
        self._check(job.asked)
        if job.table.dropped:
            raise unknown_table(self._serving.me.name, job.asked.table)
        try:
            if next(job.slices, self) is not self:
                return False
        except Exception as failure:  # of a user's function
            log.warning("a reduction failed", name=job.name, exc_info=True)
            raise RequestError("failed", f"reduction {job.name!r} of a range failed: {failure!r:.200}") from failure
        connection.stream(self._answer(connection, job))
        return True

    def _answer(self, connection: Connection, job: _Job) -> Iterator[list[Buffer]]:
        """As of a pull: nothing is shown that the next tail may lack."""
        asked, partial = job.asked, job.partial
        may_show = self._pulls.shown_when(connection, asked.range)
        while not may_show() and self._serves(asked):
            yield []
        if not self._serves(asked):
            document = {"code": "stale-view", "message": "the range left this server before it could be shown"}
            yield [json_frame(Kind.ERROR, document, request=asked.request, epoch=self._serving.epoch)]
            return
        floats = 0 if partial.state is None else len(partial.state)
        header = ReducedHeader(asked.request, asked.epoch, asked.range, partial.rows, floats).header().pack()
        yield [header] if partial.state is None else [header, partial.state.data.cast("B")]
