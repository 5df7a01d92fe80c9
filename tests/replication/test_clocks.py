from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replication.clocks import Clocks, Verdict, after, before

ALL = np.arange(8)


def test_a_step_in_parts_is_next_part_by_part() -> None:
    clocks = Clocks(8)
    clocks.admit(7)
    for part, last in ((0, False), (1, False), (2, True)):
        assert clocks.check(7, 1, part, ALL) is Verdict.NEXT
        clocks.advance(7, 1, part, last, ALL)
        assert clocks.check(7, 1, part, ALL) is Verdict.DUPLICATE
    assert clocks.check(7, 2, 0, ALL) is Verdict.NEXT
    assert clocks.check(7, 3, 0, ALL) is Verdict.GAP
    assert clocks.check(7, 2, 1, ALL) is Verdict.GAP


def test_parts_without_rows_for_a_head_are_covered_by_its_next_frame() -> None:
    clocks = Clocks(8)
    clocks.admit(1)
    clocks.advance(1, 1, 0, False, ALL)
    assert clocks.check(1, 1, 1, ALL) is Verdict.NEXT  # parts 1..4 in one frame
    clocks.advance(1, 1, 4, True, ALL)
    assert clocks.minimum([1], ALL).tolist() == [1]


def test_a_frame_known_to_some_ranges_only_is_mixed() -> None:
    clocks = Clocks(8)
    clocks.admit(1)
    clocks.advance(1, 1, 0, True, ALL[:3])
    assert clocks.check(1, 1, 0, ALL) is Verdict.MIXED
    assert clocks.pending(1, 1, 0, ALL).tolist() == [3, 4, 5, 6, 7]


def test_a_worker_starts_at_its_base_and_keeps_it() -> None:
    clocks = Clocks(8)
    clocks.admit(1, base=41)
    clocks.admit(1, base=0)
    assert clocks.check(1, 42, 0, ALL) is Verdict.NEXT
    assert 1 in clocks and 2 not in clocks and clocks.workers == (1,)


def test_many_workers_keep_their_rows() -> None:
    clocks = Clocks(8)
    for worker in range(1, 40):
        clocks.admit(worker, base=worker)
    assert clocks.minimum(list(range(1, 40)), ALL).tolist() == list(range(1, 40))


@given(st.integers(1, 1 << 40), st.integers(0, 65_534), st.booleans())
def test_progress_grows_with_every_part(clock: int, part: int, last: bool) -> None:
    assert before(clock, part) < after(clock, part, last) <= before(clock + 1, 0)
    assert (after(clock, part, True) == before(clock + 1, 0)) and after(clock, part, False) == before(clock, part + 1)


def test_an_unknown_worker_has_no_row() -> None:
    with pytest.raises(KeyError):
        Clocks(8).row(3)
