"""Which workers take part, as a server knows it."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from elasticps.server.core.active_workers import ActiveWorkers
from replication.progress import Clocks
from replication.step_records import home_range

P = 16

events = st.lists(st.tuples(st.booleans(), st.integers(1, 12), st.integers(0, 50)), max_size=40)


@given(log=events, most=st.integers(0, 4), but=st.integers(1, 12), headed=st.sets(st.integers(0, P - 1)))
@settings(max_examples=200, deadline=None)
def test_homes_are_those_of_who_came_first_and_clocks_are_of_the_homes_asked_for(
    log: list[tuple[bool, int, int]], most: int, but: int, headed: set[int]
) -> None:
    found, twin = ActiveWorkers(P, Clocks(P)), dict[int, int]()
    for comes, worker, base in log:
        if comes:
            twin[worker] = base
            found.add(worker, base, f"app{worker % 2}")
        else:
            twin.pop(worker, None)
            found.remove(worker)
    assert found.bases == twin
    for app in (0, 1):
        others = [worker for worker in twin if worker % 2 == app and worker != but]
        assert found.homes(f"app{app}", most, but) == tuple(home_range(worker, P) for worker in others[:most])
        clocks = [twin[worker] for worker in others if home_range(worker, P) in headed]
        assert found.lowest_at_homes(f"app{app}", headed, but) == min(clocks, default=None)


def test_nothing_is_left_of_who_has_gone() -> None:
    found = ActiveWorkers(P, Clocks(P))
    found.add(3, 5, "a")
    found.remove(3)
    found.remove(3)
    assert [len(each) for each in (found._by_app, found._by_home, found._apps, found.bases)] == [0, 0, 0, 0]
