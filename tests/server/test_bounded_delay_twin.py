"""BoundedDelay that looks at what has changed only lets the same pulls go as one that asks everybody every time."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.core.view import WorkerInfo
from elasticps.server.core.bounded_delay import BoundedDelay
from elasticps.server.core.reads import PullRequest, TableKeys
from elasticps.wire.headers import PullHeader
from replication.progress import Clocks
from tests.server.bounded_delay_twin import BoundedDelayTwin

P = 4
WORKERS = {w: WorkerInfo(w, f"w{w}", 1, "b" if w == 5 else "a") for w in range(1, 6)}

workers = st.sampled_from(sorted(WORKERS))
some_ranges = st.sets(st.integers(0, P - 1)).map(lambda found: np.array(sorted(found), np.intp))
events = st.one_of(
    st.tuples(st.just("serve"), some_ranges, some_ranges),
    st.tuples(st.just("follow"), st.sets(workers, min_size=2)),
    st.tuples(st.just("join"), workers, st.integers(0, 4)),
    st.tuples(st.just("pause"), workers),
    st.tuples(st.just("push"), workers, some_ranges, st.integers(1, 2)),
    st.tuples(st.just("push"), workers, st.just(np.arange(P)), st.integers(1, 2)),
    st.tuples(st.just("time"), st.sampled_from([0.3, 1.0])),
    st.tuples(st.just("pull"), workers, st.integers(0, 5), st.integers(0, 3), st.booleans()),
    st.tuples(st.just("pull"), workers, st.integers(0, 5), st.integers(0, 3), st.booleans()),
    st.tuples(st.just("gone"), workers),
    st.tuples(st.just("epoch"), st.booleans()),
)


class Asking:
    """A worker's connection."""

    def __init__(self, worker: int) -> None:
        self.worker, self.worker_name, self.app, self.base = worker, WORKERS[worker].name, WORKERS[worker].app, 0


class Table:
    class spec:  # noqa: N801
        name = "t"


class Both:
    """The two, with the same clocks."""

    def __init__(self, awaited: bool) -> None:
        self.now = 0.0
        clocks = self.clocks = Clocks(P)
        self.fast = BoundedDelay(P, clocks, lambda: self.now)
        self.slow = BoundedDelayTwin(P, clocks, lambda: self.now)
        self.askers = {w: Asking(w) for w in WORKERS}
        self.epochs = [0, 0]
        self.pulls = 0
        for delay in (self.fast, self.slow):
            if awaited:
                delay.follow(WORKERS)
            delay.serve(np.arange(P), np.arange(P))
            delay.follow(WORKERS)

    def do(self, event: tuple[Any, ...]) -> None:
        match event:
            case "serve", tailed, held:
                self.fast.serve(tailed, held)
                self.slow.serve(tailed, held)
            case "follow", left:
                roster = {w: WORKERS[w] for w in left}
                self.fast.follow(roster)
                self.slow.follow(roster)
            case "join", worker, base:
                self.askers[worker].base = base
                app = self.askers[worker].app
                assert self.fast.join(worker, base, app) == self.slow.join(worker, base, app)
            case "pause", worker:
                self.fast.pause(worker)
                self.slow.pause(worker)
            case "push", worker, ranges, steps:
                self.clocks.set(worker, ranges, self.clocks.of(worker, ranges) + (steps << 16) - 1)
            case "time", passed_s:
                self.now += passed_s
            case "pull", worker, clock, bound, anywhere:
                self.pull(worker, clock, bound, anywhere)
            case "gone", worker:
                self.fast.forget(self.askers[worker])  # type: ignore[arg-type]
                self.slow.forget(self.askers[worker])  # type: ignore[arg-type]
                self.askers[worker] = Asking(worker)
            case "epoch", anywhere:
                self.epochs[anywhere] += 1

    def pull(self, worker: int, clock: int, bound: int, anywhere: bool) -> None:
        self.pulls += 1
        within = bound - 1 if bound else None
        header = PullHeader(self.pulls, max(self.epochs), clock, worker, 0, 0, within, 1500, anywhere)
        asker: Any = self.askers[worker]
        table: Any = Table()
        read = PullRequest(asker, header, [TableKeys(table, np.empty(0, np.int64))])
        expected = self.slow.blockers(read)
        found = self.fast.blockers(read)
        assert set(found) <= set(expected)
        assert bool(found) == bool(expected)
        if expected:
            self.fast.park(read)
            self.slow.park(read)

    def check(self) -> None:
        for app in ("a", "b"):
            assert self.fast.minimum(app) == self.slow.minimum(app)
        fast, slow = self.fast.release(*self.epochs), self.slow.release(*self.epochs)
        assert [read.header.request for read, _ in fast] == [read.header.request for read, _ in slow]
        assert [r and r.document for _, r in fast] == [r and r.document for _, r in slow]
        assert len(self.fast) == len(self.slow)


@given(st.lists(st.lists(events, max_size=4), max_size=25), st.booleans())
@settings(max_examples=400, deadline=None)
def test_the_incremental_and_the_simple_version_release_the_same_pulls(
    story: list[list[tuple[Any, ...]]], awaited: bool
) -> None:
    both = Both(awaited)
    for moment in story:
        for event in moment:
            both.do(event)
        both.check()
