"""What replicas say to each other. Each message carries its sender's epoch and speaks of many ranges at once.

All of them travel on the one FIFO link between two members, and all are judged by the same law: what a message says
about range r is heard if and only if its sender is r's current neighbour in my view and its epoch >= since[r].
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from replication.chain import Ranges
from replication.refusals import Refusal, RefusedStep
from replication.step_records import StepRecord

Seqs = NDArray[np.int64]
"""Positions in the logs of ranges, int64 [n], beside a `Ranges` of the same length."""

NOTHING = -1
"""The position of a joining replica that must be filled from the start."""


class OperationKind(IntEnum):
    """What an operation is to those who apply it; replication itself treats all alike."""

    PUSH = 0
    CREATE = 1
    INIT = 2
    RETIRE = 3
    AUDIT = 4
    BARRIER_JOIN = 5
    BARRIER_DECISION = 6
    BARRIER_CLOSE = 7
    BARRIER_LEAVE = 8
    CLAIM_SHARDS = 9
    LOAD = 10
    DELETE = 11
    CLEAR = 12
    DROP = 13
    CUT = 14
    RESTORE = 15
    RESTORED = 16
    TIME = 17
    EVICT = 18
    POLICY = 19


class Payload(Protocol):
    """Content that replication carries and never looks into. The executor cuts it by range to send or apply it."""


class Operation:
    """One logged operation, shared by the log, the links and the store; never changed once made.

    `worker` is the worker whose progress in the operation's ranges becomes `after`, or -1 for nobody's.
    `nbytes` is the memory that stays in use until every range of it is acknowledged.
    `refusal`: of a push whose head refused rows, which `payload` lacks; it may name rows of other ranges, too.
    `record`: of the step, for the worker's home range; other ranges' replicas have it, too, and leave it aside.
    """

    __slots__ = ("after", "kind", "nbytes", "payload", "record", "refusal", "worker")

    def __init__(
        self, kind: int, worker: int, after: int, payload: Payload | None, nbytes: int,
        refusal: Refusal | None = None, record: StepRecord | None = None,
    ) -> None:  # fmt: skip
        self.kind = kind
        self.worker = worker
        self.after = after
        self.payload = payload
        self.nbytes = nbytes
        self.refusal = refusal
        self.record = record

    def __repr__(self) -> str:
        return f"{OperationKind(self.kind).name}(worker={self.worker}, after={self.after >> 16}.{self.after & 0xFFFF})"


class Forward(NamedTuple):
    """Predecessor to successor: apply `operation`'s part in `ranges`, as `seqs` of their logs."""

    epoch: int
    ranges: Ranges
    seqs: Seqs
    operation: Operation


class Ack(NamedTuple):
    """Successor to predecessor, cumulative: the tail (and a level joiner) has everything up to `seqs`."""

    epoch: int
    ranges: Ranges
    seqs: Seqs


class Resync(NamedTuple):
    """Successor to predecessor, first word about `ranges` on a new link or under a changed chain.

    seqs: what I have (NOTHING: fill me); acked: what I know the tail to have, a cumulative acknowledgement.
    """

    epoch: int
    ranges: Ranges
    seqs: Seqs
    acked: Seqs


class SnapshotChunk(NamedTuple):
    """Tail to joiner: the content of range `range` for key hashes in [end of the piece before, `upto`).

    The first one (number 0) makes the joiner forget what it had, and carries the range's position and vector clocks,
    with what was refused (`replication.refusals`) and the records of workers whose home it is.
    """

    epoch: int
    range: int
    fill: int
    number: int
    upto: int
    last: bool
    seq: int
    workers: NDArray[np.int64]
    progress: NDArray[np.int64]
    payload: Payload
    refused: Sequence[RefusedStep] = ()
    records: Sequence[tuple[int, StepRecord]] = ()


class ChunkAck(NamedTuple):
    """Joiner to tail: piece `number` is in place, and so is every operation up to `seq`."""

    epoch: int
    range: int
    fill: int
    number: int
    last: bool
    seq: int


Message: TypeAlias = Forward | Ack | Resync | SnapshotChunk | ChunkAck
