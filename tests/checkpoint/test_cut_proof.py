"""The proof that a cut is consistent, beside a check of every range and worker."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticps.admin.interface import CutTaken, WorkerHeld
from elasticps.checkpoint.core.cut_proof import prove_cut, uncovered
from replication.progress import ERASER, digest_of
from replication.step_records import StepRecord, home_range, record_of

P = 4
WHOLE = CutTaken(tuple(range(P)), {1: 3 << 16, 2: 5 << 16}, {"a": 3})


def consistent(
    taken: list[CutTaken], present: Mapping[int, str], held: Mapping[int, tuple[int, list[int]]], recovered: set[int]
) -> bool:  # fmt: skip
    """The same, dumb. held: what workers reported, their clock and their progress by range."""
    by_range = {r: one for one in taken for r in one.ranges}
    for worker, app in present.items():
        steps = [by_range[r].clocks.get(worker, 0) for r in range(P)]
        if any(step % 65536 for step in steps) or (worker not in held and len(set(steps)) > 1):
            return False
        if worker in held:
            clock, progress = held[worker]
            if max(steps) > clock << 16 or any(steps[r] != progress[r] for r in range(P) if r not in recovered):
                return False
        if any(worker == waiting for one in taken for _, _, waiting in one.waiting_shares):
            return False
        if len({by_range[r].closed.get(app, 0) for r in range(P)}) > 1:
            return False
    return True


def report(worker: int, clock: int, progress: list[int], recovered: set[int] = frozenset()) -> WorkerHeld:  # type: ignore[assignment]
    ranges = np.array([r for r in range(P) if r not in recovered], np.int64)
    return WorkerHeld(clock, 1, digest_of(worker, ranges, np.array(progress)[ranges]))


progress = st.builds(lambda clock, part: clock << 16 | part, st.integers(0, 3), st.sampled_from((0, 0, 0, 1)))
a_column = st.tuples(
    st.dictionaries(st.sampled_from((1, 2, 3, 1 | ERASER)), progress, max_size=4),
    st.dictionaries(st.sampled_from("ab"), st.integers(1, 2)),
    st.lists(st.tuples(st.sampled_from("ab"), st.just(3), st.sampled_from((1, 2))), max_size=1),
)


@settings(deadline=None, max_examples=300)
@given(
    st.lists(a_column, min_size=1, max_size=3),
    st.lists(st.integers(0, 2), min_size=P, max_size=P),
    st.dictionaries(st.sampled_from((1, 2, 3)), st.sampled_from("ab")),
    st.dictionaries(st.sampled_from((1, 2, 3)), st.integers(0, 3)),
    st.lists(st.tuples(st.integers(0, P - 1), progress), max_size=1),
    st.sets(st.integers(0, P - 1), max_size=1),
)
def test_a_cut_is_consistent_if_ranges_have_the_steps_that_workers_report(
    columns: list[tuple[dict[int, int], dict[str, int], list[tuple[str, int, int]]]], where: list[int],
    present: dict[int, str], clocks: dict[int, int], wrong: list[tuple[int, int]], recovered: set[int],
) -> None:  # fmt: skip
    where = [column % len(columns) for column in where]
    taken = [CutTaken(tuple(r for r in range(P) if where[r] == i), *columns[i]) for i in sorted(set(where))]
    assert uncovered(P, taken) == ""
    by_range = {r: one for one in taken for r in one.ranges}
    held: dict[int, tuple[int, list[int]]] = {}
    for worker, clock in clocks.items():
        if worker in present:
            held[worker] = clock, [by_range[r].clocks.get(worker, 0) for r in range(P)]
            for r, other in wrong:
                held[worker][1][r] = other
    reports = {worker: report(worker, *each, recovered) for worker, each in held.items()}
    verdict = prove_cut(taken, present, reports, (), np.isin(np.arange(P), list(recovered)))
    assert (not verdict.why) == consistent(taken, present, held, recovered), verdict
    if not verdict.why:
        for worker, clock in verdict.clocks.items():
            if worker in held:
                assert clock == held[worker][0]
            else:
                assert all(by_range[r].clocks.get(worker, 0) in (clock << 16, 0) for r in range(P))
        for worker, ranges in verdict.left_out.items():
            assert worker not in present or worker > ERASER
            assert ranges == {r: by_range[r].clocks.get(worker, 0) for r in range(P)}
        seen = {w for one in taken for w in one.clocks} | {w for one in taken for _, _, w in one.waiting_shares}
        assert seen | set(present) == set(verdict.clocks) | set(verdict.left_out)


@pytest.mark.parametrize(
    ("taken", "says"),
    [
        ([WHOLE._replace(ranges=(0, 1, 3))], "1 ranges have no server that writes them, such as 2"),
        ([WHOLE, WHOLE._replace(ranges=(1,))], "1 ranges were cut twice, such as 1"),
        ([WHOLE], ""),
    ],
)
def test_a_cut_goes_through_every_range_once(taken: list[CutTaken], says: str) -> None:
    assert uncovered(P, taken) == says


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"clocks": {1: 4 << 16, 2: 5 << 16}}, "what ranges have of worker 1 differs: steps 3, 4"),
        ({"clocks": {1: 3 << 16 | 2, 2: 5 << 16}}, "what ranges have of worker 1 differs: steps 3, 3 and a part"),
        ({"clocks": {1: 3 << 16}}, "what ranges have of worker 2 differs: steps 0, 5"),
        ({"waiting_shares": (("a", 4, 2),)}, "what ranges have of worker 2 waits for its round"),
        ({"closed": {"a": 2}}, "the rounds of 'a' that are closed differ: [2, 3]"),
    ],
)
def test_the_verdict_names_what_is_inconsistent(other: dict[str, object], says: str) -> None:
    taken = [WHOLE._replace(ranges=(0, 1)), WHOLE._replace(ranges=(2, 3), **other)]  # type: ignore[arg-type]
    verdict = prove_cut(taken, {1: "a", 2: "a"}, {})
    assert verdict.why == says


def test_a_worker_that_wrote_while_it_held_is_found() -> None:
    late = prove_cut([WHOLE], {1: "a"}, {1: report(1, 2, [2 << 16] * P)})
    assert late.why == "worker 1 holds at step 2, and ranges have 3"
    held = {1: report(1, 3, [3 << 16] * P), 9: report(9, 7, [0] * P)}
    assert prove_cut([WHOLE], {1: "a", 9: "a"}, held).clocks == {1: 3, 2: 5, 9: 7}


def test_a_worker_above_its_base_without_a_push_since_is_consistent() -> None:
    """Found by the simulator: after a pause a worker goes on at the clock of the others."""
    assert prove_cut([WHOLE], {1: "a"}, {1: report(1, 9, [3 << 16] * P)}).clocks == {1: 9, 2: 5}


SPARSE = [CutTaken((r,), {1: clock << 16} if clock else {}, {}) for r, clock in enumerate((3, 0, 5, 4))]


def test_ranges_that_a_worker_has_not_pushed_to_are_in_a_cut_with_its_steps() -> None:
    held = report(1, 5, [3 << 16, 0, 5 << 16, 4 << 16])
    assert prove_cut(SPARSE, {1: "a"}, {1: held}).clocks == {1: 5}
    for other in ([3 << 16, 1 << 16, 5 << 16, 4 << 16], [3 << 16, 0, 5 << 16, 5 << 16], [3 << 16, 0, 4 << 16, 5 << 16]):
        why = prove_cut(SPARSE, {1: "a"}, {1: report(1, 5, other)}).why
        assert why == "what ranges have of worker 1 is not what it reported as it held at step 5: steps 0, 3, 4, 5"


def step(clock: int, committed: int, *ranges: int) -> tuple[int, StepRecord]:
    return 1, record_of(clock, committed, np.isin(np.arange(P), ranges))


def test_a_worker_that_left_has_its_newest_step_if_records_say_that_all_are_whole() -> None:
    home = home_range(1, P)
    clocks = {home: 5, (home + 1) % P: 4, (home + 2) % P: 3}
    taken = [CutTaken((r,), {1: clocks[r] << 16} if r in clocks else {}, {}) for r in range(P)]
    records = [step(4, 3, home, (home + 1) % P), step(5, 3, home)]
    assert prove_cut(taken, {}, {}, records).clocks == {1: 5}
    torn = [step(4, 3, home, (home + 1) % P), step(5, 3, home, (home + 2) % P)]
    left_out = prove_cut(taken, {}, {}, torn).left_out
    assert left_out == {1: {r: max(clocks.get(r, 0), 4) << 16 for r in range(P)}}  # all up to step 4 are whole
