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

from replication.chain import Member, Ranges, Role
from replication.core import Core, PeerError
from replication.effects import CaughtUp, Effects, Erase, Install, NextChunk, SnapshotRange
from replication.log import Log
from replication.messages import NOTHING, ChunkAck, Forward, Payload, Seqs, SnapshotChunk
from replication.refusals import RefusedStep

_NOBODY = np.empty(0, dtype=np.int64)


class Fill:
    """A snapshot on its way: to whom, under which id, which piece comes next."""

    __slots__ = ("fill", "number", "serial", "slot")

    def __init__(self, slot: int, fill: int, serial: int) -> None:
        self.slot = slot
        self.fill = fill
        self.serial = serial
        self.number = 0


class SnapshotTransfer(Core):
    """Both ends of a filling."""

    def __init__(self, me: Member, ranges: int, log: Log | None = None) -> None:
        super().__init__(me, ranges, log)
        self._fills: dict[int, Fill] = {}
        self._reported: dict[int, int] = {}
        self._pieces: dict[int, int] = {}
        self._serial = 0
        self._back: NDArray[np.bool_] = np.zeros(
            ranges, dtype=np.bool_
        )  # I am the tail, the joiner a `CopyState.CATCHING_UP`
        self._goal: Seqs = np.zeros(ranges, dtype=np.int64)  # for which it goes, that acknowledgements wait for it

    # -- the tail ---------------------------------------------------------------------------------------------------

    def levels(self) -> list[CaughtUp]:
        """Every CAUGHT_UP that stands: state, told again to each new leader."""
        if not self._reported:
            return []
        joiners = ((r, f, int(self._down[r])) for r, f in sorted(self._reported.items()))
        return [CaughtUp(r, f, self._members[down] if down >= 0 else self.me) for r, f, down in joiners]

    def spent(self) -> list[tuple[int, int]]:
        """(range, fill) of copies that cannot have any more what was kept for them: told to leaders as `levels` are."""
        return [(r, int(self._since[r])) for r in np.flatnonzero(self.retained.spent).tolist()]

    def let_go(self) -> Effects:
        """Memory is short: nothing more is kept for copies that are late."""
        self.retained.give_up_all()
        return []

    def piece(self, r: int, serial: int, upto: int, last: bool, payload: Payload) -> Effects:
        """A piece of snapshot `serial` was cut at this instant; nothing happens if the snapshot is void."""
        out: Effects = []
        fill = self._fills.get(r)
        if fill is None or fill.serial != serial or not self._linked[fill.slot]:
            return out
        workers, progress, number = _NOBODY, _NOBODY, fill.number
        refused: list[RefusedStep] = []
        if number == 0:
            workers, progress = self.clocks.column(r)
            refused = self.refusals.column(r)
            self._synced[r] = True
            self._recode()
        fill.number += 1
        seq = int(self.seq[r])
        piece = SnapshotChunk(self.epoch, r, fill.fill, number, upto, last, seq, workers, progress, payload, refused)
        self._send(fill.slot, piece, out)
        return out

    def _start_fill(self, r: int, slot: int, out: Effects) -> None:
        self._serial += 1
        self._fills[r] = Fill(slot, int(self._since[r]), self._serial)
        self._synced[r] = False
        one = np.array([r], dtype=np.int64)
        if self.waiting[r]:
            self.waiting[r] = False
            self._recode()
            self._commit(slot, one, self.seq[one], out)
        self._recode()
        out.append(SnapshotRange(self._members[slot], r, int(self._since[r]), self._serial))

    def _installed(self, slot: int, message: ChunkAck, out: Effects) -> None:
        r = message.range
        fill = self._fills.get(r)
        if fill is None or fill.slot != slot or fill.fill != message.fill or message.number != fill.number - 1:
            return
        if message.seq > self.seq[r]:
            raise PeerError(f"{self.me}: {self._members[slot]} has more of range {r} than it was sent")
        if not message.last:
            out.append(NextChunk(self._members[slot], r, fill.serial))
            return
        del self._fills[r]
        self._wait_for_joiner(r, message.seq, out)

    def _wait_for_joiner(self, r: int, seq: int, out: Effects) -> None:
        """From here on acknowledgements wait for the joiner, which has everything up to `seq`."""
        self._joined[r] = seq
        self._wait_for(np.array([r], dtype=np.int64), out)

    def _wait_for(self, ranges: Ranges, out: Effects) -> None:
        self.waiting[ranges] = True
        self._recode()
        self._report_level(ranges, out)

    def _report_level(self, ranges: Ranges, out: Effects) -> None:
        """CAUGHT_UP for the ranges whose joiner has all that was ever acknowledged."""
        for r in ranges[self.waiting[ranges] & (self._joined[ranges] >= self.acked[ranges])].tolist():
            if r not in self._reported:
                self._reported[r] = int(self._since[r])
                self.version += 1
                self.retained.end(np.array([r], dtype=np.int64))
                out.append(CaughtUp(r, int(self._since[r]), self._members[self._down[r]]))

    def _joiner_acked(self, slot: int, ranges: Ranges, seqs: Seqs, out: Effects) -> None:
        """The joiner of these ranges, of which I am the tail, has everything up to `seqs`."""
        self._joined[ranges] = np.maximum(self._joined[ranges], seqs)
        there = self._back[ranges] & self._synced[ranges] & ~self.waiting[ranges]
        there &= self._joined[ranges] >= self._goal[ranges]
        if there.any():
            self._wait_for(ranges[there], out)
        counted = self.waiting[ranges]
        if counted.any():
            self._commit(slot, ranges[counted], self._joined[ranges[counted]], out)
            self._report_level(ranges[counted], out)

    def _joiner_resync(self, slot: int, r: int, seq: int, out: Effects) -> None:
        """The joiner is at `seq`, on a new link or in a new view: go on where it stands, or fill it."""
        if seq == NOTHING or seq < self.acked[r]:
            self._start_fill(r, slot, out)
            return
        for entry in self.log.waiting_for(slot):
            mask = (entry.ranges == r) & (entry.seqs > seq)
            if mask.any():
                part = entry.part(mask)
                self._send(slot, Forward(self.epoch, part.ranges, part.seqs, entry.frame.operation), out)
        self._synced[r] = True
        self._wait_for_joiner(r, seq, out)
        self._joiner_acked(slot, np.array([r], dtype=np.int64), np.array([seq], dtype=np.int64), out)

    def _catch_up(self, slot: int, ranges: Ranges, seqs: Seqs, out: Effects) -> None:
        """The joiner of these ranges has kept its copies, which are at `seqs`: it gets what they lack."""
        able = self.retained.covers(ranges, seqs) & (seqs <= self.seq[ranges])
        self.retained.give_up(ranges[~able])
        ranges, seqs = ranges[able], seqs[able]
        if ranges.shape[0] == 0:
            return
        self.retained.share(ranges)
        for operation, part, at in self.retained.after(ranges, seqs):
            self._send(slot, Forward(self.epoch, part, at, operation), out)
        self._synced[ranges] = True
        self._joined[ranges], self._goal[ranges] = seqs, self.seq[ranges]
        self._recode()
        self._joiner_acked(slot, ranges, seqs, out)

    # -- what a successor may say ---------------------------------------------------------------------------------

    def _check_sent(self, slot: int, ranges: Ranges, seqs: Seqs) -> None:
        if np.count_nonzero(seqs > self.seq[ranges]):
            raise PeerError(f"{self.me}: {self._members[slot]} acknowledged operations that it was never sent")

    def _check_prefix(
        self, slot: int, ranges: Ranges, seqs: Seqs, acked: Seqs, joiner: NDArray[np.bool_]
    ) -> None:  # fmt: skip
        """A full successor has what it acknowledges, and what was acknowledged before; nobody has more than I have."""
        self._check_sent(slot, ranges[~joiner], acked[~joiner])
        known = np.maximum(self.acked[ranges], acked)
        if np.count_nonzero((seqs > self.seq[ranges]) | ((seqs < known) & ~joiner)):
            raise PeerError(f"{self.me}: {self._members[slot]} is not a prefix of me within the log")
        lost: list[int] = ranges[joiner & ((seqs == NOTHING) | (seqs < self.acked[ranges]))].tolist()
        if not self._reported.keys().isdisjoint(lost):
            raise PeerError(f"{self.me}: {self._members[slot]} was level with ranges of {lost} and has lost them")

    # -- the joiner -------------------------------------------------------------------------------------------------

    def _piece(self, slot: int, message: SnapshotChunk, out: Effects) -> None:
        r = message.range
        if self._up[r] != slot or self.role[r] != Role.JOINING or message.epoch < self._since[r]:
            return
        self._check_content(slot, message)
        if message.number == 0:
            one = np.array([r], dtype=np.int64)
            self._erase(one, out)
            self.seq[r] = message.seq
            self.clocks.set_column(r, message.workers, message.progress)
            self.refusals.set_column(r, message.refused)
        elif message.number != self._pieces.get(r):
            raise PeerError(f"{self.me}: piece {message.number} of range {r} came, not {self._pieces.get(r)}")
        elif message.seq != self.seq[r]:
            # One of them has overtaken the other: the piece's rows would lack an operation, or have it twice.
            raise PeerError(f"{self.me}: a piece of range {r} at {message.seq} came when {int(self.seq[r])} had come")
        self._pieces[r] = message.number + 1
        self._bounds[r] = message.upto
        out.append(Install(r, message.upto, message.last, message.payload))
        if message.last:
            self.filled[r] = True
            self.acked[r] = self.seq[r]
            del self._pieces[r], self._bounds[r]
        self._recode()
        answer = ChunkAck(self.epoch, r, message.fill, message.number, message.last, int(self.seq[r]))
        self._send(slot, answer, out)

    def _erase(self, ranges: Ranges, out: Effects) -> None:
        """Back to nothing in these ranges."""
        self.seq[ranges] = 0
        self.acked[ranges] = 0
        self.filled[ranges] = False
        self.clocks.clear(ranges)
        self.refusals.clear(ranges)
        for r in ranges.tolist():
            self._bounds.pop(r, None)
            self._pieces.pop(r, None)
        out.append(Erase(ranges))
