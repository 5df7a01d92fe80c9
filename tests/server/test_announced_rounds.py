"""The head of a group range tells workers of a round when every head has closed it, whatever an earlier head did."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from elasticps.server.core.barrier import BarrierCoordinator
from elasticps.server.core.barrier_state import RoundStep
from elasticps.server.core.data_shards import ShardDispenser
from elasticps.server.core.requests import RequestError
from elasticps.wire.frames import HEADER_BYTES, Buffer, Header, Kind, json_frame, unpack_header
from elasticps.wire.rounds import RoundClose, RoundClosedHeader, round_body, round_close
from replication.chain import Member
from replication.effects import Reply, Status
from replication.messages import OperationKind
from tests.server.test_barrier_state import share
from tests.server.test_group_log import APP, Head, Worker

OTHER = Member("s1", 1)
EMPTY = np.empty(0, np.uint8)


class Connection(Worker):
    """A connection to the head of another group range."""

    def __hash__(self) -> int:  # type: ignore[override]
        return id(self)

    def __init__(self) -> None:
        super().__init__(0)
        self.member: Member | None = Member("s0", 1)
        self.sent: list[bytes] = []

    def send(self, frame: Buffer) -> None:
        self.sent.append(bytes(frame))


class Barrier:
    """Two workers in rounds, the head of their group range, and another head."""

    def __init__(self, decided: int = 0) -> None:
        self.head = Head()
        self.head.rounds.enter(APP, 3, (1, 2))
        for clock in range(1, decided + 1):
            self.head.rounds.decide(APP, clock, (1, 2))
        self.barrier: BarrierCoordinator = self.head.barrier()
        self.head.adopt(self.head.me, OTHER)
        self.barrier.announcements.connected(OTHER)
        self.workers = {w: Worker(w) for w in (1, 2)}

    def ask(self, worker: int, kind: Kind = Kind.BARRIER_ARRIVE, clock: int = 0) -> None:
        self.barrier.handlers[kind](self.workers[worker], Header(kind, epoch=1, clock=clock), EMPTY)

    def arrive(self, clock: int) -> None:
        for worker in self.workers:
            self.ask(worker, clock=clock)

    def commit(self) -> None:
        """The newest operation in the group range."""
        self.head.commit(self.head.logged[-1])

    def closed(self) -> None:
        """The other head has closed the round that it was told of last."""
        _, request, _ = self.head.announced[-1]
        self.barrier.announcements.closed(OTHER, request)

    @property
    def announced(self) -> list[int]:
        return [close.clock for _, _, close in self.head.announced]

    @property
    def answers(self) -> list[dict[str, Any]]:
        return [answer for worker in self.workers.values() for answer in worker.answers]


def test_workers_hear_of_a_round_when_every_head_has_closed_it() -> None:
    barrier = Barrier()
    barrier.arrive(1)
    assert not barrier.announced, "the decision is not committed"
    barrier.commit()
    assert barrier.announced == [1]
    assert not barrier.answers
    barrier.closed()
    assert barrier.answers == [{"round": 1}] * 2


def test_a_round_takes_a_message_for_each_head_and_two_for_each_worker() -> None:
    head, others = Head(), [Member(f"s{i}", 1) for i in range(1, 4)]
    workers = {w: Worker(w) for w in range(1, 51)}
    head.workers = {w: SimpleNamespace(name=f"w{w}") for w in workers}
    head.rounds.enter(APP, 3, workers)
    barrier = head.barrier()
    head.adopt(head.me, *others)
    for member in others:
        barrier.announcements.connected(member)
    for clock in (1, 2):
        for worker in workers.values():
            barrier.handlers[Kind.BARRIER_ARRIVE](worker, Header(Kind.BARRIER_ARRIVE, epoch=1, clock=clock), EMPTY)
        head.commit(head.logged[-1])
        sent = head.announced[-3:]
        assert [(name, close.clock) for name, _, close in sent] == [(member.name, clock) for member in others]
        assert [len(close.joined) for *_, close in sent] == [50 * (clock == 1)] * 3
        for member, (_, request, _) in zip(others, sent, strict=True):
            barrier.announcements.closed(member, request)
    assert len(head.announced) == 2 * len(others)
    assert [worker.answers for worker in workers.values()] == [[{"round": 1}, {"round": 2}]] * 50


def test_a_round_that_is_closed_everywhere_but_here_is_not_told_of() -> None:
    barrier = Barrier()
    barrier.head.closing = False
    barrier.arrive(1)
    barrier.commit()
    barrier.closed()
    assert not barrier.answers
    barrier.head.commit(barrier.head.closes[-1])
    assert barrier.answers == [{"round": 1}] * 2


def test_a_new_head_announces_the_last_round_before_it_decides_the_next() -> None:
    barrier = Barrier(decided=3)
    barrier.arrive(4)
    assert barrier.head.rounds.groups[APP].decided == 3
    assert not barrier.announced, "the decision of the earlier head may not be committed"
    barrier.commit()
    assert barrier.announced == [3]
    assert barrier.head.rounds.groups[APP].decided == 3
    barrier.closed()
    assert barrier.head.rounds.groups[APP].decided == 4
    barrier.commit()
    barrier.closed()
    assert barrier.announced == [3, 4]
    assert barrier.answers == [{"round": 4}] * 2


@pytest.mark.parametrize("kind", [Kind.BARRIER_ARRIVE, Kind.BARRIER_JOIN])
def test_a_new_head_tells_nobody_of_the_last_round_before_it_is_closed_everywhere(kind: Kind) -> None:
    barrier = Barrier(decided=3)
    barrier.ask(1, kind, clock=3 * (kind == Kind.BARRIER_ARRIVE))
    barrier.commit()
    assert barrier.announced == [3]
    assert not barrier.answers
    barrier.closed()
    assert len(barrier.answers) == 1
    barrier.ask(2, kind, clock=3 * (kind == Kind.BARRIER_ARRIVE))
    barrier.commit()
    assert barrier.announced == [3], "it is known to be closed"
    assert len(barrier.answers) == 2


def test_a_view_with_other_heads_has_the_round_announced_again() -> None:
    barrier = Barrier()
    barrier.arrive(1)
    barrier.commit()
    _, before, _ = barrier.head.announced[-1]
    barrier.head.epoch = 2
    barrier.head.adopt(barrier.head.me, OTHER)
    barrier.barrier.announcements.closed(OTHER, before)
    assert not barrier.answers, "that was said of other ranges"
    assert barrier.announced == [1, 1]
    barrier.closed()
    assert barrier.answers == [{"round": 1}] * 2


def test_a_head_that_loses_the_group_range_refuses_those_that_wait_and_announces_nothing_more() -> None:
    barrier = Barrier()
    barrier.arrive(1)
    barrier.commit()
    barrier.head.headed = np.empty(0, np.int64)
    barrier.barrier.recheck()
    assert barrier.head.refused == [(1, "stale-view"), (2, "stale-view")]
    barrier.closed()
    assert not barrier.answers
    barrier.head.adopt(barrier.head.me, OTHER)
    assert barrier.announced == [1]


def test_a_close_names_those_who_have_a_share_here_and_how_many_are_in_the_round() -> None:
    head, connection = Head(), Connection()
    barrier = head.barrier()
    for worker in (5, 7, 9):
        head.rounds.keep(APP, 1, worker, np.arange(4), share([1], 1.0, 0.5))
    frame, body = round_close(17, 1, APP.encode(), 1, 0, round_body(APP.encode(), (), (5, 6, 7, 8)))
    barrier.close(connection, unpack_header(cast(bytes, frame)), np.frombuffer(body, np.uint8))
    (push,) = head.closes
    assert (push.kind, push.ranges) == (OperationKind.BARRIER_CLOSE, None)
    assert push.payload == RoundStep(APP, 1, (5, 7), total=4)
    assert RoundClosedHeader.of(unpack_header(connection.sent[0])) == RoundClosedHeader(17)


def close_frame(epoch: int = 1) -> tuple[Header, Any]:
    frame, body = round_close(17, epoch, APP.encode(), 1, 0, round_body(APP.encode(), (), (5,)))
    return unpack_header(cast(bytes, frame)), np.frombuffer(body, np.uint8)


def test_only_the_head_of_the_group_range_closes_a_round_under_the_same_view() -> None:
    head, connection = Head(), Connection()
    barrier = head.barrier()
    connection.member = OTHER
    with pytest.raises(RequestError, match=r"s1.*whose group range is headed by.*s0") as refusal:
        barrier.close(connection, *close_frame())
    assert refusal.value.document["code"] == "not-head"
    assert not head.closes
    head.epoch = 2  # it may have been the head before
    barrier.close(connection, *close_frame())
    assert [cast(RoundStep, push.payload).clock for push in head.closes] == [1]


def test_a_head_that_closes_a_round_under_an_older_view_gets_the_newer_one() -> None:
    head, connection = Head(), Connection()
    barrier = head.barrier()
    head.closing, head.epoch = False, 2
    barrier.close(connection, *close_frame())
    push = head.closes[0]
    cast(Any, push.token).reply(Reply(push.token, Status.STALE_VIEW, 2, np.arange(4), np.arange(4)))
    assert (head.sent_views, connection.sent) == ([connection], [])


def test_what_a_connection_has_said_ends_with_it() -> None:
    head, connection = Head(), Connection()
    barrier = head.barrier()
    names = APP.encode()
    frame, body = round_close(1, 1, names, 1, 0, round_body(names, (), (5,)))
    barrier.close(connection, unpack_header(cast(bytes, frame)), np.frombuffer(body, np.uint8))
    assert RoundClose.of(unpack_header(cast(bytes, frame)), np.frombuffer(body, np.uint8)).joined == (5,)
    assert barrier._last
    barrier.forget(connection)
    assert not barrier._last


def test_requests_that_wait_for_a_round_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elasticps.server.core.barrier.MOST_WAITING", 2)
    barrier = Barrier(decided=1)
    for _ in range(4):
        barrier.ask(1, Kind.BARRIER_JOIN)
        barrier.commit()
    assert barrier.head.refused == [(1, "busy")] * 2
    barrier.closed()
    assert len(barrier.answers) == 2


def test_claims_wait_for_the_last_round_as_well() -> None:
    barrier = Barrier(decided=2)
    dispenser = ShardDispenser(barrier.barrier._group, barrier.head.shards)
    document = {"name": "train", "samples": 9, "size": 1, "epochs": 1, "seed": None, "want": 1, "done": [], "back": []}
    body = np.frombuffer(json_frame(Kind.CLAIM_SHARDS, document)[HEADER_BYTES:], np.uint8)
    dispenser.handlers[Kind.CLAIM_SHARDS](barrier.workers[1], Header(Kind.CLAIM_SHARDS, epoch=1), body)
    barrier.commit()
    assert not barrier.answers
    barrier.closed()
    assert len(barrier.answers) == 1
