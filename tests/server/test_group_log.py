"""Answers of the group range's head: what they tell is committed when they are sent, whatever was logged meanwhile."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from elasticps.kernels.hashing import group_range
from elasticps.server.core.barrier import BarrierCoordinator
from elasticps.server.core.barrier_state import Rounds
from elasticps.server.core.data_shards import ShardDispenser, ShardLedger
from elasticps.server.core.group_log import GroupLog
from elasticps.server.core.requests import RequestError
from elasticps.wire.frames import HEADER_BYTES, Buffer, Header, Kind, json_frame, unpack_header
from elasticps.wire.rounds import RoundClose
from replication.chain import Member
from replication.core import NO_RANGES
from replication.effects import Push, Reply, Status
from replication.messages import OperationKind

P = 4
APP = "app"
GROUP = group_range(APP, P)


class Worker(SimpleNamespace):
    """A connection that keeps its answers."""

    app = APP
    worker_name = "w"

    def __init__(self, worker: int) -> None:
        super().__init__(worker=worker)
        self.answers: list[dict[str, Any]] = []

    def send(self, frame: Buffer) -> None:
        self.answers.append(json.loads(bytes(frame[HEADER_BYTES:])))

    def tell_view(self) -> None:
        raise AssertionError("nobody asked for a view")

    def wait_for(self, ticket: object) -> None:
        """Nothing more is read."""

    def admitted(self, ticket: object) -> None:
        """Handles the request again."""


class Head:
    """The host and the log of the handlers: applies at once, commits when told to. full: admission waits."""

    def __init__(self) -> None:
        self.ranges, self.epoch, self.roster_version = P, 1, 3
        self.headed = np.arange(P)
        self.workers = {w: SimpleNamespace(name=f"w{w}") for w in (1, 2)}
        self.rounds, self.shards = Rounds(P), ShardLedger(P)
        self.replica = SimpleNamespace(push=None, waits=lambda ticket: ticket in self.waiting)
        self.waiting: list[object] = []
        self.logged: list[Push] = []  # but for closes of rounds
        self.closes: list[Push] = []
        self.closing = True  # rounds are closed at once
        self.me = Member("s0", 1)
        self.refused: list[tuple[int, str]] = []  # id of a worker, and why
        self.full = self.roster_requested = False
        self.barriers: list[BarrierCoordinator] = []
        self.view = SimpleNamespace()
        self.sent_views: list[Worker] = []  # to whom the view was sent
        self.announced: list[tuple[str, int, RoundClose]] = []  # to whom, under which number, what

    def log(self) -> GroupLog:
        all_of_it = cast(Any, self)
        return GroupLog(
            all_of_it, all_of_it, all_of_it, all_of_it.replica, self.rounds, self.perform
        )  # fmt: skip

    def barrier(self) -> BarrierCoordinator:
        barrier = BarrierCoordinator(self.log(), lambda: 0.0, lambda call: call(), self.send, lambda member: None)
        self.barriers.append(barrier)
        self.adopt(self.me)
        return barrier

    def adopt(self, *heads: Member) -> None:
        """A view in which the ranges have these heads in turn."""
        view = SimpleNamespace(
            epoch=self.epoch, heads=np.arange(P) % len(heads), as_chains=SimpleNamespace(members=heads)
        )  # fmt: skip
        self.view = view
        for barrier in self.barriers:
            barrier.adopt(cast(Any, view))

    def send(self, member: Member, frame: list[Buffer]) -> None:
        header = unpack_header(frame[0])
        self.announced.append((member.name, header.request, RoundClose.of(header, np.frombuffer(frame[1], np.uint8))))

    def wait_for_view(self, *_: object) -> bool:
        return False

    def perform(self, event: Callable[..., Any], push: Push) -> None:
        if push.kind == OperationKind.BARRIER_CLOSE:
            self.closes.append(push)
            if self.closing:
                self.commit(push)
            return
        self.logged.append(push)
        if self.full:
            self.waiting.append(push.token)
            cast(Any, push.token).hold()
        else:
            self.apply(push)

    def apply(self, push: Push) -> None:
        step = cast(Any, push.payload)
        if push.kind == OperationKind.BARRIER_JOIN:
            self.rounds.enter(step.app, step.clock, step.workers)
        elif push.kind == OperationKind.BARRIER_DECISION:
            self.rounds.decide(step.app, step.clock, step.workers)
        else:
            self.shards.take(step)

    def refuse(self, asker: Worker, kind: int, request: int, error: RequestError) -> None:
        self.refused.append((asker.worker, error.document["code"]))

    def tell(self, asker: Worker) -> None:
        self.sent_views.append(asker)

    def need_roster(self) -> None:
        self.roster_requested = True

    def commit(self, push: Push) -> None:
        cast(Any, push.token).reply(Reply(push.token, Status.COMMITTED, 1, np.array([GROUP]), NO_RANGES))


def test_an_uncommitted_decision_is_not_reported() -> None:
    head, worker = Head(), Worker(1)
    handlers = head.barrier().handlers
    handlers[Kind.BARRIER_JOIN](worker, Header(Kind.BARRIER_JOIN, epoch=1, table=2), np.empty(0, np.uint8))
    head.rounds.decide(APP, 1, (2,))  # logged behind the request, by another worker's word, and not committed
    head.commit(head.logged[-1])
    assert worker.answers == [{"base": 0, "last": 0}]
    assert not head.closes


def test_a_head_with_an_older_roster_takes_no_worker_for_lost() -> None:
    head, known, new = Head(), Worker(1), Worker(3)
    barrier, dispenser = head.barrier(), ShardDispenser(head.log(), head.shards)
    document = {"name": "train", "samples": 9, "size": 1, "epochs": 1, "seed": None, "want": 1, "done": [], "back": []}
    take = np.frombuffer(json_frame(Kind.CLAIM_SHARDS, document)[HEADER_BYTES:], np.uint8)
    empty = np.empty(0, np.uint8)

    def ask(worker: Worker, kind: Kind, body: Any = empty, clock: int = 0) -> None:
        (barrier.handlers | dispenser.handlers)[kind](worker, Header(kind, epoch=1, clock=clock), body)

    roster = head.workers
    head.roster_version, head.workers = 4, roster | {3: SimpleNamespace(name="w3")}
    for worker in (known, new):
        ask(worker, Kind.BARRIER_JOIN)
        ask(worker, Kind.CLAIM_SHARDS, take)
    head.roster_version, head.workers = 3, roster  # as the next head has it
    ask(known, Kind.CLAIM_SHARDS, take)
    ask(known, Kind.BARRIER_ARRIVE, clock=1)
    assert head.rounds.groups[APP].decided == 0
    assert head.roster_requested
    found = head.shards.find(APP, "train")
    assert found is not None
    assert sorted(found.doing) == [1, 3]
    head.roster_version = 5  # and it is gone
    barrier.recheck()
    assert head.rounds.groups[APP].workers == (1,)
    ask(known, Kind.CLAIM_SHARDS, take)
    assert sorted(found.doing) == [1]


def test_nothing_is_decided_while_a_member_waits_for_room_in_the_log() -> None:
    head, first, second = Head(), Worker(1), Worker(2)
    barrier = head.barrier()
    barrier.handlers[Kind.BARRIER_JOIN](first, Header(Kind.BARRIER_JOIN, epoch=1), np.empty(0, np.uint8))
    head.full = True
    barrier.handlers[Kind.BARRIER_JOIN](second, Header(Kind.BARRIER_JOIN, epoch=1), np.empty(0, np.uint8))
    head.full = False
    barrier.handlers[Kind.BARRIER_ARRIVE](first, Header(Kind.BARRIER_ARRIVE, epoch=1, clock=1), np.empty(0, np.uint8))
    assert head.rounds.groups[APP].decided == 0
    head.apply(head.logged[1])
    head.waiting.clear()
    barrier.recheck()
    assert head.rounds.groups[APP].decided == 0  # the second one is in it
    barrier.handlers[Kind.BARRIER_ARRIVE](second, Header(Kind.BARRIER_ARRIVE, epoch=1, clock=1), np.empty(0, np.uint8))
    assert head.rounds.groups[APP].workers == (1, 2)


class TwoWorkers:
    """Two workers in synchronous rounds, and the head of their group range."""

    def __init__(self) -> None:
        self.head = Head()
        self.barrier = self.head.barrier()
        self.first, self.second = Worker(1), Worker(2)
        for worker in (self.first, self.second):
            self.barrier.handlers[Kind.BARRIER_JOIN](worker, Header(Kind.BARRIER_JOIN, epoch=1), np.empty(0, np.uint8))

    def arrive(self, worker: Worker) -> None:
        self.barrier.handlers[Kind.BARRIER_ARRIVE](
            worker, Header(Kind.BARRIER_ARRIVE, epoch=1, clock=1), np.empty(0, np.uint8)
        )

    def decide(self) -> None:
        """Logs and commits everything that waits for room in the log; time passes."""
        self.head.full = False
        for push in self.head.logged[2:]:
            self.head.apply(push)
            cast(Any, push.token).release()
            self.head.commit(push)
        done = len(self.head.logged)
        self.barrier.recheck()
        for push in self.head.logged[done:]:
            self.head.commit(push)


@pytest.fixture
def rounds() -> TwoWorkers:
    return TwoWorkers()


def test_a_repeated_request_gets_a_decision_that_waits_for_the_log(rounds: TwoWorkers) -> None:
    """It waited for the next one, as long as it had patience (seeds 3108831 and 3200942)."""
    rounds.head.full = True
    rounds.arrive(rounds.first)
    rounds.arrive(rounds.second)
    again = Worker(1)  # its connection broke
    rounds.arrive(again)
    rounds.decide()
    assert again.answers == [{"round": 1}]
    assert rounds.second.answers == [{"round": 1}]


def test_a_worker_absent_at_the_decision_is_told_that_it_was_left_out(rounds: TwoWorkers) -> None:
    rounds.head.full = True
    both = rounds.head.workers
    rounds.head.workers = {1: both[1]}
    rounds.arrive(rounds.first)
    rounds.head.workers = both
    rounds.arrive(rounds.second)
    rounds.decide()
    assert rounds.first.answers == [{"round": 1}]
    assert rounds.head.refused == [(2, "left-out")]


def test_a_request_for_an_impossible_round_is_refused() -> None:
    head, worker = Head(), Worker(1)
    barrier = head.barrier()
    barrier.handlers[Kind.BARRIER_ARRIVE](worker, Header(Kind.BARRIER_ARRIVE, epoch=1, clock=0), np.empty(0, np.uint8))
    assert head.refused == [(1, "left-out")]


def test_a_repeated_request_gets_its_own_round_though_the_next_is_decided(
    rounds: TwoWorkers,
) -> None:
    """Found in a review. It was told of the next round, took itself for left out, and pushed its step anew."""
    head, again = rounds.head, Worker(1)
    for worker in (rounds.first, rounds.second):
        rounds.arrive(worker)
    head.commit(head.logged[-1])
    head.full = True
    rounds.arrive(again)  # its connection had broken before it heard that
    repeat = head.logged[-1]
    del head.workers[1]  # it stands still for longer than its lease
    header = Header(Kind.BARRIER_ARRIVE, epoch=1, clock=2)
    rounds.barrier.handlers[Kind.BARRIER_ARRIVE](rounds.second, header, np.empty(0, np.uint8))
    head.full = False
    for push in (repeat, head.logged[-1]):
        head.apply(push)
        cast(Any, push.token).release()
    assert head.rounds.groups[APP].decided == 2
    head.commit(repeat)
    assert again.answers == [{"round": 1}]
