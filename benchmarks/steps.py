"""What a step costs where there are many servers and workers, without sockets: a push at its worker, by the number of
servers, and a synchronous round, or a step under bounded delay, at the head of a group range.

One process plays one worker, or one server; nothing else is started. CPU time, not what a clock on the wall shows.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from rich.table import Table

from benchmarks.group_head import DelayCost, RoundCost, delays, frames_in, rounds, view_of
from benchmarks.runner import Progress, Result, silent, table
from coordinator.core.view import View
from elasticps.client.core.routing import Routes
from elasticps.client.core.session import PushSession
from elasticps.client.push_batch import Packer, PushSource
from elasticps.client.pushes import PushesInFlight, StepState
from elasticps.errors import Error
from elasticps.kernels.hashing import key_ranges, table_salt
from elasticps.wire.frames import Buffer
from elasticps.wire.pool import Pool
from replication.chain import Member
from replication.step_records import home_range

SERVERS, WORKERS, ROUNDS = (3, 30, 100, 1000), 10_000, 10
ROWS, DIM = 64, 64
STALENESS = (0, 4)
_TABLE, _WORKER = 9, 7
_PUSHES = 20  # measured in each round
_WARM_UP = 10  # pushes before


@dataclass(frozen=True)
class WorkerPushCost:
    """A push of 64 random rows at its worker. frames: that it makes; heads: of the ranges that its rows are in, means
    of all; most_more: by how many frames they were more than these heads, at most; push_ms, answers_ms: medians of
    its CPU time, and of that of handling the answers."""

    servers: int
    ranges: int
    frames: float
    heads: float
    most_more: int
    push_ms: float
    answers_ms: float


@dataclass(frozen=True)
class StepCosts:
    """Pushes by the number of servers, and the head of a group range among the most of these."""

    pushes: list[WorkerPushCost]
    round: RoundCost
    delays: list[DelayCost]


def ranges_for(servers: int) -> int:
    """Ranges of a cluster of so many servers: some thirty of each, as far as a view has them."""
    return int(min(1 << 14, max(1 << 8, 1 << (32 * servers - 1).bit_length())))


def run(
    *, servers: Sequence[int] = SERVERS, workers: int = WORKERS, count: int = ROUNDS, progress: Progress = silent
) -> Result:
    """Measures pushes with each number of servers, then the head with the most servers, and so many workers."""
    pushes = list[WorkerPushCost]()
    for number in servers:
        progress(f"a worker of {number:,} servers")
        pushes.append(_pushes(number, _PUSHES * count))
    most = max(servers)
    progress(f"synchronous rounds of {workers:,} workers")
    one = rounds(servers=most, ranges=ranges_for(most), workers=workers, count=count)
    delayed = list[DelayCost]()
    for staleness in STALENESS:
        progress(f"bounded delay of {workers:,} workers, staleness {staleness}")
        delayed.append(delays(staleness=staleness, servers=most, ranges=ranges_for(most), workers=workers, count=count))
    shown: list[Table | str] = [
        table(f"a worker's push of {ROWS} random rows of {DIM} floats: CPU time", pushes, [
            ("servers", lambda cost: f"{cost.servers:,}"), ("ranges", lambda cost: f"{cost.ranges:,}"),
            ("heads touched", lambda cost: f"{cost.heads:.1f}"), ("frames", lambda cost: f"{cost.frames:.1f}"),
            ("push", lambda cost: f"{cost.push_ms:.3f} ms"), ("answers", lambda cost: f"{cost.answers_ms:.3f} ms"),
        ]),
        table(f"the head of a group range, {workers:,} workers: CPU time of a step of each", [
            (f"a synchronous round, {most:,} servers", one.cpu_ms, one.received, one.sent),
            *((f"bounded delay, staleness {cost.staleness}", cost.cpu_ms, cost.waits + cost.reports,
               cost.waits + cost.asks) for cost in delayed),
        ], [
            ("", lambda line: line[0]), ("found", lambda line: f"{line[1]:,.0f} ms"),
            ("a worker", lambda line: f"{1e3 * line[1] / workers:,.1f} µs"),
            ("frames received", lambda line: f"{line[2]:,.0f}"), ("sent", lambda line: f"{line[3]:,.0f}"),
        ]),
        f"under bounded delay a new head took {min(cost.begin_ms for cost in delayed):,.0f} ms to hear of all workers",
    ]  # fmt: skip
    return Result(StepCosts(pushes, one, delayed), shown)


class _Worker:
    """A worker's pushes, and the frames that it makes."""

    def __init__(self, view: View) -> None:
        self.routes = Routes(view)
        self.sent: list[tuple[Member, Sequence[Buffer]]] = []
        session = PushSession(_WORKER, view.ranges, 4)
        self.pushes = PushesInFlight(session, _WORKER, itertools.count(1), self._send, lambda: None)
        self.pushes.adopt(self.routes)
        for member in self.routes.members:
            self.pushes.connected(member)
        self._packer = Packer(Pool(1 << 24))
        self._grads, self._values = np.ones((ROWS, DIM), np.float32), np.array([0.1], np.float32)
        self._salt = int(np.array(table_salt(_TABLE), np.uint64).view(np.int64))

    def _send(self, frames: Mapping[Member, Sequence[Buffer]]) -> None:
        self.sent += frames.items()

    def push(self, keys: np.ndarray, clock: int) -> StepState:
        """Pushes a step."""
        state = StepState(clock)
        source = PushSource(_TABLE, self._salt, DIM, -1, keys, self._grads, self._values)
        self.pushes.push(self._packer.pack([source], self.routes), True, state)
        return state

    def taken(self) -> list[tuple[Member, int]]:
        """The frames since the last call, by server and request number."""
        found = [
            (member, header.request)
            for member, buffers in self.sent
            for header, _ in frames_in(b"".join(bytes(each) for each in buffers))
        ]
        self.sent.clear()
        return found


def _pushes(servers: int, count: int) -> WorkerPushCost:
    view = view_of(servers, ranges_for(servers))
    worker, drawn = _Worker(view), np.random.default_rng(servers)
    home = worker.routes.members[view.heads[home_range(_WORKER, view.ranges)]]
    frames, heads, more = list[int](), list[int](), list[int]()
    push_s, answers_s = list[float](), list[float]()
    for clock in range(1, _WARM_UP + count + 1):
        keys = drawn.integers(0, 1 << 40, ROWS)
        began = time.process_time()
        state = worker.push(keys, clock)
        push_s.append(time.process_time() - began)
        sent, touched = worker.taken(), _heads_of(keys, worker.routes)
        if {member for member, _ in sent} != touched | {home} or len(sent) > len(touched) + 1:
            raise Error(f"step {clock} has rows for {len(touched)} heads, and {len(sent)} frames")
        began = time.process_time()
        for _, request in sent:
            worker.pushes.ok(request)
        answers_s.append(time.process_time() - began)
        if not state.done:
            raise Error(f"step {clock} is committed everywhere, and its worker does not know")
        frames.append(len(sent))
        heads.append(len(touched))
        more.append(len(sent) - len(touched))

    def median_ms(seconds: list[float]) -> float:
        return round(1e3 * float(np.median(seconds[_WARM_UP:])), 4)

    return WorkerPushCost(
        servers, view.ranges, round(float(np.mean(frames)), 2), round(float(np.mean(heads)), 2), max(more),
        median_ms(push_s), median_ms(answers_s),
    )  # fmt: skip


def _heads_of(keys: np.ndarray, routes: Routes) -> set[Member]:
    ranges = np.empty(len(keys), np.int32)
    key_ranges(keys, table_salt(_TABLE), routes.shift, ranges)
    return {routes.members[i] for i in routes.view.heads[ranges].tolist()}
