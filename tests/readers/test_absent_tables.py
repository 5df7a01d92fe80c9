"""Tables that a relay does not name: dropped once its state is newer than all before, and kept while it is behind."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elasticps.readers.core.absent_tables import NEWER_US, NOTHING, AbsentTables, Settled

TABLES = st.sets(st.integers(1, 6))
WINDOWS = st.lists(st.tuples(st.booleans(), st.integers(0, 5 * NEWER_US), TABLES), max_size=30)


@given(WINDOWS, TABLES)
def test_what_a_relay_does_not_name_goes_with_a_newer_state(
    windows: list[tuple[bool, int, set[int]]], here: set[int]
) -> None:
    absent, seen, dropped = AbsentTables(), list[int](), set[int]()
    pending, needed_us, named = set[int](), 0, set[int]()
    for first, time_us, more in windows:
        if first:
            named, pending, needed_us = set(more), here - more, max(seen, default=0) + NEWER_US
        named, here = named | more, here | more
        expected = NOTHING
        if pending and time_us >= needed_us:
            expected = Settled(sorted(pending - named), bool(pending & named))
            pending = set()
        seen.append(time_us)
        found = absent.window(first=first, time_us=time_us, here=here, named=named)
        assert found == expected or (not found.gone and not found.compare and expected == Settled([], False))
        assert not named & set(found.gone)
        here -= set(found.gone)
        dropped |= set(found.gone)


def test_a_relay_that_is_behind_keeps_what_it_has_not_heard_of() -> None:
    absent = AbsentTables()
    assert absent.window(first=True, time_us=50 * NEWER_US, here=set(), named={1, 2}) == NOTHING
    assert absent.window(first=False, time_us=60 * NEWER_US, here={1, 2}, named={1, 2}) == NOTHING
    for state_us in (40, 60):  # this one has not heard of table 2
        assert absent.window(first=True, time_us=state_us * NEWER_US, here={1, 2}, named={1}) == NOTHING
    assert absent.window(first=False, time_us=61 * NEWER_US, here={1, 2}, named={1, 2}) == Settled([], True)
    assert absent.window(first=False, time_us=62 * NEWER_US, here={1, 2}, named={1, 2}) == NOTHING
    assert absent.window(first=True, time_us=63 * NEWER_US, here={1, 2}, named={2}) == Settled([1], False)
