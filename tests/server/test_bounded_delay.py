"""Workers that hold back a pull, also those that have not connected to this server yet."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from coordinator.core.view import WorkerInfo
from elasticps.server.core.bounded_delay import CONNECT_WAIT_S, BoundedDelay
from elasticps.server.core.reads import PullRequest, TableKeys
from elasticps.wire.headers import PullHeader
from replication.progress import Clocks

P = 4
ALL = np.arange(P)
NAMES = {1: "asker", 2: "other", 3: "elsewhere"}


class Scene:
    def __init__(self) -> None:
        self.now = 0.0
        self.clocks = Clocks(P)
        self.delay = BoundedDelay(P, self.clocks, lambda: self.now)
        self.roster = {w: WorkerInfo(w, n, 1, "b" if n == "elsewhere" else "a") for w, n in NAMES.items()}
        self.delay.follow(self.roster)

    def join(self, worker: int, base: int) -> int:
        """Makes a worker active from now on."""
        return self.delay.join(worker, base, "a")

    def at(self, worker: int, clock: int) -> None:
        self.clocks.set(worker, np.arange(P), clock << 16)

    def blockers(self, clock: int, bound: int = 0) -> list[str]:
        """The workers that a pull of the asker, at its clock, waits for."""
        return self.delay.blockers(self._pull(clock, bound, 0.0))

    def park(self, clock: int, wait_s: float) -> None:
        """A pull of the asker waits for so long at most."""
        self.delay.park(self._pull(clock, 0, wait_s))

    def _pull(self, clock: int, bound: int, wait_s: float) -> PullRequest:
        asker: Any = SimpleNamespace(worker=1, worker_name="asker", app="a", base=0)
        header = PullHeader(0, 0, clock, 1, 0, 0, bound, int(wait_s * 1e3))
        table: Any = SimpleNamespace(spec=SimpleNamespace(name="t"))
        return PullRequest(asker, header, [TableKeys(table, np.empty(0, np.int64))])


def a_scene() -> Scene:
    scene = Scene()
    scene.delay.serve(ALL, ALL)
    scene.join(1, 0)
    scene.at(1, 9)
    scene.now = 2 * CONNECT_WAIT_S  # nobody is awaited any more
    return scene


def test_a_pull_waits_for_own_steps_first_and_then_for_others() -> None:
    scene = a_scene()
    assert scene.blockers(10) == ["asker"]
    scene.join(2, 4)
    assert scene.blockers(9, bound=5) == []
    assert scene.blockers(9, bound=4) == ["other"]
    scene.at(2, 5)
    assert scene.blockers(9, bound=4) == []


def test_a_paused_or_departed_worker_holds_back_no_pull() -> None:
    scene = a_scene()
    scene.join(2, 4)
    scene.delay.pause(2)
    scene.at(2, 5)
    assert scene.blockers(9) == []
    assert scene.delay.minimum("a") == 9
    scene.join(2, 8)
    assert scene.blockers(9) == ["other"]
    scene.delay.follow({w: info for w, info in scene.roster.items() if w != 2})
    assert scene.blockers(9) == []


def test_progress_counts_before_its_worker_has_connected() -> None:
    scene = a_scene()
    scene.at(2, 5)
    assert scene.blockers(9) == ["other"]
    scene.at(3, 1)  # another application's
    assert scene.blockers(9, bound=4) == []


def test_a_silent_worker_is_awaited_for_a_moment_when_ranges_come() -> None:
    scene = a_scene()
    assert scene.blockers(9) == []
    scene.delay.serve(ALL[:2], ALL[:2])  # fewer: nothing that somebody could have done elsewhere
    assert scene.blockers(9) == []
    scene.delay.serve(ALL, ALL)
    assert scene.blockers(9) == ["other"]
    assert scene.delay.minimum("a") == 9  # nobody should start at 0 because of it
    scene.join(2, 9)
    assert scene.blockers(9) == []
    scene.delay.serve(ALL[:1], ALL[:1])
    scene.delay.pause(2)
    scene.delay.serve(ALL, ALL)
    assert scene.blockers(9) == []


def test_a_worker_that_joins_low_does_not_lower_the_minimum() -> None:
    """The others had been shown each other's steps up to 9, and keep that for a while (seed 3100966)."""
    scene = Scene()
    scene.delay.serve(ALL, ALL)
    scene.join(1, 0)
    scene.at(1, 9)
    scene.join(2, 3)  # where it was told to, a moment ago
    assert scene.blockers(9) == ["other"]
    assert scene.delay.minimum("a") == 9
    for worker in (1, 2):
        scene.delay.pause(worker)
    assert scene.delay.minimum("a") == 0


def test_a_reconnecting_worker_does_not_raise_the_minimum() -> None:
    scene = Scene()
    scene.delay.serve(ALL, ALL)
    scene.join(1, 0)
    scene.join(2, 0)
    scene.at(1, 100)
    scene.at(2, 3)
    assert scene.join(2, 0) == 100, "that is of the others"
    assert scene.delay.minimum("a") == 3


def test_a_worker_connecting_after_its_steps_does_not_raise_the_minimum() -> None:
    scene = Scene()
    scene.delay.serve(ALL, ALL)
    for worker, clock in ((1, 100), (2, 3)):
        scene.at(worker, clock)
    for worker in (1, 2):
        scene.join(worker, 0)
    assert scene.delay.minimum("a") == 3


def test_a_worker_that_never_connects_is_not_awaited_for_ever() -> None:
    scene = Scene()
    scene.delay.serve(ALL, ALL)
    scene.join(1, 0)
    scene.at(1, 9)
    assert scene.blockers(9) == ["other"]
    scene.now = CONNECT_WAIT_S
    assert scene.blockers(9) == []


def test_a_pull_that_waited_too_long_names_exactly_the_workers_it_waits_for() -> None:
    scene = Scene()
    scene.delay.serve(ALL, ALL)
    scene.join(1, 9)
    scene.at(1, 9)
    roster = scene.roster | {w: WorkerInfo(w, n, 1, "a") for w, n in ((4, "slow"), (5, "silent"), (6, "ahead"))}
    scene.delay.follow(roster)
    scene.delay.serve(ALL[:2], ALL[:2])
    scene.delay.serve(ALL, ALL)  # the silent one is awaited for a moment, no longer
    for worker, base in ((2, 0), (4, 8), (6, 9)):
        scene.join(worker, base)
    scene.park(9, CONNECT_WAIT_S + 1)
    scene.now = CONNECT_WAIT_S + 1
    ((_, refusal),) = scene.delay.release(0, 0)
    assert refusal is not None
    assert refusal.document["behind"] == ["other", "slow"]
    assert not len(scene.delay)
