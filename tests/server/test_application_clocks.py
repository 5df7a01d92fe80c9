"""The committed clocks of an application: as a loop over all workers finds them, whatever happens in between."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from elasticps.server.core.application_clocks import ApplicationClocks

workers = st.integers(1, 5)
events = st.one_of(
    st.tuples(st.just("join"), workers, st.integers(0, 9)),
    st.tuples(st.just("pause"), workers),
    st.tuples(st.just("leave"), workers),
    st.tuples(st.just("report"), workers, st.integers(0, 12), st.integers(0, 4)),
    st.tuples(st.just("report"), workers, st.integers(0, 12), st.just(0)),
    st.tuples(st.just("ask"), st.integers(0, 12)),
)


@given(st.sets(workers), st.lists(events, max_size=60))
@settings(max_examples=500, deadline=None)
def test_it_is_what_a_loop_over_all_workers_finds(roster: set[int], story: list[tuple[Any, ...]]) -> None:
    clocks = ApplicationClocks(roster)
    active: dict[int, int] = {}
    unheard, released = set(roster), 0
    owing: set[int] = set()
    for event in story:
        match event:
            case "join", worker, base:
                clocks.join(worker, base)
                active[worker] = max(base, active.get(worker, 0))
                owing.discard(worker)
            case "pause", worker:
                clocks.pause(worker)
                active.pop(worker, None)
                owing.discard(worker)
            case "leave", worker:
                clocks.leave(worker)
                active.pop(worker, None)
                unheard.discard(worker)
                owing.discard(worker)
            case "report", worker, clock, known:
                clocks.report(worker, clock, known, clock)
                unheard.discard(worker)
                owing.discard(worker)
                released = max(released, known)
                if worker in active:
                    active[worker] = max(active[worker], clock)
            case "ask", floor:
                found = clocks.to_ask(floor)
                expected = {worker for worker, clock in active.items() if clock < floor} | unheard
                assert {worker for worker, _ in found} == expected - owing
                assert len({worker for worker, _ in found}) == len(found)
                for worker, clock in found:
                    assert clock == (0 if worker in unheard else active[worker] + 1)
                    owing.add(worker)
                assert clocks.holding_back(floor) == sorted(expected)
        lowest = min(active.values(), default=None)
        assert clocks.minimum() == (released if unheard or lowest is None else max(released, lowest))
        assert clocks.unheard == unheard


def test_its_memory_does_not_grow_with_reports() -> None:
    clocks = ApplicationClocks(())
    clocks.join(1, 0)
    clocks.join(2, 0)
    for clock in range(10_000):
        clocks.report(1, clock, 0, 1)
    assert len(clocks._heap) < 200
    assert len(clocks._idle) < 200
    assert clocks.minimum() == 0
    clocks.report(2, 70, 0, 1)
    assert clocks.minimum() == 70
