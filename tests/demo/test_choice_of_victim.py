"""The server that the demo kills, also after a person has just killed one."""

from __future__ import annotations

import pytest

from examples.demo.faults import choose_victim
from tests.chaos.scenes import view_of

VIEW = view_of([["s0", "s1"], ["s1", "s2"], ["s1", "s0"], ["s2", "s0"]])
WHOLE_OF_TWO = view_of([["s1", "s2"], ["s2", "s1"]])


@pytest.mark.parametrize(
    ("running", "victim"),
    [
        ({"s0", "s1", "s2"}, ("s1", 2)),
        ({"s1", "s2"}, None),  # s0 is dead, and the view does not say so yet
        ({"s0"}, None),
        (set(), None),
    ],
)
def test_the_victim_heads_most_ranges_unless_a_range_would_be_lost(
    running: set[str], victim: tuple[str, int] | None
) -> None:
    assert choose_victim(VIEW, {(name, 1) for name in running}) == victim


def test_ranges_that_wait_for_a_second_replica_are_waited_for() -> None:
    """The demo killed the only server that had them: who had killed another one by hand saw both workers end."""
    assert choose_victim(view_of([["s1", "s2"], ["s2"]]), {("s1", 1), ("s2", 1)}) == ("s1", 1)
    assert choose_victim(view_of([["s1"], ["s2"]]), {("s1", 1), ("s2", 1)}) is None
    assert choose_victim(WHOLE_OF_TWO, {("s1", 1), ("s2", 1)}) == ("s1", 1)


def test_a_server_that_has_registered_again_is_another_one() -> None:
    assert choose_victim(WHOLE_OF_TWO, {("s1", 2), ("s2", 1)}) is None
