"""When a server polls: while most requests come within the time that it polls for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from elasticps.server.network.busy_poll import MOST, POLL_S, BusyPoll


class Loop:
    """Runs what is called soon, each of which takes a microsecond."""

    def __init__(self) -> None:
        self.now = 100.0
        self.turns = 0
        self.soon: list[Callable[[], None]] = []

    def call_soon(self, turn: Callable[[], None]) -> None:
        self.soon.append(turn)

    def run_until(self, time: float) -> None:
        while self.now < time and self.soon:
            self.now += 1e-6
            self.turns += 1
            self.soon.pop(0)()
        self.now = max(self.now, time)


class Server:
    """A busy poll on a loop of its own; `waiting`: whether others wait for a core."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loop, self.waiting = Loop(), False
        monkeypatch.setattr("elasticps.server.network.busy_poll.time.monotonic", lambda: self.loop.now)
        self.poll = BusyPoll(cast(asyncio.AbstractEventLoop, self.loop))
        monkeypatch.setattr(cast(Any, self.poll)._contention, "contended", lambda now: self.waiting)

    def polls(self, *gaps: float) -> int:
        """Turns of the loop between requests that come so long after each other."""
        before = self.loop.turns
        for gap in gaps:
            self.loop.run_until(self.loop.now + gap)
            self.poll.touched()
        self.loop.run_until(self.loop.now + 1.0)
        return self.loop.turns - before


SOON, LATE = POLL_S / 3, 2 * POLL_S


def test_it_polls_while_requests_follow_each_other_closely(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(monkeypatch)
    found = server.polls(*[SOON] * 20)
    assert found > 20 * 0.9 * SOON / 1e-6
    assert not server.loop.soon, "it sleeps a moment after the last"


def test_it_does_not_poll_for_requests_that_come_later_than_it_would_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(monkeypatch)
    assert server.polls(*[LATE] * 50) == 0
    assert server.polls(*[SOON, LATE] * 50) == 0, "every second poll would be in vain"


def test_it_polls_again_soon_after_requests_come_closely_again(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(monkeypatch)
    server.polls(*[LATE] * 1000)
    assert server.polls(*[SOON] * (MOST + 2)) > 0


def test_a_step_of_four_close_requests_and_a_pause_is_polled_for(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(monkeypatch)
    assert server.polls(*[SOON, SOON, SOON, LATE] * 20) > 0


def test_it_does_not_poll_where_others_wait_for_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(monkeypatch)
    server.waiting = True
    assert server.polls(*[SOON] * 50) == 0


def test_it_hears_of_those_who_wait_for_a_core_while_it_does_not_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look after a long while would take all of it for now, and servers polled beside workers that wanted their
    cores: pulls took a tenth longer, and servers a third more processor time."""
    server, looks = Server(monkeypatch), list[float]()

    def contended(now: float) -> bool:
        looks.append(now)
        return False

    monkeypatch.setattr(cast(Any, server.poll)._contention, "contended", contended)
    server.polls(*[LATE] * 50)
    assert len(looks) == 50
