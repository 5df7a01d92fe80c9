"""Moments are found where a twin finds them that tries all combinations of states."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from elasticps.readers.core.clocks import RangeClocks
from elasticps.readers.core.moment_search import MomentSearch, TailState
from elasticps.wire.windows import Progresses
from replication.progress import PART_BITS
from replication.step_records import StepRecord, home_range, record_of

RANGES, SERVERS = 4, 2
OWNER = np.array([0, 0, 1, 1])
Ints = NDArray[np.int64]


class Story:
    """Workers take steps; each server applies those of its ranges, one frame for each step, in an order of its own."""

    def __init__(self, seed: int, workers: int, steps: int) -> None:
        rng = np.random.default_rng(seed)
        self.workers = list(range(1, workers + 1))
        ticked: dict[tuple[int, int], NDArray[np.bool_]] = {}
        for worker, step in itertools.product(self.workers, range(1, steps + 1)):
            some = rng.random(RANGES) < rng.choice([0.4, 1.0])
            some[home_range(worker, RANGES)] = True
            ticked[worker, step] = some
        self.ticked = ticked
        self.progress = [{w: np.zeros(RANGES, np.int64) for w in self.workers}]
        self.states: list[list[tuple[dict[int, Ints], list[tuple[int, StepRecord]]]]] = [[], []]
        for server in range(SERVERS):
            mine = np.equal(OWNER, server)
            now = {w: np.zeros(RANGES, np.int64) for w in self.workers}
            self.states[server].append(({w: row.copy() for w, row in now.items()}, []))
            at = dict.fromkeys(self.workers, 0)
            while min(at.values()) < steps:
                worker = int(rng.choice([w for w in self.workers if at[w] < steps]))
                at[worker] += 1
                some = ticked[worker, at[worker]]
                records = []
                if mine[home_range(worker, RANGES)] and not some.all():
                    records = [(worker, record_of(at[worker], 0, some))]
                if (some & mine).any():
                    now[worker][some & mine] = at[worker] << PART_BITS
                    self.states[server].append(({w: row.copy() for w, row in now.items()}, records))

    def is_moment(self, chosen: Sequence[int]) -> bool:
        """Whether there is a step of each worker up to which exactly its steps are in these states."""
        rows = [self.states[server][at][0] for server, at in enumerate(chosen)]
        for worker in self.workers:
            row = np.where(OWNER == 0, rows[0][worker], rows[1][worker]) >> PART_BITS
            newest = int(row.max())
            expected = np.zeros(RANGES, np.int64)
            for step in range(1, newest + 1):
                expected[self.ticked[worker, step]] = step
            if not (row == expected).all():
                return False
        return True

    def runs(self, server: int, at: int) -> Ints:
        before, now = (self.states[server][one][0] for one in (at - 1, at))
        workers = np.array(self.workers)
        mine = np.flatnonzero(server == OWNER)
        tables = [np.array([rows[w][mine] for w in self.workers]) for rows in (before, now)]
        return Progresses.between(workers, mine, *tables).runs


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 1 << 30), st.integers(1, 3), st.integers(1, 6), st.integers(0, 5), st.integers(0, 5))
def test_the_first_moment_is_found(seed: int, workers: int, steps: int, first: int, second: int) -> None:
    story = Story(seed, workers, steps)
    begin = [min(first, len(story.states[0]) - 1), min(second, len(story.states[1]) - 1)]
    clocks = RangeClocks(RANGES)
    for server, at in enumerate(begin):
        rows, mine = story.states[server][at][0], server == OWNER
        for worker in story.workers:
            if rows[worker][mine].any():
                row = clocks.progress.setdefault(worker, np.zeros(RANGES, np.int64))
                row[mine] = rows[worker][mine]
        for i in range(at + 1):
            clocks.note_records(story.states[server][i][1])
    search = MomentSearch(OWNER, clocks.progress, clocks.records, clocks.committed)
    found = search.find()
    rng, todo = np.random.default_rng(seed), [at + 1 for at in begin]
    while not found:
        left = [server for server in range(SERVERS) if todo[server] < len(story.states[server])]
        if not left:
            break
        server = int(rng.choice(left))
        at = todo[server]
        search.add(server, TailState(at, story.runs(server, at), story.states[server][at][1]))
        todo[server] += 1
        found = search.find()
    later = [range(at, len(story.states[server])) for server, at in enumerate(begin)]
    matching = [one for one in itertools.product(*later) if story.is_moment(one)]
    assert found  # the last states of all servers are one
    chosen = [search.chosen[server] or begin[server] for server in range(SERVERS)]
    assert story.is_moment(chosen)
    assert all(a <= b for one in matching for a, b in zip(chosen, one, strict=True))  # it is the first


def test_a_part_of_a_step_is_in_no_moment() -> None:
    row = np.full(RANGES, 3 << PART_BITS)
    row[2] |= 1
    search = MomentSearch(OWNER, {1: row}, {}, {})
    assert not search.find()
    assert "worker 1 is at step 3 to 3" in search.apart()
    search.add(1, TailState(5, np.array([[1, 2, 2, 3 << PART_BITS]]), []))
    assert search.find()
    assert search.chosen == {0: 0, 1: 5}


def test_clocks_forget_what_is_committed_and_who_has_left() -> None:
    clocks = RangeClocks(RANGES)
    clocks.note(np.array([[1, 0, 3, 5 << PART_BITS], [2, 1, 1, 7 << PART_BITS]]))
    clocks.note_records([(1, record_of(4, 0, np.array([True] * 2 + [False] * 2)))])
    clocks.note_records([(1, record_of(5, 4, np.array([True] * 3 + [False])))])
    assert clocks.records[1].keys() == {5}
    assert clocks.committed == {1: 4}
    clocks.note(np.array([[1, 0, 3, 0]]))
    assert clocks.progress.keys() == {2}
    assert not clocks.records
    clocks.note(np.array([[2, 0, 3, 9 << PART_BITS]]), np.array([True, False, True, False]))
    assert clocks.steps()[2].tolist() == [9, 7, 9, 0]
    clocks.reset(np.array([0, 1, 2]))
    assert not clocks.progress
