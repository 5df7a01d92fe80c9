"""Vector clocks: how far each worker's pushes have been applied, per range.

Progress is one int64: clock << 16 | parts of the next step already applied. A step of k parts takes progress from
(c-1) << 16 through (c-1) << 16 | 1 … to c << 16, so one comparison with a scalar judges a frame in all its ranges:
equal to what the part follows: next; above: a duplicate; below: a gap.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from replication.chain import Ranges

PART_BITS = 16
PART_MASK = (1 << PART_BITS) - 1
MAX_PARTS = (1 << PART_BITS) - 1
"""Of a step. With one more, the step that lacks only its last part would read as complete."""
MAX_CLOCK = 1 << 46
"""Clocks and bases from outside must be checked against this: progress has to fit an int64."""

ERASER = 1 << 31
"""With this added, a worker's id stands for its deletions: whose progress they are. Ids of workers are below."""

MAX_WORKER = (1 << 32) - 1

FIRST_ROWS = 16  # of the clocks' matrix, which then doubles
FIRST_COLUMNS = 16  # the same
_AT_ONCE = 512  # departed workers whose bits are packed together, from a byte for each of them and each range

Progress = NDArray[np.int64]


def before_part(clock: int, part: int) -> int:
    """The progress that part `part` of step `clock` follows."""
    return ((clock - 1) << PART_BITS) | part


def after_part(clock: int, part: int, last: bool) -> int:
    """The progress that it leaves."""
    return clock << PART_BITS if last else ((clock - 1) << PART_BITS) | (part + 1)


def touched_clock(progress: int) -> int:
    """The last clock that `progress` has seen anything of: a step under way counts."""
    return (progress + (1 << PART_BITS) - 1) >> PART_BITS


def progress_digest(workers: Progress | int, progress: Progress, ranges: Ranges) -> NDArray[np.uint64]:
    """What `ranges`, int64 [m], add to the digests of workers' progress, uint64 [n], if each worker has this progress
    in all of them, int64 [n]. The digest of a worker's progress in several ranges is the sum, modulo 2^64; two that are
    equal are those of equal progress. No progress adds 0."""
    added: NDArray[np.uint64] = _mixed(workers, progress) * _mixed(0, ranges + 1).sum(dtype=np.uint64)
    return added


def digest_of(worker: int, ranges: Ranges, progress: Progress) -> int:
    """The digest of a worker's progress, int64 [m], in `ranges`, int64 [m]."""
    return int((_mixed(worker, progress) * _mixed(0, ranges + 1)).sum(dtype=np.uint64))


def _mixed(salts: Progress | int, numbers: Progress) -> NDArray[np.uint64]:
    """Numbers that look like chance, uint64, one for each pair of a salt and a number; 0 for number 0."""
    mixed = np.atleast_1d(salts).astype(np.uint64) * np.uint64(0xC2B2AE3D27D4EB4F)
    mixed = (mixed ^ numbers.astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ mixed >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ mixed >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    found: NDArray[np.uint64] = np.where(numbers != 0, mixed ^ mixed >> np.uint64(31), np.uint64(0))
    return found


class Clocks:
    """Progress of every worker in every range.

    Of P ranges a server holds few where there are many servers. So a range gets a column with the first progress that
    is recorded in it, and loses the column when it is cleared.

    matrix: int64 [rows, columns]; column 0 is 0. workers: int64 [rows], whose row it is, 0 for nobody's (ids are above
    0). columns: int64 [P], the column of a range, 0 for none. Rows and columns are used again when empty. All three are
    replaced when they grow or shrink. `generation` counts that, and rows and columns that come into use or go out of
    it: callers that hold the arrays compare it. Workers that have left have no row: their clocks are in
    `DepartedClocks`.
    """

    __slots__ = (
        "_departed", "_free", "_free_columns", "_ranges", "_slots", "columns", "generation", "matrix", "workers",
    )  # fmt: skip

    def __init__(self, ranges: int) -> None:
        self._ranges = ranges
        self._slots: dict[int, int] = {}
        self._free: list[int] = []
        self._departed = DepartedClocks(ranges)
        self.generation = 0
        self.matrix: NDArray[np.int64] = np.zeros((FIRST_ROWS, FIRST_COLUMNS), dtype=np.int64)
        self.workers: NDArray[np.int64] = np.zeros(FIRST_ROWS, dtype=np.int64)
        self.columns: NDArray[np.int64] = np.zeros(ranges, dtype=np.int64)
        self._free_columns = list(range(FIRST_COLUMNS - 1, 0, -1))

    @property
    def used(self) -> int:
        """Rows below which all that are in use lie."""
        return len(self._slots) + len(self._free)

    @property
    def newest(self) -> int:
        """The highest worker id of which anything is recorded, 0 for none."""
        return int(np.max(np.concatenate([self.workers, self._departed.workers]) % ERASER))

    def of(self, worker: int, ranges: Ranges) -> Progress:
        """The worker's progress in some ranges, int64 [n], a copy; zeros for one never heard of."""
        slot = self._slots.get(worker)
        if slot is not None:
            progress: Progress = self.matrix[slot, self.columns[ranges]]
            return progress
        return self.read(worker)[ranges]

    def at(self, worker: int, r: int) -> int:
        """The worker's progress in one range."""
        slot = self._slots.get(worker)
        return int(self.read(worker)[r] if slot is None else self.matrix[slot, self.columns[r]])

    def read(self, worker: int) -> Progress:
        """The worker's progress in every range, int64 [P], a copy; zeros for one never heard of."""
        slot = self._slots.get(worker)
        if slot is not None:
            row: Progress = self.matrix[slot][self.columns]
            return row
        departed = self._departed.look(worker)
        return np.zeros(self._ranges, np.int64) if departed is None else departed

    def set(self, worker: int, ranges: Ranges, progress: Progress | int) -> None:
        """Sets the worker's progress in some ranges."""
        if worker not in self._slots:
            self._take_slot(worker)
        columns = self.columns[ranges]
        if np.count_nonzero(columns) < columns.shape[0]:
            columns = self._take_columns(ranges)
        self.matrix[self._slots[worker], columns] = progress

    def _take_slot(self, worker: int) -> None:
        """Gives a worker that has none a row, with what `DepartedClocks` has of it."""
        if self._free:
            slot = self._free.pop()
        else:
            slot = len(self._slots)
            if slot == len(self.workers):
                self._resize(2 * slot, self.matrix.shape[1])
                slot = len(self._slots)
        self._slots[worker] = slot
        self.workers[slot] = worker
        self.generation += 1
        if (before := self._departed.take(worker)) is not None:
            ranges = np.flatnonzero(before)
            columns = self._take_columns(ranges)
            self.matrix[self._slots[worker], columns] = before[ranges]

    def _take_columns(self, ranges: Ranges) -> NDArray[np.int64]:
        """Gives a column to each of these ranges that has none; the columns of all of them."""
        lacking = np.unique(ranges[self.columns[ranges] == 0])
        if lacking.shape[0] > len(self._free_columns):
            columns = self.matrix.shape[1]
            needed = columns - len(self._free_columns) + lacking.shape[0]
            while columns < needed:
                columns *= 2
            self._resize(len(self.workers), min(columns, self._ranges + 1))
        if lacking.shape[0]:
            self.columns[lacking] = [self._free_columns.pop() for _ in range(lacking.shape[0])]
            self.generation += 1
        columns_of: NDArray[np.int64] = self.columns[ranges]
        return columns_of

    def known(self, worker: int) -> bool:
        """Whether anything of that worker is recorded."""
        return worker in self._slots or bool((self._departed.workers == worker).any())

    def retire_rows(self, present: Collection[int]) -> None:
        """Moves the clocks of all workers but these to `DepartedClocks`, as far as possible, and frees their rows."""
        away = [worker for worker in self._slots if worker not in present]
        if not away:
            return
        slots = np.array([self._slots[worker] for worker in away])
        rows, ranges = self.matrix[slots], np.flatnonzero(self.columns)
        done = self._departed.put(away, rows[:, self.columns[ranges]], ranges) | ~rows.any(axis=1)
        self.matrix[slots[done]] = self.workers[slots[done]] = 0
        for i in np.flatnonzero(done).tolist():
            self._free.append(self._slots.pop(away[i]))
        if len(self.workers) > max(FIRST_ROWS, 4 * len(self._slots)):
            self._resize(_room(FIRST_ROWS, len(self._slots)), self.matrix.shape[1])
        self.generation += 1

    def _resize(self, rows: int, columns: int) -> None:
        """Moves the rows and columns in use to the front of a matrix of another size."""
        slots, ranges = np.array(list(self._slots.values()), np.int64), np.flatnonzero(self.columns)
        matrix, workers = np.zeros((rows, columns), np.int64), np.zeros(rows, np.int64)
        matrix[: len(slots), 1 : len(ranges) + 1] = self.matrix[slots[:, None], self.columns[ranges]]
        workers[: len(slots)] = self.workers[slots]
        self.matrix, self.workers, self._free = matrix, workers, []
        self._slots = {worker: slot for slot, worker in enumerate(self._slots)}
        self.columns = np.zeros(self._ranges, np.int64)
        self.columns[ranges] = np.arange(1, len(ranges) + 1)
        self._free_columns = list(range(columns - 1, len(ranges), -1))
        self.generation += 1

    def forget(self, worker: int) -> None:
        """Gives the worker's row back if nothing is left in it: it retired from every range held here."""
        slot = self._slots.get(worker)
        if slot is not None and not self.matrix[slot].any():
            del self._slots[worker]
            self.workers[slot] = 0
            self._free.append(slot)

    def column(self, r: int) -> tuple[NDArray[np.int64], Progress]:
        """(workers, progress) of one range, sorted by worker: what a snapshot of the range carries."""
        progress = self.matrix[: self.used, self.columns[r]]
        slots = np.flatnonzero(progress)
        departed, values = self._departed.column(r)
        workers = np.concatenate([self.workers[slots], departed])
        order = np.argsort(workers)
        return workers[order], np.concatenate([progress[slots], values])[order]

    def set_column(self, r: int, workers: NDArray[np.int64], progress: Progress) -> None:
        """Replaces one range's clocks by those of a snapshot."""
        self.matrix[:, self.columns[r]] = 0
        rest = ~self._departed.set_column(r, workers, progress)
        if rest.any():
            here = workers[rest].tolist()
            for worker in here:
                if worker not in self._slots:
                    self._take_slot(worker)
            column = self._take_columns(np.array([r]))
            self.matrix[[self._slots[worker] for worker in here], column] = progress[rest]
        self._departed.drop_empty()

    def clear(self, ranges: Ranges) -> None:
        """Forgets everything about these ranges."""
        columns = self.columns[ranges]
        self.matrix[:, columns] = 0
        self.columns[ranges] = 0
        self._free_columns += np.unique(columns[columns > 0]).tolist()
        used = self.matrix.shape[1] - len(self._free_columns)
        if self.matrix.shape[1] > max(FIRST_COLUMNS, 4 * used):
            self._resize(len(self.workers), _room(FIRST_COLUMNS, used))
        self.generation += 1
        self._departed.clear(ranges)
        self._departed.drop_empty()

    def minimum(self, workers: tuple[int, ...], base: dict[int, int]) -> Progress | None:
        """Per range the least completed clock over `workers`, each at least its base; None for no workers.

        int64 [P], clocks and not progress. What a pull under bounded delay may see is judged against it.
        """
        least: Progress | None = None
        for worker in workers:
            clock = np.maximum(self.read(worker) >> PART_BITS, base.get(worker, 0))
            least = clock if least is None else np.minimum(least, clock)
        return least


def _room(first: int, used: int) -> int:
    """At least twice as much as is used: `first`, doubled."""
    size = first
    while size < 2 * used:
        size *= 2
    return size


class DepartedClocks:
    """Clocks of workers that have left, in a sixtieth of the memory.

    They have to stay: such a worker may come back under its id, its successor asks how far it came, and so does the
    worker that gets one of its data shards. But nothing of it is under way any more, so its progress is one number in
    all ranges that it has pushed to, except where its last step is missing: such a worker keeps its row in `Clocks`.

    workers, values: int64 [n]; where: one bit per range, uint8 [n, ceil(P / 8)]: value or 0.
    """

    def __init__(self, ranges: int) -> None:
        self._ranges = ranges
        self.workers: Progress = np.empty(0, np.int64)
        self.values: Progress = np.empty(0, np.int64)
        self.where: NDArray[np.uint8] = np.empty((0, -(-ranges // 8)), np.uint8)

    def put(self, workers: Sequence[int], rows: Progress, ranges: Ranges) -> NDArray[np.bool_]:
        """Takes rows of progress [n, k] in k ranges, and none elsewhere, in which there is one number above 0, and 0;
        returns which rows those are."""
        values = rows.max(axis=1, initial=0)
        fits: NDArray[np.bool_] = (values > 0) & ((rows == 0) | (rows == values[:, None])).all(axis=1)
        self.workers = np.concatenate([self.workers, np.array(workers, np.int64)[fits]])
        self.values = np.concatenate([self.values, values[fits]])
        fitting = rows[fits] > 0
        packed = [self._packed(fitting[i : i + _AT_ONCE], ranges) for i in range(0, len(fitting), _AT_ONCE)]
        self.where = np.concatenate([self.where, *packed])
        return fits

    def _packed(self, there: NDArray[np.bool_], ranges: Ranges) -> NDArray[np.uint8]:
        """Bits of all ranges, of bool [n, k] of some."""
        every = np.zeros((len(there), self._ranges), np.bool_)
        every[:, ranges] = there
        return np.packbits(every, axis=1, bitorder="little")

    def look(self, worker: int) -> Progress | None:
        """A worker's progress, int64 [P]; None if it is not here."""
        at = np.flatnonzero(self.workers == worker)
        if not len(at):
            return None
        there = np.unpackbits(self.where[at[0]], count=self._ranges, bitorder="little")
        row: Progress = there * self.values[at[0]]
        return row

    def take(self, worker: int) -> Progress | None:
        """The same, and forgets it here."""
        if (row := self.look(worker)) is not None:
            self._select(self.workers != worker)
        return row

    def column(self, r: int) -> tuple[Progress, Progress]:
        """(workers, progress) of the workers that have pushed to a range."""
        there = self.where[:, r >> 3] & np.uint8(1 << (r & 7)) != 0
        return self.workers[there], self.values[there]

    def set_column(self, r: int, workers: Progress, progress: Progress) -> NDArray[np.bool_]:
        """Replaces the progress of workers in a range; returns for which workers it fits here."""
        self.clear(np.array([r]))
        order = np.argsort(self.workers)
        at = np.searchsorted(self.workers, workers, sorter=order)
        found = np.append(order, -1)[at]
        known = np.append(self.workers, -1)[found] == workers
        fits: NDArray[np.bool_] = known & (np.append(self.values, -1)[found] == progress)
        self.where[found[fits], r >> 3] |= np.uint8(1 << (r & 7))
        return fits

    def clear(self, ranges: Ranges) -> None:
        """Forgets everything about these ranges."""
        none = np.zeros(self._ranges, np.bool_)
        none[ranges] = True
        self.where &= ~np.packbits(none, bitorder="little")

    def drop_empty(self) -> None:
        """Forgets the workers of which nothing is left."""
        self._select(np.bitwise_or.reduce(self.where, axis=1) > 0)

    def _select(self, which: NDArray[np.bool_]) -> None:
        self.workers, self.values, self.where = self.workers[which], self.values[which], self.where[which]
