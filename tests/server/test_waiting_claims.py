"""An answer that waited for room in the log, with a real replica."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from elasticps.server.core.barrier import BarrierCoordinator
from elasticps.server.core.barrier_state import Rounds
from elasticps.server.core.data_shards import Claim, ShardDispenser, ShardLedger
from elasticps.server.core.group_log import GroupLog
from elasticps.wire.frames import HEADER_BYTES, Header, Kind, json_frame
from replication.chain import Chains, Member
from replication.effects import Apply, Hold, Push, Release, Reply
from replication.messages import Ack, OperationKind, Resync
from replication.replica import Replica
from tests.server.test_group_log import APP, GROUP, P, Worker

ME, TAIL = Member("a", 1), Member("b", 1)


class RealHead:
    """The group range's head, with a log of its own and a tail that acknowledges when told to."""

    def __init__(self) -> None:
        self.me = ME
        self.ranges, self.epoch, self.roster_version = P, 1, 3
        self.headed = np.arange(P)
        self.workers = {w: SimpleNamespace(name=f"w{w}") for w in (1, 2)}
        self.rounds, self.shards = Rounds(P), ShardLedger(P)
        self.replica = Replica(ME, P, 1000)
        self.refused: list[Any] = []
        chains = np.tile(np.array([0, 1], np.int32), (P, 1))
        self.perform(self.replica.adopt, Chains(1, (ME, TAIL), chains, np.full(P, -1, np.int32), np.ones(P, np.int64)))
        self.perform(self.replica.adopt_roster, 3, frozenset((1, 2)))
        self.perform(self.replica.peer_up, TAIL)
        none = np.zeros(P, np.int64)
        self.perform(self.replica.receive, TAIL, Resync(1, np.arange(P), none, none))

    def log(self) -> GroupLog:
        me = cast(Any, self)
        return GroupLog(me, me, me, self.replica, self.rounds, self.perform)

    def wait_for_view(self, *_: object) -> bool:
        return False

    def refuse(self, asker: Worker, kind: int, request: int, error: Any) -> None:
        self.refused.append((asker.worker, error.document["code"]))

    def perform(self, event: Any, *arguments: Any) -> None:
        for effect in event(*arguments):
            if isinstance(effect, Apply):
                self.apply(effect.operation)
            elif isinstance(effect, Reply):
                cast(Any, effect.token).reply(effect)
            elif isinstance(effect, Hold):
                cast(Any, effect.token).hold()
            elif isinstance(effect, Release):
                cast(Any, effect.token).release()

    def apply(self, operation: Any) -> None:
        step = operation.payload
        if operation.kind == OperationKind.BARRIER_JOIN:
            self.rounds.enter(step.app, step.clock, step.workers)
        elif operation.kind == OperationKind.BARRIER_DECISION:
            self.rounds.decide(step.app, step.clock, step.workers)
        elif isinstance(step, Claim):
            self.shards.take(step)

    def ack(self) -> None:
        """The tail has the oldest operation that it has not acknowledged."""
        at = np.array([GROUP])
        self.perform(self.replica.receive, TAIL, Ack(1, at, self.replica.acked[at] + 1))


def test_an_answer_to_a_waiting_claim_reports_no_uncommitted_decision() -> None:
    """Found in a review. Whoever is told of a decision has it carried out, and another head may decide otherwise."""
    head, first, second = RealHead(), Worker(1), Worker(2)
    log = head.log()
    barrier = BarrierCoordinator(log, lambda: 0.0, lambda call: call(), lambda *_: None, lambda member: None)
    handlers = barrier.handlers | ShardDispenser(log, head.shards).handlers
    empty = np.empty(0, np.uint8)
    document = {"name": "train", "samples": 9, "size": 1, "epochs": 1, "seed": None, "want": 1, "done": [], "back": []}
    body = np.frombuffer(json_frame(Kind.CLAIM_SHARDS, document)[HEADER_BYTES:], np.uint8)
    handlers[Kind.BARRIER_JOIN](first, Header(Kind.BARRIER_JOIN, epoch=1), empty)
    head.ack()
    assert first.answers.pop()["base"] == 0

    class Filler:
        reply = hold = release = lambda *_: None

    big = Push(Filler(), -1, 1, 0, 0, True, np.array([GROUP]), None, 2000, kind=OperationKind.AUDIT)
    head.perform(head.replica.push, big)  # the log is full
    handlers[Kind.CLAIM_SHARDS](second, Header(Kind.CLAIM_SHARDS, epoch=1), body)
    assert head.replica.parked
    head.ack()  # there is room
    assert not head.replica.parked
    assert not second.answers
    handlers[Kind.BARRIER_ARRIVE](first, Header(Kind.BARRIER_ARRIVE, epoch=1, clock=1), empty)
    assert head.rounds.groups[APP].decided == 1  # behind the claim, and nobody else has it yet
    while not second.answers:
        assert not first.answers  # it is not committed
        head.ack()
    assert second.answers[0]["held"] == [[0, 0, 0, 0]]
