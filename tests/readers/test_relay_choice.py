"""Which of several relays a reader follows, as some are cut off from their servers, or all."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elasticps.readers.core.relay_choice import (
    COMPARE_S,
    NEWER_S,
    STALE_S,
    RelayState,
    StaleWatch,
    choose,
    is_stale,
)
from elasticps.wire.windows import MOST_STRETCH

NOW_S = 1_700_000_000.0
ages = st.lists(st.one_of(st.none(), st.floats(0, 60)), min_size=2, max_size=5)  # of each relay, None: no answer


def find(ages: list[float | None], followed: int, every_s: float = 0.0) -> int:
    """Asks relays in turn, as the registry does; returns the one to follow from now on."""
    states = list[RelayState]()
    for place in (*range(followed, len(ages)), *range(followed)):
        age_s = ages[place]
        if age_s is None:
            continue
        states.append(RelayState(place, round((NOW_S - age_s) * 1e6), every_s))
        if not is_stale(NOW_S, states[-1].read_us, every_s):
            break
    return choose(states).place if states else followed


@given(ages, st.data())
def test_only_a_relay_that_is_old_is_left_and_only_for_a_newer_one(
    ages: list[float | None], data: st.DataObject
) -> None:
    followed = data.draw(st.integers(0, len(ages) - 1))
    chosen = find(ages, followed)
    own, there = ages[followed], [age_s for age_s in ages if age_s is not None]
    if not there:
        assert chosen == followed
        return
    found = ages[chosen]
    assert found is not None
    if own is not None and own < STALE_S - 1e-3:
        assert chosen == followed
    if chosen != followed and own is not None:
        assert found < own - NEWER_S + 1e-3
    if own is not None and own > STALE_S + NEWER_S and min(there) < own - NEWER_S - 1e-3:
        assert chosen != followed
    assert found <= max(STALE_S, min(there) + NEWER_S) + 1e-3  # nobody has anything much newer


@given(ages, st.lists(st.floats(0, 2), min_size=5, max_size=5), st.integers(1, 50), st.data())
def test_nobody_moves_to_and_fro_while_all_relays_grow_old(
    ages: list[float | None], delays: list[float], rounds: int, data: st.DataObject
) -> None:
    """All servers are away: states stand still, and are heard of a little later or earlier."""
    followed = data.draw(st.integers(0, len(ages) - 1))
    moves = 0
    for i in range(rounds):
        now = [None if age_s is None else age_s + i * COMPARE_S + delay_s * (i % 2)
               for age_s, delay_s in zip(ages, delays, strict=False)]  # fmt: skip
        before, followed = followed, find(now, followed)
        moves += before != followed
    assert moves <= len(ages)  # each time to one that is newer by more than the delays


@given(st.floats(0.001, 60), st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=30))
def test_relays_whose_windows_are_far_apart_are_not_left_for_that(
    every_s: float, looks: list[tuple[float, float]]
) -> None:
    for look in looks:
        assert find([share * MOST_STRETCH * every_s for share in look], 0, every_s) == 0


@given(st.lists(st.tuples(st.floats(0, 3), st.floats(0, 30)), max_size=30))
def test_relays_are_compared_while_what_is_shown_is_old_but_not_all_the_time(looks: list[tuple[float, float]]) -> None:
    several, alone = StaleWatch(0.5, several=True), StaleWatch(0.5, several=False)
    now_s, compared_s = 0.0, -COMPARE_S
    assert not several.due(now_s, NOW_S, 0)  # nothing is here yet
    for passed_s, age_s in looks:
        now_s += passed_s
        read_us = round((NOW_S - age_s) * 1e6)
        due = is_stale(NOW_S, read_us, 0.5) and now_s - compared_s >= COMPARE_S
        assert several.due(now_s, NOW_S, read_us) == due
        assert not alone.due(now_s, NOW_S, read_us)
        if due:
            compared_s = now_s
