"""Computes functions over all rows of a range for workers: one slice in a turn of the loop, so that pushes and pulls go
on in between. Connections take turns."""

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
from elasticps.wire.frames import Buffer, FrameError, Header, Kind
from elasticps.wire.reducing import ReducedHeader, ReduceHeader, read_function

log = fields.logger(__name__)

MAX_WAITING = 4096  # of all connections


class _Job(NamedTuple):
    request: ReduceHeader
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
        self._jobs: dict[Connection, deque[_Job]] = {}  # by connection; the first one has its turn next
        self.waiting = 0
        self._running = False
        self.handlers: dict[int, Handler] = {Kind.REDUCE: self._reduce}

    def forget(self, connection: Connection) -> None:
        """A connection has ended: its reductions are dropped."""
        self.waiting -= len(self._jobs.pop(connection, ()))

    def _reduce(self, connection: Connection, header: Header, body: Body) -> None:
        if self._held.wait_for_view(connection, header, body):
            return
        request = ReduceHeader.of(header)
        if request.range >= self._serving.ranges:
            raise FrameError(f"there is no range {request.range}, there are {self._serving.ranges}")
        name, constants = read_function(body.data)
        self._check(request)
        self._registered.permit(request.table, connection.app)
        table = self._store.live.get(request.table)
        if table is None:
            raise unknown_table(self._serving.me.name, request.table)
        try:
            how = reduction(name, constants)
        except SpecError as error:
            raise RequestError("spec", f"server {self._serving.me.name}: {error}") from None
        if self.waiting >= MAX_WAITING:
            raise RequestError("busy", f"{MAX_WAITING} ranges wait already to be reduced here")
        partial = Partial(table, request.range, how, constants)
        self._jobs.setdefault(connection, deque()).append(_Job(request, table, partial, partial.slices(), name))
        self.waiting += 1
        self._go_on()

    def _check(self, request: ReduceHeader) -> None:
        """The range is read here, and has been since the epoch of whoever asks."""
        if not self._serves(request):
            me, epoch = self._serving.me.name, self._serving.epoch
            text = f"server {me} is at epoch {epoch}, the request at {request.epoch}"
            raise RequestError("stale-view", text, epoch=epoch)

    def _serves(self, request: ReduceHeader) -> bool:
        serving = self._serving
        return serving.serves(request.epoch, anywhere=False) and bool((serving.tailed == request.range).any())

    def _go_on(self) -> None:
        if self._jobs and not self._running:
            self._running = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        """Computes one slice, of the oldest request of the connection whose turn it is."""
        self._running = False
        if not self._jobs:
            return
        connection, jobs = next(iter(self._jobs.items()))
        job = jobs[0]
        try:
            done = self._work(connection, job)
        except RequestError as error:
            done = True
            self._notifier.refuse(connection, Kind.REDUCE, job.request.request, error)
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
        """Computes one slice; True once the answer is on its way."""
        self._check(job.request)
        if job.table.dropped:
            raise unknown_table(self._serving.me.name, job.request.table)
        try:
            if next(job.slices, self) is not self:
                return False
        except Exception as failure:  # of a user's function
            log.warning("a reduction failed", name=job.name, exc_info=True)
            raise RequestError("failed", f"reduction {job.name!r} of a range failed: {failure!r:.200}") from failure
        connection.stream(self._answer(connection, job))
        return True

    def _answer(self, connection: Connection, job: _Job) -> Iterator[list[Buffer]]:
        """Sends the answer when it may be shown: as in a pull, only what the next tail has, too."""
        request, partial = job.request, job.partial
        may_show = self._pulls.shown_when(connection, request.range)
        while not may_show() and self._serves(request):
            yield []
        if not self._serves(request):
            document = {"code": "stale-view", "message": "the range left this server before it could be shown"}
            yield [connection.errors.for_request(Kind.REDUCE, request.request, document, self._serving.epoch)]
            return
        floats = 0 if partial.state is None else len(partial.state)
        header = ReducedHeader(request.request, request.epoch, request.range, partial.rows, floats).header().pack()
        yield [header] if partial.state is None else [header, partial.state.data.cast("B")]
