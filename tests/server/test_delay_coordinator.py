"""The head of a group range releases clocks: whom it asks, whom it waits for, and what it has to prove."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from coordinator.core.view import RosterChange, WorkerInfo
from elasticps.server.core.active_workers import ActiveWorkers
from elasticps.server.core.application_clocks import ApplicationClocks
from elasticps.server.core.delay_coordinator import DelayCoordinator
from elasticps.wire.delay import AskClockHeader, ReleasedHeader, ReportClock
from elasticps.wire.frames import Buffer, FrameError, Kind, unpack_header
from replication.core import NO_RANGES
from replication.effects import Reply, Status
from replication.progress import Clocks
from tests.server.test_group_log import APP, GROUP, Head, P, Worker


class Connection(Worker):
    """A worker's connection: what the head has sent on it."""

    def __hash__(self) -> int:  # type: ignore[override]
        return id(self)

    def __init__(self, worker: int) -> None:
        super().__init__(worker)
        self.asks: list[int] = []
        self.released: list[ReleasedHeader] = []

    def send(self, frame: Buffer) -> None:
        header = unpack_header(frame)
        if header.kind == Kind.ASK_CLOCK:
            self.asks.append(AskClockHeader.of(header).clock)
        else:
            self.released.append(ReleasedHeader.of(header))


class Scene:
    """A head that has begun, and workers that have joined. proves: commits operations at once."""

    def __init__(self, *bases: int, heard: bool = True) -> None:
        self.now = 0.0
        self.head = Head()
        self.head.workers = {w: WorkerInfo(w, f"w{w}", 1, APP) for w in range(1, len(bases) + 1)}  # type: ignore[misc]
        self.active = ActiveWorkers(P, Clocks(P))
        self.proves = True
        self.later: list[Any] = []
        self.begin()
        self.workers = {w: Connection(w) for w in self.head.workers}
        for worker, base in enumerate(bases, start=1):
            self.join(worker, base)
        for worker, base in enumerate(bases if heard else (), start=1):
            self.report(worker, base, request=1)
        for connection in self.workers.values():
            connection.asks.clear()
            connection.released.clear()

    def begin(self) -> None:
        """A head that knows nothing."""
        self.delay = DelayCoordinator(self.head.log(), self.active, lambda: self.now, self.later.append)

    def join(self, worker: int, base: int) -> None:
        self.active.add(worker, base, APP)
        self.delay.heard(cast(Any, self.workers[worker]))

    def pause(self, worker: int) -> None:
        self.active.remove(worker)
        self.delay.heard(cast(Any, self.workers[worker]))

    def report(
        self, worker: int, clock: int, floor: int = 0, released: int = 0, request: int = 0, epoch: int = 1,
        wait_ms: int = 0,
    ) -> None:  # fmt: skip
        report = ReportClock(worker, epoch, clock, released, floor, wait_ms, request)
        body = np.frombuffer(report.body, np.uint8)
        self.delay.handlers[Kind.REPORT_CLOCK](cast(Any, self.workers[worker]), report.header(), body)
        self.settle()

    def settle(self) -> None:
        while self.proves and self.head.logged:
            self.prove()
        while self.later:
            self.later.pop(0)()
            if self.proves and self.head.logged:
                self.prove()

    def prove(self, status: Status = Status.COMMITTED) -> None:
        push = self.head.logged.pop(0)
        cast(Any, push.token).reply(Reply(push.token, status, 1, np.array([GROUP]), NO_RANGES))

    def has_released(self) -> None:
        """An earlier head may have released clocks."""
        self.head.rounds.enter(APP, 3, (), bounded=True)

    def leave(self, worker: int) -> None:
        gone = self.head.workers.pop(worker)
        self.active.remove(worker)
        self.delay.follow(RosterChange((), (cast(Any, gone),)))
        self.delay.recheck()
        self.settle()

    def clocks_of(self, worker: int) -> list[int]:
        return [answer.clock for answer in self.workers[worker].released]


def test_a_pull_waits_until_all_have_committed_what_it_needs() -> None:
    scene = Scene(0, 0, 0)
    scene.report(1, 4, floor=3, request=7)
    assert [scene.workers[w].asks for w in (1, 2, 3)] == [[], [1], [1]], "those that are behind, once"
    scene.report(2, 5)
    assert not scene.clocks_of(1)
    scene.report(3, 2)
    assert scene.workers[3].asks == [1, 3], "it is behind still"
    scene.report(3, 3, epoch=4)
    assert scene.workers[1].released == [ReleasedHeader(7, 4, 3)], "as all have, and under a view that sees it"
    scene.report(1, 4, floor=3, request=8)
    assert scene.clocks_of(1) == [3, 3], "what is released stays so"
    assert scene.workers[2].asks == [1], "nobody is asked while nobody waits"


def test_a_rise_is_told_when_the_head_has_proved_that_it_is_one() -> None:
    scene = Scene(1, 1)
    scene.proves = False
    scene.report(1, 2, floor=2, request=1)
    scene.report(2, 2)
    assert not scene.clocks_of(1)
    scene.prove(Status.STALE_VIEW)
    assert not scene.clocks_of(1)
    scene.delay.recheck()
    scene.prove()
    assert scene.clocks_of(1) == [2]


def test_one_that_joins_is_counted_before_it_learns_where_to_start() -> None:
    scene = Scene(5, 5)
    scene.report(1, 5, floor=5, request=1)
    scene.head.workers[3] = cast(Any, WorkerInfo(3, "w3", 1, APP))
    scene.workers[3] = Connection(3)
    scene.join(3, 0)
    scene.proves = False
    scene.report(3, 0, request=1)
    scene.report(1, 6, floor=6, request=2)
    assert not scene.clocks_of(3), "this head may be none any more"
    scene.proves = True
    scene.settle()
    assert scene.clocks_of(3) == [5]
    scene.report(2, 6)
    assert scene.clocks_of(1) == [5], "the new one holds it back"
    scene.join(3, 5)
    scene.report(3, 6)
    assert scene.clocks_of(1) == [5, 6]


def test_a_rise_that_is_on_its_way_counts_for_who_joins_meanwhile() -> None:
    scene = Scene(4, 4)
    scene.proves = False
    scene.report(2, 5)
    scene.report(1, 5, floor=5, request=1)
    scene.report(2, 5)
    scene.head.workers[3] = cast(Any, WorkerInfo(3, "w3", 1, APP))
    scene.workers[3] = Connection(3)
    scene.join(3, 0)
    scene.report(3, 0, request=1)
    scene.prove()
    assert scene.clocks_of(1) == [5]
    assert not scene.clocks_of(3), "it joined after that minimum was taken"
    scene.proves = True
    scene.settle()
    assert scene.clocks_of(3) == [5]


def test_a_new_head_releases_nothing_before_it_has_heard_of_everybody() -> None:
    scene = Scene(0, 0, 0, heard=False)
    scene.report(1, 9, floor=8, request=1)
    assert [scene.workers[w].asks for w in (2, 3)] == [[0], [0]]
    scene.report(2, 9, released=6)
    assert not scene.clocks_of(1)
    scene.report(3, 7)
    scene.report(3, 9)
    assert scene.clocks_of(1) == [9]


def test_a_new_head_takes_over_what_others_know_to_be_released() -> None:
    scene = Scene(0, 0, heard=False)
    scene.has_released()
    scene.pause(2)
    scene.report(1, 3, request=1)
    assert not scene.clocks_of(1), "the one that pauses may know of more"
    scene.report(2, 3, released=6)
    assert scene.clocks_of(1) == [6]


def test_whoever_joins_waits_for_nobody_as_long_as_no_clock_was_ever_released() -> None:
    scene = Scene(0, 0, 0, heard=False)
    scene.report(3, 0, request=1)
    assert scene.clocks_of(3) == [0]
    assert not any(connection.asks for connection in scene.workers.values())
    scene.report(1, 2, floor=2, request=1)
    scene.report(2, 2)
    assert not scene.clocks_of(1), "the one that joined counts"
    scene.report(3, 2)
    assert scene.clocks_of(1) == [2]
    assert scene.head.rounds.groups[APP].bounded
    scene.begin()
    scene.report(3, 2, request=2)
    assert scene.clocks_of(3) == [0], "a later head knows that clocks may have been released"


def test_a_range_that_came_back_from_a_checkpoint_may_have_forgotten_that_clocks_were_released() -> None:
    scene = Scene(0, 0, heard=False)
    scene.head.view.recovery_epoch[GROUP] = 7
    scene.report(1, 0, request=1)
    assert not scene.clocks_of(1)
    scene.report(2, 0, released=5)
    assert scene.clocks_of(1) == [5]


def test_who_trains_without_rounds_is_no_group_of_rounds() -> None:
    scene = Scene(0, 0)
    scene.report(1, 1, floor=1, request=2)
    scene.report(2, 1)
    assert scene.clocks_of(1) == [1]
    assert not scene.head.rounds.groups[APP].in_rounds


def test_a_worker_that_has_left_is_waited_for_by_nobody_not_even_a_new_head() -> None:
    scene = Scene(0, 0, 0, heard=False)
    scene.report(1, 4, floor=4, request=1)
    scene.report(2, 4)
    assert not scene.clocks_of(1)
    scene.leave(3)
    assert scene.clocks_of(1) == [4]


def test_one_that_is_not_connected_is_waited_for_and_asked_when_it_is() -> None:
    scene = Scene(4, 0)
    scene.delay.forget(cast(Any, scene.workers[2]))
    scene.report(1, 4, floor=4, request=1)
    assert not scene.clocks_of(1)
    scene.workers[2] = Connection(2)
    scene.join(2, 0)
    assert scene.workers[2].asks == [1]
    scene.report(2, 4)
    assert scene.clocks_of(1) == [4]


def test_a_paused_worker_is_waited_for_by_nobody_until_it_joins_again() -> None:
    scene = Scene(4, 0)
    scene.report(1, 4, floor=4, request=1)
    scene.pause(2)
    scene.delay.recheck()
    scene.settle()
    assert scene.clocks_of(1) == [4]
    scene.join(2, 4)
    scene.report(1, 5, floor=5, request=2)
    assert scene.clocks_of(1) == [4]


def test_a_new_head_looks_once_at_those_that_are_not_connected_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    scene, to_ask, found = Scene(*[3] * 50), ApplicationClocks.to_ask, list[tuple[int, int]]()
    scene.has_released()
    scene.begin()

    def counted(clocks: ApplicationClocks, floor: int) -> list[tuple[int, int]]:
        new = to_ask(clocks, floor)
        found.extend(new)
        return new

    monkeypatch.setattr(ApplicationClocks, "to_ask", counted)
    for worker in scene.workers:
        scene.join(worker, 3)
        scene.report(worker, 3, floor=3, request=2)
    assert [scene.clocks_of(worker) for worker in scene.workers] == [[3]] * 50
    assert len(found) <= 2 * 50


def test_a_head_that_has_missed_a_view_begins_again() -> None:
    scene = Scene(4, 4)
    scene.has_released()
    view: Any = SimpleNamespace(epoch=1)
    scene.delay.adopt(view)
    scene.delay.adopt(SimpleNamespace(epoch=2))  # type: ignore[arg-type]
    scene.report(1, 4, request=2)
    assert len(scene.clocks_of(1)) == 1
    scene.delay.adopt(SimpleNamespace(epoch=4))  # type: ignore[arg-type]
    scene.report(1, 4, request=3)
    assert len(scene.clocks_of(1)) == 1
    scene.report(2, 4)
    assert len(scene.clocks_of(1)) == 2


def test_requests_at_a_head_that_is_none_any_more_go_to_the_next_one() -> None:
    scene = Scene(4, 0)
    scene.report(1, 4, floor=4, request=1)
    scene.head.headed = np.array([r for r in range(P) if r != GROUP])
    scene.delay.adopt(SimpleNamespace(epoch=2))  # type: ignore[arg-type]
    assert scene.head.refused == [(1, "stale-view")]
    assert not len(scene.delay)


def test_a_head_with_an_older_roster_does_not_begin() -> None:
    scene = Scene(4)
    scene.has_released()
    scene.report(1, 4, request=1)
    assert scene.head.rounds.groups[APP].roster == 3, "the proof has the roster's version"
    scene.begin()
    scene.head.roster_version = 2
    scene.workers[1].released.clear()
    scene.report(1, 4, request=2)
    assert scene.head.roster_requested
    assert not scene.clocks_of(1), "there may be others"
    scene.head.roster_version = 3
    scene.delay.heard(cast(Any, scene.workers[1]))
    scene.delay.recheck()
    scene.report(1, 4)
    assert scene.clocks_of(1) == [4]


def test_who_waits_too_long_hears_for_whom() -> None:
    scene = Scene(4, 0, 4)
    found: list[Any] = []
    scene.head.refuse = lambda asker, kind, request, error: found.append(error.document)  # type: ignore[method-assign]
    scene.report(1, 4, floor=4, request=1, wait_ms=1500)
    scene.now = 1.4
    scene.delay.recheck()
    assert not found
    scene.now = 1.6
    scene.delay.recheck()
    assert [(document["code"], document["behind"]) for document in found] == [("behind", ["w2"])]
    assert "step 4 of all workers of 'app' waited too long for worker w2" in found[0]["message"]


def test_the_requests_of_a_connection_that_ends_are_forgotten() -> None:
    scene = Scene(4, 0)
    scene.report(1, 4, floor=4, request=1)
    scene.delay.forget(cast(Any, scene.workers[1]))
    assert not len(scene.delay)
    scene.report(2, 4)
    assert not scene.clocks_of(1)


def test_nobody_reports_another_s_clock() -> None:
    scene = Scene(4, 0)
    report = ReportClock(2, 1, 9, 9)
    with pytest.raises(FrameError, match="worker 1 reports the clock of worker 2"):
        scene.delay.handlers[Kind.REPORT_CLOCK](
            cast(Any, scene.workers[1]), report.header(), np.frombuffer(report.body, np.uint8)
        )


def test_a_step_of_everybody_takes_few_frames_for_each() -> None:
    workers = 200
    scene = Scene(*[0] * workers)
    for clock in range(1, 4):
        for worker in scene.workers:
            scene.report(worker, clock, floor=clock, request=clock)
    assert all(scene.clocks_of(worker) == [1, 2, 3] for worker in scene.workers)
    asks = sum(len(connection.asks) for connection in scene.workers.values())
    assert asks <= 3 * workers
