"""Answers of the home range's head: what they tell is committed when they are sent, whatever was logged meanwhile."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from elasticps.hashing import home_range
from elasticps.server.decider import Decider
from elasticps.server.handout import HandOut
from elasticps.server.rounds import Rounds
from elasticps.server.shards import Shards
from elasticps.wire.frames import HEADER_BYTES, Header, Kind, json_frame
from replication.core import NO_RANGES
from replication.effects import Push, Reply, Status
from replication.messages import Kind as OperationKind

P = 4
APP = "app"
HOME = home_range(APP, P)


class Worker:
    """A connection that keeps its answers."""

    app = APP
    worker_name = "w"

    def __init__(self, worker: int) -> None:
        self.worker = worker
        self.answers: list[dict[str, Any]] = []

    def send(self, frame: bytes) -> None:
        self.answers.append(json.loads(frame[HEADER_BYTES:]))

    def tell_view(self) -> None:
        raise AssertionError("nobody asked for a view")

    def wait_for(self, ticket: object) -> None:
        """Nothing more is read."""

    def admitted(self, ticket: object) -> None:
        """It is again."""


class Head:
    """The host and the log of the handlers: applies at once, commits when told to. full: admission waits."""

    def __init__(self) -> None:
        self.ranges, self.epoch = P, 1
        self.headed = np.arange(P)
        self.workers = {1: None, 2: None}
        self.rounds, self.shards = Rounds(P), Shards(P)
        self.replica = SimpleNamespace(push=None)
        self.logged: list[Push] = []

    def wait_for_view(self, *_: object) -> bool:
        return False

    def perform(self, event: Callable[..., Any], push: Push) -> None:
        step = cast(Any, push.payload)
        if push.kind == OperationKind.ENTER:
            self.rounds.enter(step.app, step.workers[0])
        elif push.kind == OperationKind.DECIDE:
            self.rounds.decide(step.app, step.clock, step.workers)
        else:
            self.shards.take(step)
        self.logged.append(push)

    def commit(self, push: Push) -> None:
        cast(Any, push.token).reply(Reply(push.token, Status.COMMITTED, 1, np.array([HOME]), NO_RANGES))


@pytest.mark.parametrize("kind", [Kind.ENTER, Kind.TAKE])
def test_a_decision_that_may_yet_be_lost_is_not_told(kind: Kind) -> None:
    head, worker = Head(), Worker(1)
    fakes = cast(Any, head)
    handlers = Decider[Worker](fakes, fakes, lambda: 0.0).handlers | HandOut[Worker](fakes, fakes).handlers
    document = {"name": "train", "samples": 9, "size": 1, "epochs": 1, "seed": None, "want": 1, "done": [], "back": []}
    body = np.frombuffer(json_frame(kind, document)[HEADER_BYTES:], np.uint8)
    handlers[kind](worker, Header(kind, epoch=1), body)
    head.rounds.decide(APP, 1, (2,))  # logged behind the request, by another worker's word, and not committed
    head.commit(head.logged[0])
    (answer,) = worker.answers
    assert (answer["round"] if kind == Kind.ENTER else answer["decided"][0]) == 0
