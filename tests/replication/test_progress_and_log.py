"""Progress arithmetic, clocks of ranges, and the queues of the log."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from replication.log import Entry, Frame, Log
from replication.messages import Operation
from replication.progress import ERASER, FIRST_ROWS, MAX_PARTS, Clocks, after_part, before_part, touched_clock


@given(st.lists(st.integers(1, 5), min_size=1, max_size=20))
def test_the_parts_of_all_steps_follow_one_another(parts: list[int]) -> None:
    progress = 0
    for clock, count in enumerate(parts, start=1):
        for part in range(count):
            assert before_part(clock, part) == progress
            last = part == count - 1
            progress = after_part(clock, part, last)
            assert touched_clock(progress) == clock
    assert progress >> 16 == len(parts)


def test_the_last_part_that_a_step_may_have_is_not_taken_for_its_end() -> None:
    for clock in (1, 7):
        before_the_last = after_part(clock, MAX_PARTS - 2, last=False)
        assert before_the_last == before_part(clock, MAX_PARTS - 1)
        assert (
            before_the_last < after_part(clock, MAX_PARTS - 1, last=False) < after_part(clock, MAX_PARTS - 1, last=True)
        )
        assert after_part(clock, MAX_PARTS - 1, last=True) == before_part(clock + 1, 0)


def test_a_column_travels_and_a_retired_worker_leaves_its_row() -> None:
    source, target = Clocks(4), Clocks(4)
    source.set(7, _ranges(2), 5 << 16)
    source.set(9, _ranges(1), 1)
    target.set(3, _ranges(2), 99)
    target.set_column(2, *source.column(2))
    assert target.at(7, 2) == 5 << 16
    assert target.at(3, 2) == 0
    target.forget(3)
    target.forget(7)
    assert not target.known(3)
    assert target.known(7)
    assert not target.read(11).any()


P = 9
WORKERS = st.integers(1, 5)
SOME = st.frozensets(st.integers(0, P - 1))
STORIES = st.lists(
    st.one_of(
        st.tuples(st.just("push"), WORKERS, SOME, st.integers(1, 3)),
        st.tuples(st.just("shelve"), st.frozensets(WORKERS)),
        st.tuples(st.just("clear"), SOME),
        st.tuples(st.just("fill"), st.integers(0, P - 1), st.dictionaries(WORKERS, st.integers(1, 3))),
        st.tuples(st.just("forget"), WORKERS),
    ),
    max_size=20,
)


@given(STORIES)
def test_clocks_of_departed_workers_are_remembered(story: list[tuple[Any, ...]]) -> None:
    clocks, twin = Clocks(P), dict.fromkeys(range(1, 6), np.zeros(P, np.int64))
    for what, *known in story:
        if what == "push":
            worker, ranges, value = known
            twin[worker] = twin[worker].copy()
            twin[worker][list(ranges)] = value
            clocks.set(worker, np.array(sorted(ranges), np.int64), value)
        elif what == "shelve":
            clocks.retire_rows(known[0])
            assert set(clocks.workers[clocks.workers > 0]) <= known[0] | {
                w for w in twin if len(set(twin[w]) - {0}) > 1
            }
        elif what == "clear":
            clocks.clear(np.array(sorted(known[0]), np.int64))
            twin = {w: np.where(np.isin(np.arange(P), list(known[0])), 0, row) for w, row in twin.items()}
        elif what == "fill":
            r, column = known
            clocks.set_column(
                r, np.array(sorted(column), np.int64), np.array([column[w] for w in sorted(column)], np.int64)
            )
            twin = {w: np.where(np.arange(P) == r, column.get(w, 0), row) for w, row in twin.items()}
        else:
            clocks.forget(known[0])
        for r in range(P):
            workers, progress = clocks.column(r)
            assert dict(zip(workers.tolist(), progress.tolist(), strict=True)) == {
                w: row[r] for w, row in twin.items() if row[r]
            }
            assert (np.diff(workers) > 0).all()
        assert all(clocks.known(w) for w, row in twin.items() if row.any())
    least = clocks.minimum(tuple(twin), {})
    assert least is not None
    assert (least == np.min([row >> 16 for row in twin.values()], axis=0)).all()
    for worker, row in twin.items():
        before = clocks.generation
        assert (clocks.read(worker) == row).all()
        assert clocks.generation == before, "compiled code may be at work on the same rows"
        assert [clocks.at(worker, r) for r in range(P)] == row.tolist()
        assert clocks.of(worker, np.array([3, 1])).tolist() == row[[3, 1]].tolist()


def test_rows_of_departed_workers_are_reused_and_their_clocks_stay_known() -> None:
    clocks = Clocks(256)
    for worker in range(1, 1001):
        clocks.set(worker, np.arange(0, 256, 2), worker << 16)
        clocks.retire_rows({worker})
    for worker in range(1, 1001):
        clocks.set(worker, _ranges(), 0)
    assert len(clocks.workers) == 1024
    clocks.retire_rows({3, 900})
    assert len(clocks.workers) == FIRST_ROWS
    assert clocks.read(900)[:2].tolist() == [900 << 16, 0]
    clocks.set(900, _ranges(), 0)
    clocks.set(2000, _ranges(0), 1)
    assert sorted(clocks.workers.tolist()) == [0] * (FIRST_ROWS - 3) + [3, 900, 2000]
    clocks.forget(2000)
    clocks.set(2000, _ranges(0), 0)
    clocks.retire_rows(())
    assert clocks.newest == 1000
    assert clocks.column(0)[0].tolist() == list(range(1, 1001))
    assert clocks.read(500)[:2].tolist() == [500 << 16, 0]


def test_only_ranges_in_which_somebody_has_made_progress_take_memory() -> None:
    """A server of many holds few of the ranges; every worker pushes to them."""
    clocks, held = Clocks(16_384), np.arange(100, 16_384, 500)
    for worker in range(1, 1001):
        clocks.set(worker, held, worker << 16)
    assert clocks.matrix.shape == (1024, 64)
    assert clocks.column(600)[1].tolist() == [w << 16 for w in range(1, 1001)]
    assert clocks.column(601)[1].tolist() == []
    assert clocks.read(1000).sum() == (1000 << 16) * len(held)
    clocks.set_column(7, np.arange(1, 1001), np.arange(1, 1001))
    assert clocks.matrix.shape == (1024, 64)
    clocks.clear(held[5:])
    assert clocks.matrix.shape == (1024, 16)
    assert clocks.column(600)[1].tolist() == [w << 16 for w in range(1, 1001)]
    assert clocks.column(7)[1].tolist() == list(range(1, 1001))
    clocks.retire_rows({5, 6})
    assert clocks.matrix.shape == (1024, 16), "their progress is not the same in all ranges"
    clocks.clear(np.array([7]))
    clocks.retire_rows({5, 6})
    assert clocks.matrix.shape == (16, 16)
    assert clocks.read(1000)[held].tolist() == [1000 << 16] * 5 + [0] * (len(held) - 5)
    every = Clocks(16)
    every.set(1, np.arange(16), 1)
    assert every.matrix.shape[1] == 17


def test_progress_is_what_it_would_be_in_a_whole_matrix() -> None:
    random = np.random.default_rng(5)
    clocks, twin = Clocks(300), np.zeros((40, 300), np.int64)
    for _ in range(400):
        worker, ranges = int(random.integers(1, 40)), np.flatnonzero(random.random(300) < random.choice([0.01, 0.3]))
        if random.random() < 0.1:
            clocks.clear(ranges)
            twin[:, ranges] = 0
        elif random.random() < 0.1:
            clocks.retire_rows(set(random.integers(1, 40, 20).tolist()))
        else:
            twin[worker, ranges] = values = random.integers(1, 9, len(ranges))
            clocks.set(worker, ranges, values)
        assert (clocks.of(worker, ranges) == twin[worker, ranges]).all()
        assert not clocks.matrix[:, 0].any()
        assert clocks.columns.max() < clocks.matrix.shape[1]
    assert all((clocks.read(worker) == twin[worker]).all() for worker in range(1, 40))


def test_the_minimum_counts_completed_clocks_and_bases() -> None:
    clocks = Clocks(2)
    clocks.set(1, _ranges(0, 1), _ranges(3 << 16, (5 << 16) | 2))
    least = clocks.minimum((1, 2), {2: 4})
    assert least is not None
    assert least.tolist() == [3, 4]
    assert clocks.minimum((), {}) is None


def _ranges(*numbers: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(numbers, dtype=np.int64)


def test_a_frame_is_done_and_its_bytes_are_free_when_its_last_part_is_acknowledged() -> None:
    log = Log()
    frame = Frame(Operation(0, 1, 1 << 16, None, 100), "token", _ranges(0, 1))
    log.add(5, frame, _ranges(0), _ranges(1), 0)
    log.add(6, frame, _ranges(1), _ranges(1), 0)
    assert log.nbytes == 100
    acked = np.zeros(2, dtype=np.int64)
    acked[0] = 1
    assert log.release(5, acked) == []
    assert log.release(6, acked) == []
    assert (len(log), log.nbytes) == (1, 100)
    acked[1] = 1
    assert log.release(6, acked) == [frame]
    assert (len(log), log.nbytes) == (0, 0)


def test_a_rebuild_splits_entries_among_new_successors_and_keeps_their_order() -> None:
    log = Log()
    frames = [Frame(Operation(0, 1, i << 16, None, 10), None, _ranges(0, 1)) for i in range(3)]
    for i, frame in enumerate(frames):
        log.add(1, frame, _ranges(0, 1), _ranges(i + 1, i + 1), 0)

    def split(entry: Entry) -> list[tuple[int, Entry]]:
        if entry.seqs[0] == 1:
            return []
        return [(queue, entry.part(entry.ranges == r)) for r, queue in ((0, 2), (1, 3))]

    assert log.rebuild(split) == [frames[0]]
    assert [e.seqs.tolist() for e in log.waiting_for(2)] == [[2], [3]]
    assert [e.ranges.tolist() for e in log.waiting_for(3)] == [[1], [1]]
    assert log.nbytes == 20
    assert len(log.release(2, _ranges(9, 9)) + log.release(3, _ranges(9, 9))) == 2
    assert log.nbytes == 0


def test_deletions_of_a_worker_do_not_count_as_a_newer_worker() -> None:
    clocks = Clocks(4)
    for worker in (3, 9, 3 + ERASER):
        clocks.set(worker, np.arange(4), 1 << 16)
    assert clocks.newest == 9
    clocks.retire_rows([3])
    assert clocks.newest == 9
    assert clocks.read(3 + ERASER).tolist() == [1 << 16] * 4
