"""Pulls that wait for their own worker's steps: the same as a loop over all of them would let go."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticps.server.core.own_steps import OwnSteps
from elasticps.server.core.reads import PullRequest, TableKeys
from elasticps.server.core.requests import RequestError
from elasticps.wire.clocks import ReadAfter
from elasticps.wire.headers import PullHeader
from replication.progress import PART_BITS, Clocks

P = 4
WORKERS = range(1, 4)

workers = st.sampled_from(list(WORKERS))
some_ranges = st.sets(st.integers(0, P - 1)).map(lambda found: np.array(sorted(found), np.intp))
events = st.one_of(
    st.tuples(st.just("serve"), some_ranges, some_ranges),
    st.tuples(st.just("join"), workers, st.integers(0, 4)),
    st.tuples(st.just("push"), workers, some_ranges, st.integers(1, 2)),
    st.tuples(st.just("push"), workers, st.just(np.arange(P)), st.integers(1, 2)),
    st.tuples(st.just("time"), st.sampled_from([0.3, 1.0])),
    st.tuples(st.just("pull"), workers, st.integers(0, 5), st.booleans(), some_ranges),
    st.tuples(st.just("pull"), workers, st.integers(0, 5), st.booleans(), st.just(np.empty(0, np.intp))),
    st.tuples(st.just("gone"), workers),
    st.tuples(st.just("epoch"), st.booleans()),
)


class Asking:
    """A worker's connection."""

    app = "a"

    def __init__(self, worker: int) -> None:
        self.worker, self.worker_name, self.base = worker, f"w{worker}", 0


class Table:
    class spec:  # noqa: N801
        name = "t"


class Both:
    """The real one, and a list of pulls that are all looked at every time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.clocks = Clocks(P)
        self.own = OwnSteps(self.clocks, lambda: self.now)
        self.askers = {w: Asking(w) for w in WORKERS}
        self.epochs = [0, 0]
        self.pulls = 0
        self.waiting: list[PullRequest] = []
        self.own.serve(np.arange(P), np.arange(P))

    def do(self, event: tuple[Any, ...]) -> None:
        match event:
            case "serve", tailed, held:
                self.own.serve(tailed, held)
            case "join", worker, base:
                self.askers[worker].base = base
            case "push", worker, ranges, steps:
                self.clocks.set(worker, ranges, self.clocks.of(worker, ranges) + (steps << PART_BITS) - 1)
            case "time", passed_s:
                self.now += passed_s
            case "pull", worker, clock, anywhere, ranges:
                self.pull(worker, clock, anywhere, ranges)
            case "gone", worker:
                self.own.forget(self.askers[worker])  # type: ignore[arg-type]
                self.waiting = [read for read in self.waiting if id(read.connection) != id(self.askers[worker])]
                self.askers[worker] = Asking(worker)
            case "epoch", anywhere:
                self.epochs[anywhere] += 1

    def pull(self, worker: int, clock: int, anywhere: bool, ranges: Any) -> None:
        self.pulls += 1
        header = PullHeader(self.pulls, max(self.epochs), clock, worker, 0, 0, 1500, anywhere)
        asker: Any = self.askers[worker]
        table: Any = Table()
        after = ReadAfter(ranges, np.full(len(ranges), clock << PART_BITS), max(self.epochs)) if len(ranges) else None
        read = PullRequest(asker, header, [TableKeys(table, np.empty(0, np.int64))], after=after)
        assert self.own.waits(read) == self.waits(read)
        if self.waits(read):
            self.own.park(read)
            self.waiting.append(read._replace(deadline_s=self.now + 1.5))

    def waits(self, read: PullRequest) -> bool:
        worker, ranges = read.connection.worker, self.own.held if read.header.anywhere else self.own.tailed
        reached = read.connection.base
        if len(ranges) and self.clocks.known(worker):
            reached = max(reached, int(self.clocks.of(worker, ranges).min()) >> PART_BITS)
        if reached < read.header.clock:
            return True
        after = read.after
        return after is not None and any(
            r in self.own.held and int(self.clocks.at(worker, r)) < progress
            for r, progress in zip(after.ranges.tolist(), after.progress.tolist(), strict=True)
        )

    def check(self) -> None:
        expected: list[tuple[int, str]] = []
        for read in list(self.waiting):
            why = "" if not self.waits(read) else "behind" if self.now >= read.deadline_s else "still"
            if read.header.epoch < self.epochs[read.header.anywhere]:
                why = "stale-view"
            if why != "still":
                expected.append((read.header.request, why))
                self.waiting.remove(read)
        found = [(read.header.request, _code(error)) for read, error in self.own.release(*self.epochs)]
        assert found == expected
        assert len(self.own) == len(self.waiting)


def _code(error: RequestError | None) -> str:
    return "" if error is None else str(error.document["code"])


@given(st.lists(st.lists(events, max_size=4), max_size=25))
@settings(max_examples=400, deadline=None)
def test_the_incremental_and_the_simple_version_release_the_same_pulls(story: list[list[tuple[Any, ...]]]) -> None:
    both = Both()
    for moment in story:
        for event in moment:
            both.do(event)
        both.check()
