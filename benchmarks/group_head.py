"""What synchronous rounds and bounded delay take the head of a group range: a whole server, without sockets.

What workers and other servers send is handed to its connections as sockets would hand it over. Only what the server
does with it is measured, not the making and reading of frames for it.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np

from coordinator.core.view import Roster, ServerInfo, View, WorkerInfo
from elasticps.errors import Error
from elasticps.kernels.hashing import group_range
from elasticps.server.network.busy_poll import BusyPoll
from elasticps.server.network.connection import Connection
from elasticps.server.options import ServerOptions
from elasticps.server.server import Server
from elasticps.wire.delay import AskClockHeader, ReleasedHeader, ReportClock
from elasticps.wire.frames import HEADER_BYTES, Buffer, Header, Kind, json_body, json_frame, unpack_header
from elasticps.wire.headers import BarrierArriveHeader, BarrierJoinHeader
from elasticps.wire.joining import JoinHeader
from elasticps.wire.rounds import RoundClosedHeader

APP, CLUSTER, EPOCH = "default", "bench", 1
TOGETHER = 100  # workers whose frames have come when the server looks
_TURNS = 1000  # of the loop, until the server must have come to rest

Frame: TypeAlias = tuple[Header, bytes]


@dataclass(frozen=True)
class RoundCost:
    """A synchronous round at the head: milliseconds of CPU, and frames that it receives and sends."""

    servers: int
    workers: int
    cpu_ms: float
    received: int
    sent: int


@dataclass(frozen=True)
class DelayCost:
    """A step of each worker under bounded delay: milliseconds of CPU at the head, and frames, means over all steps.
    waits: questions of workers whose pulls wait; asks: of the head, where workers are; reports: answers to these.
    begin_ms: what it takes a new head until it has heard of all workers."""

    staleness: int
    workers: int
    begin_ms: float
    cpu_ms: float
    waits: float
    asks: float
    reports: float


def view_of(servers: int, ranges: int, app: str = APP) -> View:
    """Ranges dealt out to so many servers, with one copy; the first one heads an application's group range."""
    first = group_range(app, ranges)
    return View(
        CLUSTER, EPOCH, ranges, 1,
        tuple(ServerInfo(f"s{i}", 1, f"10.0.{i // 250}.{i % 250}:7000") for i in range(servers)),
        ((np.arange(ranges, dtype=np.int32) - first) % servers).reshape(ranges, 1).astype(np.int32),
        np.full(ranges, -1, np.int32), np.full(ranges, EPOCH, np.int64), "bench",
    )  # fmt: skip


def frames_in(data: bytes) -> list[Frame]:
    """Cuts what was sent into its frames."""
    found, at = list[Frame](), 0
    while at < len(data):
        header = unpack_header(data[at : at + HEADER_BYTES])
        found.append((header, data[at + HEADER_BYTES : at + HEADER_BYTES + header.body]))
        at += HEADER_BYTES + header.body
    return found


class _Wire(asyncio.Transport):
    """A transport without a socket."""

    def __init__(self, connection: Connection, written: list[_Wire]) -> None:
        super().__init__({"peername": ("127.0.0.1", 1)})
        self._connection = connection
        self._written = written  # those to which something was written
        self._out = bytearray()
        connection.connection_made(self)

    def feed(self, data: bytes) -> None:
        """The server receives bytes."""
        connection, n = self._connection, len(data)
        connection.get_buffer(-1)[:n] = data
        connection.buffer_updated(n)

    def taken(self) -> list[Frame]:
        """What the server has sent since the last call."""
        data = bytes(self._out)
        self._out.clear()
        return frames_in(data)

    def write(self, data: Any) -> None:
        if not self._out:
            self._written.append(self)
        self._out += data

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        for data in list_of_data:
            self.write(data)

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def is_closing(self) -> bool:
        return False

    def is_reading(self) -> bool:
        return True

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def close(self) -> None:
        raise Error(f"the server ends a connection: {bytes(self._out)!r}")

    def abort(self) -> None:
        pass


class _SocketlessLoop(asyncio.SelectorEventLoop):
    """Gives who dials a transport without a socket."""

    add_reader = asyncio.AbstractEventLoop.add_reader  # so that the server has the loop dial, not compiled code

    def __init__(self) -> None:
        super().__init__()
        self.dialled: Callable[[Connection], _Wire]

    async def create_connection(self, protocol_factory: Any, *args: Any, **kwargs: Any) -> Any:
        connection = protocol_factory()
        return self.dialled(connection), connection


class _NoPolling(BusyPoll):
    """Sockets are polled, and there are none."""

    def touched(self) -> None:
        pass


class GroupHead:
    """The server, and the wires to it: of workers by id, and of the servers that it has dialled. cpu_s: what it has
    taken so far."""

    def __init__(self, loop: _SocketlessLoop, servers: int, ranges: int, workers: int) -> None:
        self.cpu_s = 0.0
        self._written: list[_Wire] = []
        self.links: list[_Wire] = []
        loop.dialled = self._dial
        view = view_of(servers, ranges)
        self.server = Server(view.servers[0], CLUSTER, ranges, loop, ServerOptions(busy_poll=_NoPolling(loop)))
        infos = tuple(WorkerInfo(w, f"w{w}", 1, APP) for w in range(1, workers + 1))
        self.server.follow(Roster(1, infos, CLUSTER))
        self.server.adopt(view)
        self.workers: dict[int, _Wire] = {}
        self.names: dict[_Wire, int] = {}

    def _dial(self, connection: Connection) -> _Wire:
        wire = _Wire(connection, self._written)
        self.links.append(wire)
        return wire

    async def connect(self, workers: Sequence[int]) -> None:
        """Workers say hello, and join at clock 0."""
        for worker in workers:
            wire = self.workers[worker] = _Wire(self.server.connection(), self._written)
            self.names[wire] = worker
            hello = {"cluster": CLUSTER, "worker": worker, "name": f"w{worker}", "app": APP}
            wire.feed(json_frame(Kind.HELLO, hello) + _packed(JoinHeader(0).header(), 1))
        await self.send(())

    async def send(self, frames: Iterable[tuple[_Wire, bytes]]) -> dict[_Wire, list[Frame]]:
        """The server receives frames and comes to rest. Returns what it sends."""
        frames, written = list(frames), self._written
        began = time.process_time()
        for wire, data in frames:
            wire.feed(data)
        for _ in range(_TURNS):
            before = len(written)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            if len(written) == before:
                break
        self.cpu_s += time.process_time() - began
        found = {wire: wire.taken() for wire in written}
        written.clear()
        return found


def _packed(header: Header, request: int, body: Buffer = b"") -> bytes:
    return header._replace(request=request, epoch=EPOCH, body=len(body)).pack() + body


def _run(work: Callable[[_SocketlessLoop], Any]) -> Any:
    loop = _SocketlessLoop()
    try:
        return loop.run_until_complete(work(loop))
    finally:
        loop.close()


# --- synchronous rounds -----------------------------------------------------------------------------------------------


def rounds(*, servers: int, ranges: int, workers: int, count: int) -> RoundCost:
    """Measures so many rounds. Error if a worker or a server is not sent what it should be."""
    return cast(RoundCost, _run(lambda loop: _rounds(loop, servers, ranges, workers, count)))


async def _rounds(loop: _SocketlessLoop, servers: int, ranges: int, workers: int, count: int) -> RoundCost:
    head = GroupHead(loop, servers, ranges, workers)
    ids = list(range(1, workers + 1))
    await head.connect(ids)
    joins = [(head.workers[w], _packed(BarrierJoinHeader(w).header(), 2)) for w in ids]
    _expect(await head.send(joins), head.workers.values(), Kind.BARRIER_DECISION, {"base": 0, "last": 0})
    await _round(head, ids, 1, servers - 1)  # dials the other servers, which learn who all the workers are
    head.cpu_s, received, sent = 0.0, 0, 0
    for clock in range(2, count + 2):
        counts = await _round(head, ids, clock, servers - 1)
        received, sent = received + counts[0], sent + counts[1]
    head.server.close()
    return RoundCost(servers, workers, round(1e3 * head.cpu_s / count, 2), received // count, sent // count)


async def _round(head: GroupHead, ids: Sequence[int], clock: int, others: int) -> tuple[int, int]:
    """One round. Returns how many frames the head has received and sent."""
    arrivals = [(head.workers[w], _packed(BarrierArriveHeader(w, clock).header(), clock + 2)) for w in ids]
    found = await head.send(arrivals)
    if clock == 1 and others:  # it has dialled them, and said hello
        welcome = json_frame(Kind.WELCOME, {"server": "s", "incarnation": 1, "cluster": CLUSTER}, epoch=EPOCH)
        found = await head.send((wire, welcome) for wire in head.links)
    if others:
        closes = {wire: frames[0][0] for wire, frames in found.items()}
        if closes.keys() != set(head.links) or any(
            (header.kind, header.clock) != (Kind.ROUND_CLOSE, clock) for header in closes.values()
        ):
            raise Error(f"the head announces round {clock} to {len(closes)} servers, not to each of {others}")
        closed = [(wire, RoundClosedHeader(header.request).header().pack()) for wire, header in closes.items()]
        found = await head.send(closed)
    _expect(found, head.workers.values(), Kind.BARRIER_DECISION, {"round": clock})
    return len(ids) + others, len(found) + others


def _expect(
    found: dict[_Wire, list[Frame]], wires: Iterable[_Wire], kind: Kind, document: dict[str, Any]
) -> None:  # fmt: skip
    """Error unless each wire, and no other, has got this one frame."""
    if found.keys() != set(wires):
        raise Error(f"{len(found)} of {len(set(wires))} peers got a {kind.name}")
    for (header, body), *more in found.values():
        if more or header.kind != kind or json_body(body) != document:
            raise Error(f"the server sent {header}, {body!r}, {more} instead of a {kind.name} with {document}")


# --- bounded delay ----------------------------------------------------------------------------------------------------


class _DelayedWorker:
    """A worker under bounded delay: what it tells the head, and whether its pull waits."""

    def __init__(self, worker: int, wire: _Wire) -> None:
        self.worker = worker
        self.wire = wire
        self.committed = 0
        self.released = 0
        self.due: int | None = None  # the head wants a report from this clock on
        self.floor = 0  # its pull waits for that; 0 if none does
        self.requests = 1

    def question(self, floor: int) -> bytes:
        """Asks the head to answer when a clock is released; 0: when it counts this worker."""
        self.floor = floor
        self.requests += 1
        return self._report(floor, self.requests)

    def reported(self) -> bytes | None:
        """The report that the head wants, if this worker has come so far."""
        if self.due is None or self.committed < self.due:
            return None
        self.due = None
        return self._report(0, 0)

    def _report(self, floor: int, request: int) -> bytes:
        report = ReportClock(self.worker, EPOCH, self.committed, self.released, floor, 0, request)
        return report.header().pack() + report.body


class _DelayedStory:
    """Workers that take one step after another, each as soon as its pull may be answered."""

    def __init__(self, head: GroupHead, staleness: int) -> None:
        self.head, self.staleness = head, staleness
        self.workers = {wire: _DelayedWorker(worker, wire) for worker, wire in head.workers.items()}
        self.waits = self.asks = self.reports = 0
        self.lowest = 0  # what all have committed
        self.random = random.Random(1)

    async def join(self) -> None:
        """The head counts all workers."""
        await self._exchange([(each.wire, each.question(0)) for each in self.workers.values()])

    async def step(self) -> None:
        """Each worker commits a step, in any order, and pulls for the next one."""
        order = list(self.workers.values())
        self.random.shuffle(order)
        for at in range(0, len(order), TOGETHER):
            frames = list[tuple[_Wire, bytes]]()
            for each in order[at : at + TOGETHER]:
                each.committed += 1
                if (report := each.reported()) is not None:
                    self.reports += 1
                    frames.append((each.wire, report))
                if (floor := each.committed - self.staleness) > each.released:
                    self.waits += 1
                    frames.append((each.wire, each.question(floor)))
            await self._exchange(frames)
        if waiting := [each.worker for each in order if each.floor]:
            raise Error(f"all have committed the step, and pulls of workers {waiting[:10]} wait")

    async def _exchange(self, frames: list[tuple[_Wire, bytes]]) -> None:
        """The head receives frames, workers what it sends, and so on until nothing is under way."""
        self.lowest = min(each.committed for each in self.workers.values())
        while frames:
            found, frames = await self.head.send(frames), []
            for wire, got in found.items():
                worker = self.workers[wire]
                for header, _ in got:
                    self._receive(worker, header)
                if (report := worker.reported()) is not None:
                    self.reports += 1
                    frames.append((wire, report))

    def _receive(self, worker: _DelayedWorker, header: Header) -> None:
        if header.kind == Kind.ASK_CLOCK:
            self.asks += 1
            worker.due = AskClockHeader.of(header).clock
        elif header.kind == Kind.RELEASED:
            answer = ReleasedHeader.of(header)
            if answer.request != worker.requests or not worker.floor <= answer.clock <= self.lowest:
                text = f"{worker.worker} waits for {worker.floor} and gets {answer}; all have committed {self.lowest}"
                raise Error(f"worker {text}")
            worker.released, worker.floor = answer.clock, 0
        else:
            raise Error(f"worker {worker.worker} gets {header}")


def delays(*, staleness: int, servers: int, ranges: int, workers: int, count: int) -> DelayCost:
    """Measures so many times `staleness` + 1 steps of each worker, of which it waits in one or two. Error if a pull is
    released too early, or waits for nothing."""
    return cast(DelayCost, _run(lambda loop: _delays(loop, staleness, servers, ranges, workers, count)))


async def _delays(
    loop: _SocketlessLoop, staleness: int, servers: int, ranges: int, workers: int, count: int
) -> DelayCost:
    head = GroupHead(loop, servers, ranges, workers)
    await head.connect(list(range(1, workers + 1)))
    story, head.cpu_s = _DelayedStory(head, staleness), 0.0
    await story.join()
    begin_ms = round(1e3 * head.cpu_s, 1)
    for _ in range(staleness + 1):
        await story.step()
    story.waits = story.asks = story.reports = 0
    head.cpu_s, count = 0.0, count * (staleness + 1)
    for _ in range(count):
        await story.step()
    head.server.close()
    return DelayCost(
        staleness, workers, begin_ms, round(1e3 * head.cpu_s / count, 2),
        *(round(each / count, 1) for each in (story.waits, story.asks, story.reports)),
    )  # fmt: skip
