"""The server that the demo kills, also after a person has just killed one."""

from __future__ import annotations

import pytest

from examples.demo.faults import choose_victim, lost_text, without_replica
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


@pytest.mark.parametrize(
    ("running", "lost", "text"),
    [
        ({("s0", 1), ("s2", 1)}, [], ""),
        ({("s1", 1)}, [3], "s0 and s2 died before other servers had copies: 1 of 4 ranges (3) have lost both replicas"),
        ({("s2", 1), ("s0", 2)}, [0, 2], "s0 and s1 died before other servers had copies: 2 of 4 ranges (0, 2) have "),
    ],
)
def test_ranges_are_lost_as_all_their_replicas_have_died(
    running: set[tuple[str, int]], lost: list[int], text: str
) -> None:
    found = without_replica(VIEW, running)
    assert found.tolist() == lost
    assert lost_text(VIEW, found).startswith(text)
