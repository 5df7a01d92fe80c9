from __future__ import annotations

from coordinator.sparing import KINDS_MAX, Sparing


def test_a_few_of_many_events_are_logged_and_the_others_counted() -> None:
    now = 0.0
    sparing = Sparing(2, 10.0, lambda: now)
    assert [sparing.due("a") for _ in range(5)] == [0, 0, None, None, None]
    assert sparing.due("b") == 0
    now = 10.0
    assert [sparing.due("a") for _ in range(3)] == [3, 0, None]


def test_any_number_of_kinds_takes_bounded_memory() -> None:
    sparing = Sparing(1, 10.0, lambda: 0.0)
    for kind in range(10 * KINDS_MAX):
        sparing.due(kind)
    assert len(sparing._kinds) <= KINDS_MAX
