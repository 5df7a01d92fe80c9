"""Joining: how a tail fills a new replica while operations go on, and how it comes to be one that counts.

1. The joiner's RESYNC says NOTHING. The tail starts a snapshot; the executor cuts it into chunks, each an interval of
   key hashes taken at one instant, each sent when the one before is in place.
2. From the first piece on every operation of the range follows on the same FIFO link. The joiner applies it inside the
   intervals that it has. So an interval that is in place equals the tail's at the joiner's seq.
3. When the last piece is in place the tail first makes its acknowledgements wait for the joiner too. Then, once the
   joiner has all that was ever acknowledged, it reports CAUGHT_UP. From here on only a view ends the waiting.

A late copy that catches up (`CopyState.CATCHING_UP`) gets the operations that it lacks instead, which were retained.
Once it has come to the tail's seq of the moment when it asked, acknowledgements wait for it, as for a joiner whose last
piece is in place. If the operations are gone nothing is sent: the leader hears of it, and begins a filling.

Safety: CAUGHT_UP at fill f is reported after the last acknowledgement that the joiner lacks, and none is given without
the joiner while since[r] == f. A view that promotes it follows (by compare-and-set) one with since[r] == f, hence
whatever was or is acknowledged before the promotion is in the joiner. A transfer starts again only if CAUGHT_UP was
never reported (a complete joiner keeps its copy over a lost link, and the log reaches back to it), or in a new view,
where f is void.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from replication.chain import Ranges, Role
from replication.core import Core, PeerError
from replication.effects import CaughtUp, Erase, Install, NextChunk, SnapshotRange
from replication.messages import NOTHING, ChunkAck, Forward, Payload, Seqs, SnapshotChunk
from replication.refusals import RefusedStep
from replication.step_records import StepRecord

_NOBODY = np.empty(0, dtype=np.int64)


class Fill:
    """A snapshot on its way: to whom, under which id, which piece comes next."""

    __slots__ = ("fill", "number", "serial", "slot")

    def __init__(self, slot: int, fill: int, serial: int) -> None:
        self.slot = slot
        self.fill = fill
        self.serial = serial
        self.number = 0


class SnapshotTransfer:
    """Both ends of a filling.

    fills     snapshots on their way from here, by range
    reported  range -> fill id of joiners that were reported level
    back      bool [P]: I am the tail, and the joiner is a `CopyState.CATCHING_UP`
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        ranges = core.ranges
        self.fills: dict[int, Fill] = {}
        self.reported: dict[int, int] = {}
        self._pieces: dict[int, int] = {}
        self._serial = 0
        self.back: NDArray[np.bool_] = np.zeros(ranges, dtype=np.bool_)
        self._goal: Seqs = np.zeros(ranges, dtype=np.int64)  # for which it goes, that acknowledgements wait for it

    # -- the tail ---------------------------------------------------------------------------------------------------

    def levels(self) -> list[CaughtUp]:
        """Every CAUGHT_UP that stands: state, told again to each new leader."""
        core = self._core
        if not self.reported:
            return []
        joiners = ((r, f, int(core.neighbours.down[r])) for r, f in sorted(self.reported.items()))
        return [CaughtUp(r, f, core.neighbours.members[down] if down >= 0 else core.me) for r, f, down in joiners]

    def spent(self) -> list[tuple[int, int]]:
        """(range, fill) of copies that cannot have any more what was kept for them: told to leaders as `levels` are."""
        core = self._core
        return [(r, int(core.neighbours.since[r])) for r in np.flatnonzero(core.retained.spent).tolist()]

    def piece(self, r: int, serial: int, upto: int, last: bool, payload: Payload) -> None:
        """A piece of snapshot `serial` was cut at this instant; nothing happens if the snapshot is void."""
        core = self._core
        fill = self.fills.get(r)
        if fill is None or fill.serial != serial or not core.neighbours.linked[fill.slot]:
            return
        workers, progress, number = _NOBODY, _NOBODY, fill.number
        refused: list[RefusedStep] = []
        records: list[tuple[int, StepRecord]] = []
        if number == 0:
            workers, progress = core.clocks.column(r)
            refused, records = core.refusals.column(r), core.records.column(r)
            core.synced[r] = True
            core.recode()
        fill.number += 1
        seq = int(core.seq[r])
        piece = SnapshotChunk(
            core.epoch, r, fill.fill, number, upto, last, seq, workers, progress, payload, refused, records
        )
        core.send(fill.slot, piece)

    def refill(self, r: int, serial: int) -> None:
        """Begins a snapshot again from its first piece, with which the joiner drops the pieces that it has. Only while
        no piece is on its way; nothing happens if the snapshot is void."""
        fill = self.fills.get(r)
        if fill is not None and fill.serial == serial:
            self._start_fill(r, fill.slot)

    def _start_fill(self, r: int, slot: int) -> None:
        core = self._core
        self._serial += 1
        self.fills[r] = Fill(slot, int(core.neighbours.since[r]), self._serial)
        core.synced[r] = False
        one = np.array([r], dtype=np.int64)
        if core.waiting[r]:
            core.waiting[r] = False
            core.recode()
            core.commit(slot, one, core.seq[one])
        core.recode()
        core.effects.append(
            SnapshotRange(core.neighbours.members[slot], r, int(core.neighbours.since[r]), self._serial)
        )

    def installed(self, slot: int, message: ChunkAck) -> None:
        core = self._core
        r = message.range
        fill = self.fills.get(r)
        if fill is None or fill.slot != slot or fill.fill != message.fill or message.number != fill.number - 1:
            return
        if message.seq > core.seq[r]:
            raise PeerError(f"{core.me}: {core.neighbours.members[slot]} has more of range {r} than it was sent")
        if not message.last:
            core.effects.append(NextChunk(core.neighbours.members[slot], r, fill.serial))
            return
        del self.fills[r]
        self._wait_for_joiner(r, message.seq)

    def _wait_for_joiner(self, r: int, seq: int) -> None:
        """From here on acknowledgements wait for the joiner, which has everything up to `seq`."""
        self._core.joined[r] = seq
        self._wait_for(np.array([r], dtype=np.int64))

    def _wait_for(self, ranges: Ranges) -> None:
        core = self._core
        core.waiting[ranges] = True
        core.recode()
        self._report_level(ranges)

    def _report_level(self, ranges: Ranges) -> None:
        """CAUGHT_UP for the ranges whose joiner has all that was ever acknowledged."""
        core = self._core
        for r in ranges[core.waiting[ranges] & (core.joined[ranges] >= core.acked[ranges])].tolist():
            if r not in self.reported:
                self.reported[r] = int(core.neighbours.since[r])
                core.version += 1
                core.retained.end(np.array([r], dtype=np.int64))
                core.effects.append(
                    CaughtUp(r, int(core.neighbours.since[r]), core.neighbours.members[core.neighbours.down[r]])
                )

    def joiner_acked(self, slot: int, ranges: Ranges, seqs: Seqs) -> None:
        """The joiner of these ranges, of which I am the tail, has everything up to `seqs`."""
        core = self._core
        core.joined[ranges] = np.maximum(core.joined[ranges], seqs)
        there = self.back[ranges] & core.synced[ranges] & ~core.waiting[ranges]
        there &= core.joined[ranges] >= self._goal[ranges]
        if there.any():
            self._wait_for(ranges[there])
        counted = core.waiting[ranges]
        if counted.any():
            core.commit(slot, ranges[counted], core.joined[ranges[counted]])
            self._report_level(ranges[counted])

    def joiner_resync(self, slot: int, r: int, seq: int) -> None:
        """The joiner is at `seq`, on a new link or in a new view: go on where it stands, or fill it."""
        core = self._core
        if seq == NOTHING or seq < core.acked[r]:
            self._start_fill(r, slot)
            return
        for entry in core.log.waiting_for(slot):
            mask = (entry.ranges == r) & (entry.seqs > seq)
            if mask.any():
                part = entry.part(mask)
                core.send(slot, Forward(core.epoch, part.ranges, part.seqs, entry.frame.operation))
        core.synced[r] = True
        self._wait_for_joiner(r, seq)
        self.joiner_acked(slot, np.array([r], dtype=np.int64), np.array([seq], dtype=np.int64))

    def catch_up(self, slot: int, ranges: Ranges, seqs: Seqs) -> None:
        """The joiner of these ranges has kept its copies, which are at `seqs`: it gets what they lack."""
        core = self._core
        able = core.retained.covers(ranges, seqs) & (seqs <= core.seq[ranges])
        core.retained.give_up(ranges[~able])
        ranges, seqs = ranges[able], seqs[able]
        if ranges.shape[0] == 0:
            return
        core.retained.share(ranges)
        for operation, part, at in core.retained.after(ranges, seqs):
            core.send(slot, Forward(core.epoch, part, at, operation))
        core.synced[ranges] = True
        core.joined[ranges], self._goal[ranges] = seqs, core.seq[ranges]
        core.recode()
        self.joiner_acked(slot, ranges, seqs)

    # -- what a successor may say ---------------------------------------------------------------------------------

    def check_sent(self, slot: int, ranges: Ranges, seqs: Seqs) -> None:
        core = self._core
        if np.count_nonzero(seqs > core.seq[ranges]):
            raise PeerError(
                f"{core.me}: {core.neighbours.members[slot]} acknowledged operations that it was never sent"
            )

    def check_prefix(
        self, slot: int, ranges: Ranges, seqs: Seqs, acked: Seqs, joiner: NDArray[np.bool_]
    ) -> None:  # fmt: skip
        """A full successor has what it acknowledges, and what was acknowledged before; nobody has more than I have."""
        core = self._core
        self.check_sent(slot, ranges[~joiner], acked[~joiner])
        known = np.maximum(core.acked[ranges], acked)
        if np.count_nonzero((seqs > core.seq[ranges]) | ((seqs < known) & ~joiner)):
            raise PeerError(f"{core.me}: {core.neighbours.members[slot]} is not a prefix of me within the log")
        lost: list[int] = ranges[joiner & ((seqs == NOTHING) | (seqs < core.acked[ranges]))].tolist()
        if not self.reported.keys().isdisjoint(lost):
            raise PeerError(
                f"{core.me}: {core.neighbours.members[slot]} was level with ranges of {lost} and has lost them"
            )

    # -- the joiner -------------------------------------------------------------------------------------------------

    def install_piece(self, slot: int, message: SnapshotChunk) -> None:
        core = self._core
        r = message.range
        if core.neighbours.up[r] != slot or core.role[r] != Role.JOINING or message.epoch < core.neighbours.since[r]:
            return
        core.check_content(slot, message)
        if message.number == 0:
            one = np.array([r], dtype=np.int64)
            self.erase(one)
            core.seq[r] = message.seq
            core.clocks.set_column(r, message.workers, message.progress)
            core.refusals.set_column(r, message.refused)
            core.records.set_column(r, message.records)
        elif message.number != self._pieces.get(r):
            raise PeerError(f"{core.me}: piece {message.number} of range {r} came, not {self._pieces.get(r)}")
        elif message.seq != core.seq[r]:
            # One of them has overtaken the other: the piece's rows would lack an operation, or have it twice.
            raise PeerError(f"{core.me}: a piece of range {r} at {message.seq} came when {int(core.seq[r])} had come")
        self._pieces[r] = message.number + 1
        core.bounds[r] = message.upto
        core.effects.append(Install(r, message.upto, message.last, message.payload))
        if message.last:
            core.filled[r] = True
            core.acked[r] = core.seq[r]
            del self._pieces[r], core.bounds[r]
        core.recode()
        answer = ChunkAck(core.epoch, r, message.fill, message.number, message.last, int(core.seq[r]))
        core.send(slot, answer)

    def erase(self, ranges: Ranges) -> None:
        """Back to nothing in these ranges."""
        core = self._core
        core.seq[ranges] = 0
        core.acked[ranges] = 0
        core.filled[ranges] = False
        core.clocks.clear(ranges)
        core.refusals.clear(ranges)
        core.records.clear(ranges)
        for r in ranges.tolist():
            core.bounds.pop(r, None)
            self._pieces.pop(r, None)
        core.effects.append(Erase(ranges))
