"""Operations forwarded and not yet acknowledged by the tail.

One queue per successor: an entry leaves its queue, in order, when all its ranges are acknowledged. A frame's bytes
count until its last entry leaves, because the slices of one frame share one buffer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import numpy as np

from replication.chain import Ranges
from replication.messages import Operation, Seqs
from replication.progress import Progress
from replication.refusals import Refused


class Frame:
    """One operation as it came in: what it waits for, and the token of its answer, None if no worker sent it here.
    refused: what the answer says of rows that the step lacks."""

    __slots__ = ("left", "moved", "nbytes", "operation", "ranges", "refused", "token")

    def __init__(self, operation: Operation, token: object, ranges: Ranges) -> None:
        self.operation = operation
        self.token = token
        self.ranges = ranges
        self.refused: list[Refused] = []
        self.nbytes = 0
        self.left = 0
        self.moved: list[Ranges] = []


class Entry:
    """The part of a frame that waits for one successor. `before`: the worker's progress before it, per range or one for
    all. `number` orders entries as they were applied."""

    __slots__ = ("before", "frame", "number", "ranges", "seqs")

    def __init__(self, number: int, frame: Frame, ranges: Ranges, seqs: Seqs, before: int | Progress) -> None:
        self.number = number
        self.frame = frame
        self.ranges = ranges
        self.seqs = seqs
        self.before = before

    def part(self, mask: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Entry:
        """The same entry for some of its ranges."""
        before = self.before if isinstance(self.before, int) else self.before[mask]
        return Entry(self.number, self.frame, self.ranges[mask], self.seqs[mask], before)


class Log:
    """The operations of a replica that wait for successors: one queue for each."""

    __slots__ = ("_count", "_nbytes", "_queues")

    def __init__(self) -> None:
        self._queues: dict[int, deque[Entry]] = {}
        self._count = 0
        self._nbytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all that waits: what admission is judged against."""
        return self._nbytes

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def add(self, successor: int, frame: Frame, ranges: Ranges, seqs: Seqs, before: int | Progress) -> None:
        """Appends an entry that waits for the neighbour in slot `successor`."""
        self._count += 1
        if frame.left == 0:
            frame.nbytes = frame.operation.nbytes
            self._nbytes += frame.nbytes
        frame.left += 1
        self._queues.setdefault(successor, deque()).append(Entry(self._count, frame, ranges, seqs, before))

    def wait(self, frame: Frame) -> None:
        """Makes a frame wait for one thing more that is not an entry."""
        frame.left += 1

    def done(self, frame: Frame) -> bool:
        """One thing that the frame waited for has come; whether it was the last."""
        frame.left -= 1
        if frame.left:
            return False
        self._nbytes -= frame.nbytes
        return True

    def release(self, successor: int, acked: Seqs) -> list[Frame]:
        """Drops the lane's entries that `acked` (per range, int64 [P]) covers, oldest first; frames thereby done."""
        waiting = self._queues.get(successor)
        done: list[Frame] = []
        while waiting:
            entry = waiting[0]
            if np.count_nonzero(acked[entry.ranges] < entry.seqs):
                break
            waiting.popleft()
            if self.done(entry.frame):
                done.append(entry.frame)
        return done

    def waiting_for(self, successor: int) -> Iterator[Entry]:
        """The entries that wait for one successor, oldest first."""
        yield from self._queues.get(successor, ())

    def entries(self) -> list[Entry]:
        """All entries as they were applied."""
        return sorted((e for queue in self._queues.values() for e in queue), key=lambda e: e.number)

    def rebuild(self, split: Callable[[Entry], list[tuple[int, Entry]]]) -> list[Frame]:
        """Moves every entry to the queues that `split` says, in parts if need be; frames thereby done."""
        entries = self.entries()
        self._queues = {}
        done: list[Frame] = []
        for entry in entries:
            parts = split(entry)
            for successor, part in parts:
                self._queues.setdefault(successor, deque()).append(part)
            entry.frame.left += len(parts)
            if self.done(entry.frame):
                done.append(entry.frame)
        return done
