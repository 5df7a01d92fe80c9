"""What workers, servers and leaders of the simulator say to each other, beside what replicas do. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from coordinator.view import View
from replication.chain import Ranges

if TYPE_CHECKING:
    from chaos.contents import Content


class PushFrame(NamedTuple):
    """A worker's push: parts `first`..`part` of step `clock`."""

    frame: int
    worker: int
    epoch: int
    clock: int
    first: int
    part: int
    last: bool
    ranges: Ranges | None
    base: int
    roster: int
    content: Content | None


class AskFrame(NamedTuple):
    """A worker's question for clocks."""

    ask: int
    worker: int
    epoch: int
    roster: int


class PullFrame(NamedTuple):
    """A worker's pull of keys. `clock`: its own, whose effects it must see; `base`: the one that it started above.
    anywhere: any full replica may answer. bound: 0, or one more than how many steps others may be behind."""

    pull: int
    worker: int
    epoch: int
    clock: int
    base: int
    anywhere: bool
    keys: tuple[int, ...]
    bound: int = 0


class JoinFrame(NamedTuple):
    """A worker takes part from now on, starting above `base`, or (pause) holds nobody back any more."""

    serial: int
    worker: int
    base: int
    pause: bool


class JoinReply(NamedTuple):
    """The answer to a `JoinFrame`."""

    serial: int


class Shown(NamedTuple):
    """What a pull shows of one range: the values of its keys after operation `seq` of the history `digest`."""

    range: int
    seq: int
    digest: int
    values: dict[int, int]


class PullReply(NamedTuple):
    """The answer to a pull. shown None: refused, the ranges that may be read there have changed since its epoch."""

    pull: int
    epoch: int
    shown: tuple[Shown, ...] | None


class OperationFrame(NamedTuple):
    """An operation of the ranges themselves, for all that the receiver heads at `epoch`."""

    frame: int
    epoch: int
    roster: int
    kind: int
    worker: int
    number: int


class RequestFrame(NamedTuple):
    """A worker's request that is no push and no pull, as bytes: rounds, shards, clocks, where to start."""

    frame: bytes


class AnswerFrame(NamedTuple):
    """The answer to it."""

    frame: bytes


class ViewFrame(NamedTuple):
    """Somebody tells a view."""

    view: View
