"""The recent entries of a replica's log, which compiled code holds.

For each successor they are younger than the entries that Python holds: before Python adds an entry, or looks at the
log, it takes all recent ones over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from elasticps.server.core.operations import RowBlocks, positions_of
from elasticps.server.core.replica_codec import shard_mark
from elasticps.server.core.requests import Asker, RequestTicket
from elasticps.server.fast import layout as at
from elasticps.server.fast.buffers import Chunks
from elasticps.server.fast.receive import release
from elasticps.server.fast.shared import SharedArrays
from elasticps.wire.clocks import split_record
from elasticps.wire.frames import ALL_RANGES, HEADER_BYTES, RECORD, Kind, read_blocks, read_push, unpack_header
from elasticps.wire.pool import Bytes
from replication.chain import Ranges
from replication.log import Entry, Frame, Log
from replication.messages import Operation, OperationKind, Seqs
from replication.progress import PART_BITS, Progress

MOST_ENTRIES, LEAST_ENTRIES = 8192, 64
ENTRY_WORDS = 1 << 21  # entries times ranges
LEAST_STRIDE = 16


class RecentEntries:
    """The arrays of the recent entries. slots: the connections by number; it changes as they come and go."""

    def __init__(self, shared: SharedArrays, chunks: Chunks, slots: Sequence[Asker | None], ranges: int) -> None:
        self._shared = shared
        self._chunks = chunks
        self._slots = slots
        self._ranges = ranges
        self._make(min(LEAST_STRIDE, ranges))

    def fits(self, held: int) -> bool:
        """Whether there is room for frames of as many ranges as this server has a copy of, and not too much."""
        return self._stride(held) == self._shared.fields[at.H_STRIDE]

    def fit(self, held: int) -> None:
        """Makes that room; only while there are no entries."""
        self._make(self._stride(held))

    def _stride(self, held: int) -> int:
        stride = LEAST_STRIDE
        while stride < held:
            stride *= 2
        return min(stride, self._ranges)

    def _make(self, stride: int) -> None:
        shared = self._shared
        entries = max(LEAST_ENTRIES, min(MOST_ENTRIES, ENTRY_WORDS // stride))
        shared.fields[at.H_STRIDE] = stride
        self._frames = shared.make(at.H_FRAMES, (entries, at.FRAME))
        self._frame_ranges = shared.make(at.H_FRAME_RANGES, (entries, stride), np.int32)
        self._free_frames = shared.make(at.H_FREE_FRAMES, entries)
        self._entries = shared.make(at.H_ENTRIES, (entries, at.ENTRY))
        self._entry_ranges = shared.make(at.H_ENTRY_RANGES, (entries, stride), np.int32)
        self._entry_seqs = shared.make(at.H_ENTRY_SEQS, (entries, stride))
        self._free_entries = shared.make(at.H_FREE_ENTRIES, entries)
        first_ones_first = np.arange(entries)[::-1]  # then less memory is touched
        self._free_frames[:] = self._free_entries[:] = first_ones_first
        shared.fields[at.H_FREE_FRAME_COUNT] = shared.fields[at.H_FREE_ENTRY_COUNT] = entries

    @property
    def nbytes(self) -> int:
        """Bytes of the frames of recent entries."""
        return self._shared.fields[at.H_RECENT_BYTES]

    @property
    def count(self) -> int:
        """How many recent entries there are."""
        return self._shared.fields[at.H_RECENT]

    def release(self, slot: int) -> bool:
        """Drops acknowledged entries of a successor, and answers. False, with nothing done, if frames wait for
        admission whose turn may come first."""
        if self._shared.fields[at.H_CAREFUL]:
            return False
        release(self._shared.h, slot)
        return True

    def take(self) -> Iterator[tuple[int, Frame, Ranges, Seqs, int]]:
        """Hands all entries over, oldest first."""
        found: list[tuple[int, int, int]] = []
        for slot in np.flatnonzero(self._shared[at.H_PEERS][:, at.P_FIRST] >= 0).tolist():
            e = int(self._shared[at.H_PEERS][slot, at.P_FIRST])
            while e >= 0:
                found.append((int(self._entries[e, at.E_NUMBER]), slot, e))
                e = int(self._entries[e, at.E_NEXT])
            self._shared[at.H_PEERS][slot, [at.P_FIRST, at.P_LAST]] = -1
        frames: dict[int, Frame] = {}
        taken = []
        for _, slot, e in sorted(found):
            number, n = int(self._entries[e, at.E_FRAME]), int(self._entries[e, at.E_COUNT])
            frame = frames.get(number)
            if frame is None:
                frame = frames[number] = self._frame(number)
            ranges = self._entry_ranges[e, :n].astype(np.int64)
            before = int(self._frames[number, at.F_BEFORE])
            taken.append((slot, frame, ranges, self._entry_seqs[e, :n].copy(), before))
        self._give_back([e for _, _, e in found], list(frames))
        return iter(taken)

    def _give_back(self, entries: list[int], frames: list[int]) -> None:
        f = self._shared.fields
        for free, size, numbers in (
            (self._free_entries, at.H_FREE_ENTRY_COUNT, entries),
            (self._free_frames, at.H_FREE_FRAME_COUNT, frames),
        ):
            free[f[size] : f[size] + len(numbers)] = numbers
            f[size] += len(numbers)
        np.subtract.at(self._chunks.refs, self._frames[frames, at.F_CHUNK], 1)
        f[at.H_RECENT] = f[at.H_RECENT_BYTES] = 0
        # Python refers to what the log had: whoever needs room looks whether it still does.
        self._shared[at.H_CONNECTIONS][:, at.C_PINNED] = 1

    def _frame(self, number: int) -> Frame:
        """A frame as Python's log has it; its content is a view of the chunk that it was received into."""
        row = self._frames[number].tolist()
        ranges = self._frame_ranges[number, : row[at.F_COUNT]].astype(np.int64)
        array: Bytes = self._chunks.arrays[row[at.F_CHUNK]]
        header = unpack_header(array.data, row[at.F_OFFSET], len(array))
        body = array[row[at.F_OFFSET] + HEADER_BYTES : row[at.F_OFFSET] + HEADER_BYTES + header.body]
        record = None
        if header.flags & RECORD:
            body, record = split_record(body, row[at.F_AFTER] >> PART_BITS, self._ranges)
        if header.kind == Kind.PUSH:
            _, blocks = read_push(bool(header.flags & ALL_RANGES), header.items, body)
        else:
            blocks = read_blocks(header.items, body, ((4 * header.table + 7) & ~7) + 8 * header.table)
        content = RowBlocks(blocks, ranges, positions_of(ranges, self._ranges), shard_mark(header))
        operation = Operation(
            OperationKind.PUSH, row[at.F_WORKER], row[at.F_AFTER], content, row[at.F_BYTES], record=record
        )
        token = None
        if row[at.F_CONNECTION] >= 0:
            connection = self._slots[row[at.F_CONNECTION]]
            alive = self._shared[at.H_CONNECTIONS][row[at.F_CONNECTION], at.C_SERIAL] == row[at.F_SERIAL]
            token = (
                RequestTicket(connection, Kind.PUSH, row[at.F_REQUEST]) if connection is not None and alive else _GONE
            )
        return Frame(operation, token, ranges)


class _Gone:
    """The ticket of a request whose connection is closed."""

    def reply(self, reply: object) -> None:
        """Answers nothing."""

    clocks: Callable[[_Gone, object], None] = reply

    def hold(self) -> None:
        """Pauses nothing."""

    release = hold


_GONE = _Gone()


class RecentLog(Log):
    """A log that includes the recent entries, which compiled code holds; `FastPath` sets `recent`."""

    __slots__ = ("recent",)

    def __init__(self) -> None:
        super().__init__()
        self.recent: RecentEntries | None = None

    @property
    def nbytes(self) -> int:
        return self._nbytes + (0 if self.recent is None else self.recent.nbytes)

    @property
    def old_bytes(self) -> int:
        """Bytes of the entries that Python holds."""
        return self._nbytes

    def old(self) -> dict[int, int]:
        """By successor, how many entries Python holds."""
        return {successor: len(entries) for successor, entries in self._queues.items() if entries}

    def __len__(self) -> int:
        return super().__len__() + (0 if self.recent is None else self.recent.count)

    def take_over(self) -> None:
        """Moves all recent entries to Python's part of the log."""
        if self.recent is not None and self.recent.count:
            for successor, frame, ranges, seqs, before in self.recent.take():
                super().add(successor, frame, ranges, seqs, before)

    def add(self, successor: int, frame: Frame, ranges: Ranges, seqs: Seqs, before: int | Progress) -> None:
        self.take_over()
        super().add(successor, frame, ranges, seqs, before)

    def release(self, successor: int, acked: Seqs) -> list[Frame]:
        done = super().release(successor, acked)
        recent = self.recent
        if recent is not None and recent.count and not self._queues.get(successor) and not recent.release(successor):
            self.take_over()
            done += super().release(successor, acked)
        return done

    def waiting_for(self, successor: int) -> Iterator[Entry]:
        self.take_over()
        return super().waiting_for(successor)

    def entries(self) -> list[Entry]:
        self.take_over()
        return super().entries()

    def rebuild(self, split: Callable[[Entry], list[tuple[int, Entry]]]) -> list[Frame]:
        self.take_over()
        return super().rebuild(split)
