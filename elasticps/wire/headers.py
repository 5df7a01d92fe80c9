"""The header of each kind of frame: one constructor and one reader per kind, every field with one meaning. Pure.

The 64 bytes are the same for all kinds (`frames.Header`). Only this file knows where a kind puts its fields: that a
BARRIER_JOIN has its worker's predecessor where a PULL has its table, say. The table of all kinds is in
`docs/internals/protocol.md`, golden vectors in `tests/wire/test_headers.py`. Headers between replicas are in
`replica_headers.py`.
"""

from __future__ import annotations

from typing import NamedTuple

from elasticps.wire import frames
from elasticps.wire.frames import (
    ALL_RANGES,
    ANY,
    HEADER,
    HEADER_BYTES,
    LAST,
    MAGIC,
    PAUSE,
    RECORD,
    REPEAT,
    REPLACE,
    ROUND,
    SLOTS,
    VERSION,
    FrameError,
    Header,
    Kind,
)
from replication.progress import PART_BITS, PART_MASK

_PUSH = int(Kind.PUSH)  # packed in half the time of the enum's member
NEVER = (1 << 32) - 1  # where a PUSH says how many steps ago its worker's last one in these ranges was


class ShardRef(NamedTuple):
    """The shard of a set that a step trains."""

    set: int
    number: int


class PushHeader(NamedTuple):
    """PUSH: part `part` of step `clock` of the connection's worker, in `blocks` blocks. prev: the worker's progress
    before it in all ranges that it ticks; 0, which says that it may be any that is committed, too, if that was more
    than 2^32 steps ago. committed: the clock up to which the worker knows all its steps to be, None if it does not say.
    all_ranges: it ticks all that its receiver heads at `epoch`, and names none. repeat: the blocks are left out, only
    the answer is wanted. round: a share of a synchronous round. record: the body ends with the step's record."""

    request: int
    epoch: int
    clock: int
    prev: int
    blocks: int
    part: int = 0
    last: bool = True
    all_ranges: bool = True
    repeat: bool = False
    round: bool = False
    committed: int | None = None
    shard: ShardRef | None = None
    record: bool = False

    def header(self, body_bytes: int) -> Header:
        """The 64 bytes' fields, before a body of so many bytes."""
        frame = memoryview(bytearray(HEADER_BYTES))
        write_push(frame, body_bytes, *self)
        return Header._make(HEADER.unpack(frame)[2:])

    @classmethod
    def of(cls, h: Header) -> PushHeader:
        """The inverse of `header`."""
        prev = 0 if h.worker == NEVER else (h.clock - h.worker << PART_BITS) + h.first
        return cls(
            h.request, h.epoch, h.clock, prev, h.items, h.part, bool(h.flags & LAST), bool(h.flags & ALL_RANGES),
            bool(h.flags & REPEAT), bool(h.flags & ROUND), h.clock - h.table if h.table else None, shard_of(h),
            bool(h.flags & RECORD),
        )  # fmt: skip


def write_push(
    frame: memoryview, more: int, request: int, epoch: int, clock: int, prev: int, blocks: int, part: int, last: bool,
    all_ranges: bool, repeat: bool, of_round: bool, committed: int | None, shard: ShardRef | None, record: bool,
) -> None:  # fmt: skip
    """Writes the header of a PUSH, by the fields of `PushHeader`, to the front of a frame, behind which so many bytes
    more follow. Makes no tuple on the way: every push writes one header for each head."""
    flags = last * LAST | all_ranges * ALL_RANGES | repeat * REPEAT | of_round * ROUND | record * RECORD
    steps, first = clock - (prev >> PART_BITS), prev & PART_MASK
    if not prev or steps >= NEVER:
        steps, first = NEVER, 0
    lag = 0 if committed is None else clock - committed
    bound, wait_ms = shard_fields(shard) if shard else (0, 0)
    HEADER.pack_into(
        frame, 0, MAGIC, VERSION, _PUSH, flags, len(frame) - HEADER_BYTES + more, request, epoch, clock, steps, first,
        part, lag, blocks, bound, wait_ms,
    )  # fmt: skip


class InitHeader(NamedTuple):
    """INIT: values for rows that do not exist yet, in `blocks` blocks. all_ranges: of all that its receiver heads at
    `epoch`; else it names them. replace: for rows that exist, too."""

    epoch: int
    worker: int
    blocks: int
    all_ranges: bool = True
    replace: bool = False
    request: int = 0

    def header(self, body_bytes: int) -> Header:
        """The 64 bytes' fields, before a body of so many bytes."""
        flags = LAST | self.all_ranges * ALL_RANGES | self.replace * REPLACE
        return Header(Kind.INIT, flags, body_bytes, self.request, self.epoch, worker=self.worker, items=self.blocks)

    @classmethod
    def of(cls, h: Header) -> InitHeader:
        """The inverse of `header`."""
        return cls(h.epoch, h.worker, h.items, bool(h.flags & ALL_RANGES), bool(h.flags & REPLACE), h.request)


class EraseHeader(NamedTuple):
    """ERASE: what a worker deletes as its deletion `number`, by the `kind` of operation: the keys of `blocks` blocks
    without gradients; all rows of `table`; the table. all_ranges: as for INIT. Deletions of a worker are numbered
    upwards, and each happens once; a table is dropped as often as it is asked for, and has no number."""

    epoch: int
    worker: int
    number: int
    kind: int
    table: int = 0
    blocks: int = 0
    all_ranges: bool = True
    request: int = 0

    def header(self, body_bytes: int = 0) -> Header:
        """The 64 bytes' fields, before a body of so many bytes."""
        return Header(
            Kind.ERASE, LAST | self.all_ranges * ALL_RANGES, body_bytes, self.request, self.epoch, self.number,
            self.worker, part=self.kind, table=self.table, items=self.blocks,
        )  # fmt: skip

    @classmethod
    def of(cls, h: Header) -> EraseHeader:
        """The inverse of `header`."""
        return cls(h.epoch, h.worker, h.clock, h.part, h.table, h.items, bool(h.flags & ALL_RANGES), h.request)


class PullHeader(NamedTuple):
    """PULL: the rows of `keys` keys of a table, by a worker at `clock`. wait_ms: how long the server may
    let it wait, 0 for as long as usual. anywhere: any full replica may answer. slots: what the optimizer keeps of the
    rows, instead of their weights. coded: as the table's filters make them. digests: what their weights hash to,
    instead of them. blocks: of several tables, so many; each says how many keys it has. usage: when rows were used
    last, how often, and their score, in three words each, instead of their weights."""

    request: int
    epoch: int
    clock: int
    worker: int
    table: int
    keys: int
    wait_ms: int = 0
    anywhere: bool = False
    slots: bool = False
    coded: bool = False
    digests: bool = False
    blocks: int | None = None
    usage: bool = False

    def header(self, body_bytes: int | None = None) -> Header:
        """The 64 bytes' fields; the body is the keys, or `body_bytes` of blocks."""
        return Header(
            Kind.PULL, self._flags, 8 * self.keys if body_bytes is None else body_bytes, self.request, self.epoch,
            self.clock, self.worker, table=self.table, items=self.keys if self.blocks is None else self.blocks,
            wait_ms=self.wait_ms,
        )  # fmt: skip

    @classmethod
    def of(cls, h: Header) -> PullHeader:
        """The inverse of `header`. Raises `FrameError` if the body is not as long as the keys are."""
        several = bool(h.flags & frames.TABLES)
        if not several and h.body != 8 * h.items:
            raise FrameError(f"a pull of {h.items} keys has a body of {h.body} bytes")
        keys = 0 if several else h.items
        return cls(
            h.request, h.epoch, h.clock, h.worker, h.table, keys, h.wait_ms, bool(h.flags & ANY),
            bool(h.flags & SLOTS), bool(h.flags & frames.CODED), bool(h.flags & frames.DIGESTS),
            h.items if several else None, bool(h.flags & frames.USAGE),
        )  # fmt: skip

    @property
    def _flags(self) -> int:
        of = self.slots * SLOTS | self.coded * frames.CODED | self.digests * frames.DIGESTS | self.usage * frames.USAGE
        return self.anywhere * ANY | of | (self.blocks is not None) * frames.TABLES


class ListKeysHeader(NamedTuple):
    """LIST_KEYS: about `keys` keys of range `range` of a table, from `place` on in an order of their own; with 0 only
    how many there are."""

    table: int
    range: int
    place: int
    keys: int
    request: int = 0
    epoch: int = 0

    def header(self) -> Header:
        """The 64 bytes' fields; there is no body."""
        return Header(
            Kind.LIST_KEYS, 0, 0, self.request, self.epoch, self.place, self.range, table=self.table, items=self.keys
        )

    @classmethod
    def of(cls, h: Header) -> ListKeysHeader:
        """The inverse of `header`."""
        return cls(h.table, h.worker, h.clock, h.items, h.request, h.epoch)


class PoliciesHeader(NamedTuple):
    """SET_POLICIES and SWEEP: of `table`; the body is a JSON object."""

    kind: Kind
    table: int

    def header(self, body_bytes: int) -> Header:
        """The 64 bytes' fields, before a body of so many bytes."""
        return Header(self.kind, LAST, body_bytes, table=self.table)

    @classmethod
    def of(cls, h: Header) -> PoliciesHeader:
        """The inverse of `header`."""
        return cls(Kind(h.kind), h.table)


class GetClocksHeader(NamedTuple):
    """GET_CLOCKS: how far has `worker` come in the ranges that the receiver heads at `epoch`?"""

    worker: int
    request: int = 0
    epoch: int = 0

    def header(self) -> Header:
        """The 64 bytes' fields; there is no body."""
        return Header(Kind.GET_CLOCKS, request=self.request, epoch=self.epoch, worker=self.worker)

    @classmethod
    def of(cls, h: Header) -> GetClocksHeader:
        """The inverse of `header`."""
        return cls(h.worker, h.request, h.epoch)


class GetViewHeader(NamedTuple):
    """GET_VIEW: send a view newer than that of `epoch`, if there is one. term: of the leader whose beat it is; seconds,
    median: the time by its clock, and by the median of its and all servers' clocks, since 1970, 0 if it does not say. A
    beat may have a body: what servers that follow the view of `epoch` may keep of tables above their capacity."""

    epoch: int
    term: int = 0
    seconds: int = 0
    median: int = 0

    def header(self) -> Header:
        """The 64 bytes' fields."""
        return Header(Kind.GET_VIEW, epoch=self.epoch, clock=self.term, table=self.seconds, items=self.median)

    @classmethod
    def of(cls, h: Header) -> GetViewHeader:
        """The inverse of `header`."""
        return cls(h.epoch, h.clock, h.table, h.items)


class UnchangedHeader(NamedTuple):
    """UNCHANGED: a server's last REPORT on this connection still says all but this. epoch: of the view that it follows;
    term, connected, silent_ms: what it knows of the leader; time_ms: by its wall clock, since 1970, below 2 ** 32 s."""

    epoch: int
    term: int
    connected: bool
    silent_ms: int
    time_ms: int

    def header(self) -> Header:
        """The 64 bytes' fields; there is no body."""
        silent_ms = min(self.silent_ms, (1 << 32) - 1)
        seconds, part = divmod(self.time_ms, 1000)
        return Header(
            Kind.UNCHANGED, LAST * self.connected, epoch=self.epoch, clock=self.term, part=part, table=seconds,
            wait_ms=silent_ms,
        )  # fmt: skip

    @classmethod
    def of(cls, h: Header) -> UnchangedHeader:
        """The inverse of `header`."""
        return cls(h.epoch, h.clock, bool(h.flags & LAST), h.wait_ms, 1000 * h.table + h.part)


class BarrierJoinHeader(NamedTuple):
    """BARRIER_JOIN: `worker` takes part in its application's rounds. predecessor: its id before, 0 for none."""

    worker: int
    predecessor: int = 0

    def header(self) -> Header:
        """The 64 bytes' fields; there is no body."""
        return Header(Kind.BARRIER_JOIN, worker=self.worker, table=self.predecessor)

    @classmethod
    def of(cls, h: Header) -> BarrierJoinHeader:
        """The inverse of `header`."""
        return cls(h.worker, h.table)


class BarrierArriveHeader(NamedTuple):
    """BARRIER_ARRIVE: `worker`'s share of round `clock` is committed everywhere; it waits `wait_ms` for the others."""

    worker: int
    clock: int
    wait_ms: int = 0

    def header(self) -> Header:
        """The 64 bytes' fields; there is no body."""
        return Header(Kind.BARRIER_ARRIVE, clock=self.clock, worker=self.worker, wait_ms=self.wait_ms)

    @classmethod
    def of(cls, h: Header) -> BarrierArriveHeader:
        """The inverse of `header`."""
        return cls(h.worker, h.clock, h.wait_ms)


class BarrierLeaveHeader(NamedTuple):
    """BARRIER_LEAVE: `worker` is in no further round, until it joins again."""

    worker: int

    def header(self) -> Header:
        """The 64 bytes' fields; there is no body."""
        return Header(Kind.BARRIER_LEAVE, worker=self.worker)

    @classmethod
    def of(cls, h: Header) -> BarrierLeaveHeader:
        """The inverse of `header`."""
        return cls(h.worker)


class ClaimShardsHeader(NamedTuple):
    """CLAIM_SHARDS: the asker's steps up to `committed` are committed everywhere."""

    committed: int

    def header(self, body_bytes: int) -> Header:
        """The 64 bytes' fields, before a body of so many bytes."""
        return Header(Kind.CLAIM_SHARDS, 0, body_bytes, clock=self.committed)

    @classmethod
    def of(cls, h: Header) -> ClaimShardsHeader:
        """The inverse of `header`."""
        return cls(h.clock)


MAX_CUT = (1 << 31) - 1  # the number of a cut, and of its checkpoint: the same bound wherever one is read


class HoldHeader(NamedTuple):
    """HOLD: begin no step, and write nothing else, until cut `cut` is released, or for `left_ms`. clock: rounds up to
    this one are still pushed (BSP), as somebody waits for them."""

    cut: int
    left_ms: int
    clock: int = 0

    def header(self) -> Header:
        """The 64 bytes' fields; there is no body."""
        return Header(Kind.HOLD, clock=self.clock, table=self.cut, wait_ms=self.left_ms)

    @classmethod
    def of(cls, h: Header) -> HoldHeader:
        """The inverse of `header`."""
        return cls(h.table, h.wait_ms, h.clock)


class HeldHeader(NamedTuple):
    """HELD: `worker` has written nothing beyond step `clock`, and that is committed, its round closed. open: not yet,
    the others of its rounds have to come as far; apart: it is in none. digest: of its progress in all ranges but those
    that came back from a checkpoint in a view up to `epoch` (`PushSession.digest`); 0 with `open`."""

    cut: int
    worker: int
    clock: int
    open: bool = False
    apart: bool = False
    digest: int = 0
    epoch: int = 0

    def header(self) -> Header:
        """The 64 bytes' fields; there is no body."""
        flags = (not self.open) * LAST | self.apart * PAUSE
        return Header(
            Kind.HELD, flags, request=self.digest, epoch=self.epoch, clock=self.clock, worker=self.worker,
            table=self.cut,
        )  # fmt: skip

    @classmethod
    def of(cls, h: Header) -> HeldHeader:
        """The inverse of `header`."""
        return cls(h.table, h.worker, h.clock, not h.flags & LAST, bool(h.flags & PAUSE), h.request, h.epoch)


class ReleaseHeader(NamedTuple):
    """RELEASE: go on, whatever cut `cut` has come to."""

    cut: int

    def header(self) -> Header:
        """The 64 bytes' fields; there is no body."""
        return Header(Kind.RELEASE, table=self.cut)

    @classmethod
    def of(cls, h: Header) -> ReleaseHeader:
        """The inverse of `header`."""
        return cls(h.table)


class OkHeader(NamedTuple):
    """OK: it is done."""

    request: int
    epoch: int

    def header(self) -> Header:
        """The 64 bytes' fields; there is no body."""
        return Header(Kind.OK, request=self.request, epoch=self.epoch)

    @classmethod
    def of(cls, h: Header) -> OkHeader:
        """The inverse of `header`."""
        return cls(h.request, h.epoch)


class RowsHeader(NamedTuple):
    """ROWS: `rows` rows of a pull's answer, from its key number `offset` on. last: there are no more."""

    request: int
    epoch: int
    offset: int
    rows: int
    last: bool

    def header(self, body_bytes: int) -> Header:
        """The 64 bytes' fields, before a body of so many bytes."""
        flags = self.last * LAST
        return Header(Kind.ROWS, flags, body_bytes, self.request, self.epoch, clock=self.offset, items=self.rows)

    @classmethod
    def of(cls, h: Header) -> RowsHeader:
        """The inverse of `header`."""
        return cls(h.request, h.epoch, h.clock, h.items, bool(h.flags & LAST))


class KeysHeader(NamedTuple):
    """KEYS: `keys` keys of a range that has `rows` rows. place: where the next ones begin, 0 if there are no more."""

    request: int
    epoch: int
    range: int
    place: int
    keys: int
    rows: int

    def header(self) -> Header:
        """The 64 bytes' fields; the body is the keys."""
        size, rows = 8 * self.keys, self.rows
        return Header(Kind.KEYS, 0, size, self.request, self.epoch, self.place, self.range, items=self.keys, bound=rows)

    @classmethod
    def of(cls, h: Header) -> KeysHeader:
        """The inverse of `header`. Raises `FrameError` if the body is not as long as the keys are."""
        if h.body != 8 * h.items:
            raise FrameError(f"a list of {h.items} keys has a body of {h.body} bytes")
        return cls(h.request, h.epoch, h.worker, h.clock, h.items, h.bound)


def shard_fields(shard: ShardRef | None) -> tuple[int, int]:
    """(bound, wait_ms) of a header: the number plus one, as 0 says that there is none, and the set."""
    return (0, 0) if shard is None else (shard.number + 1, shard.set)


def shard_of(h: Header) -> ShardRef | None:
    """The inverse."""
    return ShardRef(h.wait_ms, h.bound - 1) if h.bound else None
