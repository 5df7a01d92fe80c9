"""A worker's part in bounded delay: when its pulls leave, and what it reports when."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from elasticps.client.core.fan_out import FanOuts
from elasticps.client.core.routing import Routes
from elasticps.client.delay import WorkerDelay
from elasticps.errors import Closed, Timeout
from elasticps.kernels.hashing import group_range
from elasticps.wire.delay import AskClockHeader, ReleasedHeader, ReportClock
from elasticps.wire.frames import Buffer, Kind, unpack_header
from replication.chain import Member
from tests.client.views import view

RANGES = 16
A, B = Member("s0", 1), Member("s1", 1)
GROUP = group_range("app", RANGES)


def routes(epoch: int, head: int) -> Routes:
    """A view in which one of two servers heads all ranges."""
    return Routes(view([[head, 1 - head]] * RANGES, epoch=epoch, servers=("s0", "s1")))


class Scene:
    """A worker that has committed its steps up to `session.committed`."""

    def __init__(self) -> None:
        self.session = SimpleNamespace(worker=7, committed=0, clock=100)
        self.sent: list[tuple[Member, ReportClock]] = []
        self.started: list[str] = []
        self.needed: list[int] = []
        self.fan_outs = FanOuts(itertools.count(1), self.send)
        pulls = SimpleNamespace(start=lambda pulls, wait_ms: self.started.extend(pull.name for pull in pulls))
        everything: Any = self.session, self.send, self.fan_outs, pulls, routes(1, 0), self.needed.append
        self.delay = WorkerDelay("app", *everything)

    def send(self, member: Member, buffers: Any) -> None:
        header = unpack_header(cast(Buffer, buffers[0]))
        assert header.kind == Kind.REPORT_CLOCK
        self.sent.append((member, ReportClock.of(header, np.frombuffer(buffers[1], np.uint8))))

    def pull(self, name: str, clock: int, bound: int) -> Any:
        pull = SimpleNamespace(name=name, clock=clock, waits=False, error=None)
        self.delay.start(bound, [cast(Any, pull)], 1500)
        return pull

    def commit(self, clock: int, epoch: int = 1) -> None:
        self.session.committed = clock
        self.delay.heard = max(self.delay.heard, epoch)
        self.delay.tell()

    def released(self, clock: int, epoch: int = 1) -> None:
        request = self.sent[-1][1].request
        self.fan_outs.answered(ReleasedHeader(request, epoch, clock).header(), b"")
        self.delay.tell()

    def follow(self, epoch: int, head: int) -> None:
        self.delay.routes = routes(epoch, head)
        self.fan_outs.adopt(self.delay.routes)
        self.delay.tell()


def test_a_pull_within_its_bound_or_of_nothing_waits_for_nobody() -> None:
    scene = Scene()
    scene.pull("early", 3, 3)
    scene.delay.start(3, [], 1500)
    assert scene.started == ["early"]
    assert not scene.sent


def test_a_pull_leaves_when_what_it_needs_is_released_and_later_ones_need_not_ask() -> None:
    scene = Scene()
    scene.commit(4, epoch=2)
    scene.follow(2, 0)
    pull = scene.pull("one", 5, 2)
    assert pull.waits
    assert [(member, report.clock, report.floor, report.epoch) for member, report in scene.sent] == [(A, 4, 3, 2)]
    scene.released(9, epoch=2)
    assert scene.started == ["one"]
    assert not pull.waits
    scene.pull("two", 11, 2)
    assert scene.started == ["one", "two"]
    assert scene.pull("three", 12, 2).waits
    assert len(scene.sent) == 1, "its own steps are not committed yet: nobody else has to hear of it"
    scene.commit(12)
    assert (scene.sent[1][1].floor, scene.sent[1][1].released) == (10, 9)


def test_a_pull_is_made_under_a_view_as_new_as_those_of_what_is_released() -> None:
    scene = Scene()
    scene.commit(4)
    scene.pull("one", 4, 0)
    scene.released(4, epoch=3)
    assert not scene.started
    assert scene.needed[-1] == 3
    scene.follow(2, 0)
    assert not scene.started
    scene.follow(3, 0)
    assert scene.started == ["one"]


def test_another_head_is_asked_again() -> None:
    scene = Scene()
    scene.commit(4)
    scene.pull("one", 4, 0)
    scene.follow(2, 1)
    assert [member for member, _ in scene.sent] == [A, B]
    scene.released(4)
    assert scene.started == ["one"]


def test_a_report_that_is_due_is_made_once_when_that_clock_is_committed() -> None:
    scene = Scene()
    scene.delay.want(A, AskClockHeader(0).header())
    scene.delay.tell()
    scene.delay.want(A, AskClockHeader(2).header())
    scene.commit(1)
    assert [report.clock for _, report in scene.sent] == [0]
    scene.commit(2, epoch=5)
    scene.commit(3)
    assert [(report.clock, report.epoch, report.request) for _, report in scene.sent] == [(0, 0, 0), (2, 5, 0)]
    scene.delay.want(A, AskClockHeader(4).header())
    scene.delay.gone(A)
    scene.commit(4)
    assert len(scene.sent) == 2, "it asks again on its next connection"


def test_a_refusal_ends_the_pulls_that_wait_for_it() -> None:
    scene = Scene()
    scene.commit(9)
    one, two = scene.pull("one", 4, 0), scene.pull("two", 9, 0)
    assert [report.floor for _, report in scene.sent] == [4, 9]
    error = Timeout("waited too long for worker w2")
    scene.fan_outs.refused(scene.sent[0][1].request, error)
    scene.delay.tell()
    assert one.error is error
    assert two.error is None
    scene.released(9)
    assert scene.started == ["two"]
    assert not scene.fan_outs


def test_a_pull_that_is_given_up_is_not_sent() -> None:
    scene = Scene()
    scene.commit(9)
    pull = scene.pull("one", 4, 0)
    pull.error = Timeout("nobody waits for it")
    scene.delay.tell()
    assert not scene.fan_outs
    assert not scene.started


def test_the_end_of_the_client_ends_pulls_that_wait() -> None:
    scene = Scene()
    pull = scene.pull("one", 4, 0)
    error = Closed("the client is closed")
    scene.delay.fail(error)
    assert pull.error is error
