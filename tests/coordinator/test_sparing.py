from __future__ import annotations

from coordinator.sparing import KINDS_MAX, Sparing


def test_of_many_events_few_are_let_through_and_the_others_counted() -> None:
    now = 0.0
    sparing = Sparing(2, 10.0, lambda: now)
    assert [sparing.due("a") for _ in range(5)] == [0, 0, None, None, None]
    assert sparing.due("b") == 0
    now = 10.0
    assert [sparing.due("a") for _ in range(3)] == [3, 0, None]


def test_kinds_without_end_take_no_memory_without_end() -> None:
    sparing = Sparing(1, 10.0, lambda: 0.0)
    for kind in range(10 * KINDS_MAX):
        sparing.due(kind)
    assert len(sparing._kinds) <= KINDS_MAX
