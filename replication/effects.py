"""What a replica asks of its shell, and what is asked of it.

The ordering law. The executor carries the effects of one event out in order and without a gap: before it gives the
replica its next event, every Send is in its link's FIFO queue (queued is enough, nothing waits for the network),
every Apply, Install and Erase is done, every Reply is queued. Within one event the Sends of an operation come before
its Apply, so that successors work at the same time; the Ack or Reply that vouches for it comes after its Apply. An
Apply that fails ends the process: a replica never goes on differing from what it has acknowledged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple, TypeAlias

from replication.chain import Member, Ranges
from replication.messages import Message, Operation, OperationKind, Payload, Seqs
from replication.progress import Progress
from replication.refusals import Refusal, Refused
from replication.step_records import StepRecord


class Status(IntEnum):
    """The answer to a push.

    COMMITTED: along every chain, in the ranges that the reply calls committed. STALE_VIEW: nothing was done, the ranges
    headed here changed since the frame's epoch. GAP: nothing was done, an earlier part is missing: ask for the clocks,
    send from there. FENCED: nothing was done and never will be, the roster no longer knows the worker.
    """

    COMMITTED = 0
    STALE_VIEW = 1
    GAP = 2
    FENCED = 3


class Push:
    """A part of a worker's step, or an operation of the ranges themselves (`kind` not PUSH: `worker` -1, or whose
    progress becomes `after`; with a clock it is judged by that progress as a step is, and happens once).

    ranges: those it ticks, None for all that its receiver heads at `epoch`. prev: the worker's progress there before
    it, as the worker has it. committed: the clock up to which the worker knows all its
    steps to be committed. roster: the roster version at which the worker registered. repeat: the content was left out,
    because the sender was told that it is applied; such a frame is acknowledged as a duplicate or refused, never
    applied. refusal: its head refuses some rows, which the payload has no more: it ticks without. record: for the
    worker's home range, if that is among the ranges.
    token: handed back in the Reply; any object. worker, clock, part, last: whose step it is, the step's number, the
    number of this part from 0 on, and whether it is the step's last. epoch: of the view by which it was sent. payload,
    nbytes: its content, and how many bytes that counts in the log. kind: an `OperationKind`; after: see above.
    """

    __slots__ = (
        "after", "clock", "committed", "epoch", "kind", "last", "nbytes", "part", "payload", "prev", "ranges", "record",
        "refusal", "repeat", "roster", "token", "worker",
    )  # fmt: skip

    def __init__(
        self,
        token: object,
        worker: int,
        epoch: int,
        clock: int,
        part: int,
        last: bool,
        ranges: Ranges | None,
        payload: Payload | None,
        nbytes: int,
        prev: int = 0,
        committed: int = 0,
        roster: int = 0,
        repeat: bool = False,
        kind: int = OperationKind.PUSH,
        after: int = 0,
        refusal: Refusal | None = None,
        record: StepRecord | None = None,
    ) -> None:
        self.token = token
        self.worker = worker
        self.epoch = epoch
        self.clock = clock
        self.part = part
        self.last = last
        self.ranges = ranges
        self.payload = payload
        self.nbytes = nbytes
        self.prev = prev
        self.committed = committed
        self.roster = roster
        self.repeat = repeat
        self.kind = kind
        self.after = after
        self.refusal = refusal
        self.record = record


class Ask(NamedTuple):
    """A worker's question for the clocks of `worker` (itself, or its predecessor) in every range headed here."""

    token: object
    worker: int
    epoch: int
    roster: int = 0


class Send(NamedTuple):
    """Queue `message` on the current link to `peer`, behind everything sent before."""

    peer: Member
    message: Message


class Apply(NamedTuple):
    """Apply the operation's part in `ranges`, in every table. `inside` (mostly None) holds the ranges still being
    filled here: of those apply only keys whose hash is below the bound given."""

    operation: Operation
    ranges: Ranges
    seqs: Seqs
    inside: Mapping[int, int] | None


class Reply(NamedTuple):
    """Answer a push. `moved`: ranges of it that left this server before they were committed; the sender looks for
    their new head in a view of at least `epoch`. refused: rows that the step lacks in `committed`, as they were refused
    when it ticked, now or before: of a repeat, and of a step's last part all that were refused of the step."""

    token: object
    status: Status
    epoch: int
    committed: Ranges
    moved: Ranges
    refused: Sequence[Refused] = ()


class ClocksReply(NamedTuple):
    """Answer an Ask: progress per range headed here, applied and committed. Only committed frees a step.
    refused: rows that committed steps lack there, by clock, unless the worker is known to know. records: with the
    worker's id, of its sparse steps, committed or not, if its home is headed here. status COMMITTED: as said;
    STALE_VIEW or FENCED: no answer."""

    token: object
    status: Status
    epoch: int
    ranges: Ranges
    applied: Progress
    committed: Progress
    refused: Sequence[Refused] = ()
    records: Sequence[tuple[int, StepRecord]] = ()


class Hold(NamedTuple):
    """The push waits here for a view, a roster or room in the log: read no more from its connection."""

    token: object


class Release(NamedTuple):
    """The held push went on: read on."""

    token: object


class NeedView(NamedTuple):
    """Someone speaks from epoch `epoch`: get that view from etcd, the leader or any peer, and have it adopted."""

    epoch: int


class NeedRoster(NamedTuple):
    """The same for the roster."""

    version: int


class Distrust(NamedTuple):
    """The peer said what no correct one can; nothing has changed here. Drop the link to it, on which nothing is heard
    any more."""

    peer: Member
    why: str


class SnapshotRange(NamedTuple):
    """Start to fill `peer` with a range: cut its first piece when convenient and hand it to `Replica.piece` at the same
    instant, with no event in between. Replaces any earlier snapshot of the range."""

    peer: Member
    range: int
    fill: int
    serial: int


class NextChunk(NamedTuple):
    """The piece before is in place: cut the next one of snapshot `serial`."""

    peer: Member
    range: int
    serial: int


class Install(NamedTuple):
    """Put a piece of a range in place. The first one comes after an Erase."""

    range: int
    upto: int
    last: bool
    payload: Payload


class Erase(NamedTuple):
    """Drop everything stored for these ranges."""

    ranges: Ranges


class CaughtUp(NamedTuple):
    """Tell the leader, and every later one: `joiner` has all of the range that was ever acknowledged, and
    acknowledgements wait for it from now on. Valid while since[range] == fill."""

    range: int
    fill: int
    joiner: Member


Effect: TypeAlias = (
    Send
    | Apply
    | Reply
    | ClocksReply
    | Hold
    | Release
    | NeedView
    | NeedRoster
    | Distrust
    | SnapshotRange
    | NextChunk
    | Install
    | Erase
    | CaughtUp
)
Effects: TypeAlias = list[Effect]
