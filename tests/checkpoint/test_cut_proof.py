"""The proof that a cut is consistent, beside a check of every range and worker."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticps.admin.interface import CutTaken
from elasticps.checkpoint.core.cut_proof import prove_cut, uncovered
from replication.progress import ERASER

P = 4
WHOLE = CutTaken(tuple(range(P)), {1: 3 << 16, 2: 5 << 16}, {"a": 3})


def consistent(taken: list[CutTaken], present: Mapping[int, str], written: Mapping[int, int]) -> bool:
    """The same, dumb."""
    by_range = {r: one for one in taken for r in one.ranges}
    for worker, app in present.items():
        steps = {by_range[r].clocks.get(worker, 0) for r in range(P)}
        if len(steps) > 1 or any(step % 65536 for step in steps):
            return False
        if worker in written and min(steps) > written[worker] << 16:
            return False
        if any(worker == waiting for one in taken for _, _, waiting in one.waiting_shares):
            return False
        if len({by_range[r].closed.get(app, 0) for r in range(P)}) > 1:
            return False
    return True


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
)
def test_a_cut_is_consistent_if_all_ranges_have_the_same_steps(
    columns: list[tuple[dict[int, int], dict[str, int], list[tuple[str, int, int]]]], where: list[int],
    present: dict[int, str], written: dict[int, int],
) -> None:  # fmt: skip
    where = [column % len(columns) for column in where]
    taken = [CutTaken(tuple(r for r in range(P) if where[r] == i), *columns[i]) for i in sorted(set(where))]
    written = {worker: clock for worker, clock in written.items() if worker in present}
    assert uncovered(P, taken) == ""
    verdict = prove_cut(taken, present, written)
    assert (not verdict.why) == consistent(taken, present, written), verdict
    if not verdict.why:
        by_range = {r: one for one in taken for r in one.ranges}
        for worker, clock in verdict.clocks.items():
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
    assert prove_cut([WHOLE], {1: "a"}, {1: 2}).why == "worker 1 holds at step 2, and ranges have 3"
    assert prove_cut([WHOLE], {1: "a", 9: "a"}, {1: 3, 9: 7}).clocks == {1: 3, 2: 5, 9: 7}


def test_a_worker_above_its_base_without_a_push_since_is_consistent() -> None:
    """Found by the simulator: after a pause a worker goes on at the clock of the others."""
    assert prove_cut([WHOLE], {1: "a"}, {1: 9}).clocks == {1: 3, 2: 5}
