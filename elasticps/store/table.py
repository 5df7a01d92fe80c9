"""One table: its index segments and row slabs, and the operations of a server on them.

Not thread-safe, and needs not to be: a server is one event loop. Inputs come checked; what is tested here is cheap.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from elasticps.errors import InputError
from elasticps.kernels import hashing
from elasticps.model.spec import DTYPES, Constant, TableSpec, Zeros
from elasticps.store import index, intervals, layout, stamps, usage
from elasticps.store import native as field
from elasticps.store.codec import Codec
from elasticps.store.corrections import constants_of
from elasticps.store.cuts import Deletions, PassedCuts
from elasticps.store.eviction import Predicate, Sweep
from elasticps.store.journal import Journal
from elasticps.store.lifecycle import Lifecycle
from elasticps.store.memory import Allocator
from elasticps.store.registry import load_kernels, update_kernel
from elasticps.store.retained import Allowance, RetainedRows
from elasticps.store.segments import Segments
from elasticps.store.slabs import Slabs
from elasticps.store.updates import FOUND, TO_FIND
from elasticps.store.values import INIT_KINDS, init_values

_NO_VALUES = np.empty((0, 0), np.float32)
_NO_RANGES = np.empty(0, np.int64)


class Table:
    """Rows of one table, for keys of any int64 value.

    A row is `stride` bytes: weights in the spec's dtype, float32 slots, zeros up to a multiple of 8.
    """

    def __init__(
        self, spec: TableSpec, table_id: int, ranges: int, memory: Allocator | None = None,
        cuts: PassedCuts | None = None, times: NDArray[np.int64] | None = None,
    ) -> None:  # fmt: skip
        """times: cluster time of the ranges, for the usage of rows. Raises SpecError for a custom optimizer that is not
        registered here."""
        load_kernels()
        row = layout.RowLayout.of(spec)
        self.spec, self.table_id, self.ranges = spec, table_id, ranges  # as given
        self.app = ""  # to which it belongs, if that is known
        self.dropped = False  # in some range: workers know it no more
        self.push, self.pull = Codec(spec.push, spec.dim), Codec(spec.pull, spec.dim)  # filters of either way
        self.slot_floats = spec.optimizer.slot_floats(spec.dim)  # of a row
        self.stride = row.stride  # bytes of a row
        self.row_bytes = row.stride + index.GROWN_BYTES  # what making a row takes, its share of the index included
        self.deletions = Deletions(ranges)  # keys of deleted rows, for increments
        self.retained: RetainedRows | None = None  # rows as a cut had them, while it is being written
        self.journal: Journal | None = None  # of changed keys, while readers follow
        self._cuts = cuts or PassedCuts(ranges)  # of the store: what stamps count from
        self._update = update_kernel(spec.optimizer)  # the compiled step
        self._dim, self._step_floats = spec.dim, spec.optimizer.step_floats  # of a row; that come with a step
        self._memory = Allocator() if memory is None else memory  # of the store: for slabs and index segments
        # Arrays that kernels reach through the header, by address: they must live as long as the table.
        self._constants = constants_of(spec.optimizer)  # of the optimizer
        self._init_values = init_values(spec.init, spec.dtype)  # of the initialiser
        self._scratch = np.empty(spec.dim, np.float32)  # a row of 2-byte weights while it is updated
        self._rows = np.empty(64, np.int64)  # addresses of a batch's rows
        h = self._header = np.zeros(field.HEADER_SIZE, np.int64)  # the state that kernels see: `native.H_…`
        self._segments = Segments(h, ranges, self._memory)  # of its index
        self._descriptors = self._segments.descriptors  # of ranges with rows
        h[field.H_STAMPS] = self._cuts.stamps.ctypes.data
        h[field.H_SALT] = hashing.table_salt(table_id).astype(np.int64)
        h[field.H_SHIFT] = hashing.range_shift(ranges)
        h[field.H_DIM] = spec.dim
        h[field.H_STRIDE] = self.stride
        h[field.H_SLOTS_AT] = row.slots_at
        h[field.H_SLOT_FLOATS] = self.slot_floats
        h[field.H_DTYPE] = DTYPES.index(spec.dtype)
        h[field.H_INIT] = INIT_KINDS.index("constant" if isinstance(spec.init, Zeros | Constant) else spec.init.kind)
        h[field.H_SEED] = hashing.table_salt(spec.init.seed).astype(np.int64)
        h[field.H_INIT_VALUES] = self._init_values.ctypes.data
        h[field.H_CONSTANTS] = self._constants.ctypes.data
        h[field.H_CONSTANT_COUNT] = len(self._constants) - 1
        h[field.H_SCRATCH] = self._scratch.ctypes.data
        h[field.H_FINITE] = spec.finite
        self._slabs = Slabs(h, self._segments, self._memory)  # where rows lie
        self.lifecycle: Lifecycle | None = None  # of a table that keeps its rows' usage
        if spec.usage:
            times = np.zeros(ranges, np.int64) if times is None else times
            self.lifecycle = Lifecycle(spec, h, row.usage_at, times, self._memory)
            self._segments.begun = self.lifecycle.count
        self.pass_cut(_NO_RANGES, _NO_RANGES)

    @property
    def rows(self) -> int:
        """Rows stored."""
        return int(self._header[field.H_ROWS])

    @property
    def nbytes(self) -> int:
        """Bytes of slabs, index segments, and keys that wait for a row."""
        waiting = self.lifecycle.waiting.nbytes if self.lifecycle else 0
        return self._slabs.nbytes + self._segments.nbytes + waiting

    @property
    def reusable_bytes(self) -> int:
        """See `Slabs.reusable_bytes`."""
        return self._slabs.reusable_bytes

    def missing(self, keys: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of keys [n] have no row."""
        return self.find(keys)[0] == 0

    # --- batches ------------------------------------------------------------------------------------------------------

    def gather(self, keys: NDArray[np.int64], out: NDArray[np.float32]) -> None:
        """Reads the weights of keys [n] into out [n, dim]. Absent keys read as f(seed, key), unstored."""
        n = len(keys)
        if out.shape != (n, self._dim):
            raise InputError(f"{self._name}: {n} keys need an array of {(n, self._dim)}, got {out.shape}")
        index.gather(self._header, keys, out, self._scratch_rows(n))

    def apply(
        self, keys: NDArray[np.int64], grads: NDArray[np.float32], step_values: NDArray[np.float32], worker: int = 0,
        clock: int = 0,
    ) -> None:  # fmt: skip
        """One optimizer step on the rows of keys [n] with grads [n, spec.push_width]; rows that are absent are made
        first, as far as the table's policies admit them in this step of a worker.

        An equal key counts as often as it comes, in order.
        """
        if self.lifecycle is not None:
            self.lifecycle.apply(self, keys, grads, step_values, worker, clock)
            return
        n = len(keys)
        if grads.shape != (n, self._dim) or len(step_values) != self._step_floats:
            raise InputError(
                f"{self._name}: {n} keys need gradients of {(n, self._dim)} and {self._step_floats} step "
                f"values, got {grads.shape} and {len(step_values)}"
            )
        rows = self._scratch_rows(n)
        if self.retained is not None:
            index.find(self._header, keys, rows)
        elif not self._update(self._header, keys, grads, step_values, rows, TO_FIND):
            return
        self.change(keys, rows)
        self._update(self._header, keys, grads, step_values, rows, FOUND)

    def find(self, keys: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]:
        """Addresses of the rows of keys [n], 0 where there is none, int64 [n]; and how many there are none of."""
        rows = np.empty(len(keys), np.int64)
        return rows, int(index.find(self._header, keys, rows))

    def change(self, keys: NDArray[np.int64], rows: NDArray[np.int64]) -> None:
        """Prepares rows that `find` has just found for a change, and makes those that are missing (0), with initial
        values; `rows` gets their addresses."""
        self._touch(keys, rows)
        self._insert(keys, rows, _NO_VALUES, index.INITIALISE)

    def update(
        self, keys: NDArray[np.int64], grads: NDArray[np.float32], step_values: NDArray[np.float32],
        rows: NDArray[np.int64], mode: int,
    ) -> None:  # fmt: skip
        """Runs the optimizer on rows that are there, at these addresses. mode: see `updates.run`."""
        self._update(self._header, keys, grads, step_values, rows, mode)

    @property
    def header(self) -> NDArray[np.int64]:
        """The table's state, for kernels: see `native`."""
        return self._header

    @property
    def header_address(self) -> int:
        """Where the table's state lies, for kernels that are not called from here."""
        return int(self._header.ctypes.data)

    def make_rows(self, keys: NDArray[np.int64], rows: NDArray[np.int64]) -> int:
        """Makes those rows of keys [n] that are absent, with initial values; rows int64 [n] holds their addresses, 0
        for none, and gets those of the new ones. Returns the bytes that they take."""
        before = self.rows
        self._insert(keys, rows, _NO_VALUES, index.INITIALISE)
        return (self.rows - before) * self.row_bytes

    def put_if_absent(self, keys: NDArray[np.int64], values: NDArray[np.float32]) -> int:
        """Stores values [n, dim] for those keys [n] without a row; returns how many. Of equal keys the first counts."""
        n, before = len(keys), self.rows
        if values.shape != (n, self._dim):
            raise InputError(f"{self._name}: {n} keys need values of {(n, self._dim)}, got {values.shape}")
        rows = self._scratch_rows(n)
        if index.find(self._header, keys, rows):
            new = rows[:n] == 0
            self._insert(keys, rows, values, index.TAKE_VALUES)
            if self.lifecycle is not None:
                self.lifecycle.loaded(keys[new], rows[:n][new])
        return self.rows - before

    def put(self, keys: NDArray[np.int64], values: NDArray[np.float32]) -> None:
        """Stores values [n, dim] for keys [n]; slots are reset, or follow the weights: [n, dim + slot_floats]. Of equal
        keys the last counts."""
        n = len(keys)
        if len(values) != n or values.shape[1] not in self.put_widths:
            raise InputError(f"{self._name}: {n} keys need values of {(n, self._dim)}, got {values.shape}")
        rows = self._scratch_rows(n)
        missing = self._find_to_change(keys, rows)
        if self.lifecycle is not None:  # the row's count begins anew: as if it had been deleted
            self.note_gone(np.unique(keys[rows[:n] != 0]))
        if missing:
            self._insert(keys, rows, _NO_VALUES, index.LEAVE_BLANK)
        weights, slots = np.ascontiguousarray(values[:, : self._dim]), values[:, self._dim :]
        layout.overwrite(self._header, weights, rows)
        if slots.shape[1]:
            layout.write_slots(self._header, np.ascontiguousarray(slots), rows)
        if self.lifecycle is not None:
            self.lifecycle.loaded(keys, rows[:n])

    @property
    def put_widths(self) -> tuple[int, int]:
        """Floats of a row that `put` takes: weights, or slots too."""
        return self._dim, self._dim + self.slot_floats

    def read_slots(self, keys: NDArray[np.int64], out: NDArray[np.float32]) -> None:
        """Reads the slots of keys [n] into out [n, slot_floats]. Absent keys read as those of a new row."""
        n = len(keys)
        if out.shape != (n, self.slot_floats):
            raise InputError(f"{self._name}: {n} keys need an array of {(n, self.slot_floats)}, got {out.shape}")
        index.copy_slots(self._header, self.find(keys)[0], out)

    def read_usage(self, keys: NDArray[np.int64]) -> NDArray[np.uint32]:
        """The usage of the rows of keys [n]: uint32 [n, 3], see `usage.read_usage`."""
        out = np.empty((len(keys), usage.USAGE), np.uint32)
        usage.read_usage(self._header, self.find(keys)[0], out)
        return out

    def delete(self, keys: NDArray[np.int64]) -> int:
        """Forgets the rows of keys [n], those that have one, and notes which; returns how many. Their memory serves the
        next rows."""
        if self.lifecycle is not None:
            self.lifecycle.waiting.remove(keys)
        gone = np.unique(keys[~self.missing(keys)])
        if not len(gone):
            return 0
        self.note_gone(gone)
        self.forget(gone)
        return len(gone)

    def note_gone(self, keys: NDArray[np.int64]) -> None:
        """Notes keys whose rows are forgotten, for increments; before the first cut nobody needs to know."""
        if self._cuts.newest.any():
            self.deletions.note_each(self.ranges_of(keys), keys, self._cuts.newest)

    def forget(self, keys: NDArray[np.int64]) -> None:
        """Forgets the rows of keys [n], each of which has one, and comes once."""
        self._find_to_change(keys, self._scratch_rows(len(keys)))
        index.remove(self._header, keys)
        if self.journal is not None:
            self.journal.note(self.table_id, self.spec.dim, keys)
        self._memory.with_holes.add(self.table_id)
        if not self._header[field.H_ROWS]:
            self._release_rows()

    def evict(
        self, r: int, low: int, high: int, predicate: Predicate, bound: int = hashing.HASH_END, applied: int = 0
    ) -> int:
        """Forgets the rows, or candidates, of range r at hashes low..high-1 that a predicate chooses, and notes it as
        one sweep; returns how many went. bound: hash up to which the range has arrived here; applied: operations
        applied so far, see `lifecycle.MeasuredSweep`. Of a table with usage."""
        assert self.lifecycle is not None
        newest, stamp = int(self._cuts.newest[r]), self._cuts.stamp(r, 1)
        gone = self.lifecycle.evict(self, r, low, min(high, bound), predicate, stamp, applied)
        if not predicate.of_candidates:
            self.deletions.sweep(r, Sweep(newest, predicate, low, high))
        return gone

    def first_foreign(self, keys: NDArray[np.int64], allowed: NDArray[np.bool_]) -> int:
        """Index of the first key whose range is not allowed (bool [ranges]), or -1."""
        if len(allowed) != self.ranges:
            raise InputError(f"{self._name}: there are {self.ranges} ranges, got flags for {len(allowed)}")
        return intervals.first_foreign(self._header, keys, allowed)

    def ranges_of(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """The range of each of keys [n]: int64 [n]."""
        out = np.empty(len(keys), np.int64)
        intervals.ranges_of(self._header, keys, out)
        return out

    def hashes_of(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """The 62-bit hash of each of keys [n], see `intervals`: int64 [n]."""
        out = np.empty(len(keys), np.int64)
        intervals.hashes_of(self._header, keys, out)
        return out

    def first_misplaced(self, keys: NDArray[np.int64], positions: NDArray[np.int64]) -> int:
        """Index of the first key whose range has position -1, or one before its predecessor's; -1 if there is none.

        positions: int64 [ranges].
        """
        return intervals.first_misplaced(self._header, keys, positions)

    def first_at(self, keys: NDArray[np.int64], positions: NDArray[np.int64], position: int) -> int:
        """Index of the first key at `position` or behind it, in keys that `first_misplaced` found in order."""
        return intervals.first_at(self._header, keys, positions, position)

    def select(self, keys: NDArray[np.int64], bounds: NDArray[np.int64]) -> NDArray[np.int64]:
        """Indices of the keys whose hash (see `intervals`) is below their range's bound; bounds: int64 [ranges]."""
        out = np.empty(len(keys), np.int64)
        return out[: intervals.select(self._header, keys, bounds, out)]

    # --- ranges -------------------------------------------------------------------------------------------------------

    def count_range(self, r: int | NDArray[np.int64]) -> int:
        """Rows in range r, or in several ranges together."""
        return self._segments.count(r)

    @property
    def counts(self) -> NDArray[np.int64]:
        """Rows of each range, int64 [ranges], as they are now."""
        return self._segments.counts

    @property
    def descriptor_bytes(self) -> int:
        """Bytes of the descriptors of ranges, and what else grows with their number."""
        waiting = self.lifecycle.descriptor_bytes if self.lifecycle else 0
        return self._descriptors.nbytes + self.deletions.nbytes + waiting

    def range_keys(self, r: int) -> NDArray[np.int64]:
        """Keys of range r, in no order that means anything. Time is proportional to the range."""
        return self.list_words(r, 0, hashing.HASH_END)[0]

    def list_keys(self, r: int, place: int, most: int) -> tuple[NDArray[np.int64], int]:
        """Keys of range r from a hash on (see `intervals`), about `most` of them, and at most twice as many; and the
        hash where the next ones begin, 0 if there are no more. Time is proportional to the range."""
        width = hashing.HASH_END // self.ranges
        low, end = max(place, r * width), (r + 1) * width
        rows = self.count_range(r)
        high = min(end, low + max(1, width * most // rows)) if rows else end
        keys, found = np.empty(rows, np.int64), np.empty(rows, np.int64)
        n = intervals.list_interval(self._header, r, low, high, keys, found)
        while n > 2 * most and high - low > 1:  # hashes are close to each other here
            high = low + (high - low) // 2
            n = intervals.list_interval(self._header, r, low, high, keys, found)
        return keys[:n].copy(), 0 if high >= end else high

    def dump_range(self, r: int) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
        """Copies of range r's keys int64 [n] and whole rows uint8 [n, stride]."""
        return self.dump_interval(r, 0, hashing.HASH_END)

    def dump_interval(self, r: int, low: int, high: int) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
        """The same for the keys of range r whose hashes are in low..high-1."""
        keys, words = self.list_words(r, low, high)
        return keys, stamps.rows_at(words, self.stride)

    def dump_stamped(
        self, r: int, low: int, high: int
    ) -> tuple[NDArray[np.int64], NDArray[np.uint8], NDArray[np.uint16]]:
        """The same, and the rows' stamps."""
        keys, words = self.list_words(r, low, high)
        return keys, stamps.rows_at(words, self.stride), stamps.stamps_in(words)

    def load_range(
        self, r: int, keys: NDArray[np.int64], rows: NDArray[np.uint8], stamped: NDArray[np.uint16] | None = None
    ) -> None:
        """Stores what `dump_range` gave, replacing rows of equal keys and keeping others; with these stamps, or that of
        rows that change now."""
        n = len(keys)
        if rows.shape != (n, self.stride) or rows.dtype != np.uint8:
            raise InputError(f"{self._name}: {n} rows need uint8 {(n, self.stride)}, got {rows.dtype} {rows.shape}")
        foreign = self.first_foreign(keys, np.arange(self.ranges) == r)
        if foreign >= 0:
            raise InputError(f"{self._name}: key {keys[foreign]} does not lie in range {r}")
        found = np.empty(n, np.int64)
        missing = self._find_to_change(keys, found)
        if missing:
            self._segments.reserve(r, self.count_range(r) + missing)
            self._insert(keys, found, _NO_VALUES, index.LEAVE_BLANK)
        index.copy_in(found, np.ascontiguousarray(rows).view(np.uint64))
        if stamped is not None:
            stamps.set_stamps(self._header, keys, stamped)

    def reserve(self, r: int, rows: int) -> None:
        """Makes room in the index for so many rows of range r."""
        self._segments.reserve(r, rows)

    def drop_interval(self, r: int, low: int, high: int) -> None:
        """Forgets the keys of range r whose places are in low..high-1."""
        self.delete(self.list_words(r, low, high)[0])
        if self.lifecycle is not None:
            self.lifecycle.waiting.drop_interval(r, low, high)

    def drop_range(self, r: int) -> None:
        """Forgets range r. Its rows' memory serves the table's next rows, or goes back, see `reclaim`."""
        if self.lifecycle is not None:
            self.lifecycle.waiting.drop_range(r)
        if not self.count_range(r):
            return
        keys, rows = self.list_words(r, 0, hashing.HASH_END)
        if self.retained is not None:
            self._find_to_change(keys, np.empty(len(keys), np.int64))
        index.free_rows(self._header, rows)
        self._memory.with_holes.add(self.table_id)
        self._segments.release(r)
        if not self._header[field.H_ROWS]:
            self._release_rows()

    def digest_range(self, r: int, part: int = 0, parts: int = 1) -> int:
        """64-bit digest of range r's keys, weights and slots, bit for bit; the rows' order plays no part. Or of one of
        `parts` intervals of its hashes, which are about equal."""
        width = hashing.HASH_END // self.ranges
        low, high = (r * width + width * at // parts for at in (part, part + 1))
        return int(intervals.digest_interval(self._header, r, low, high))

    def clear(self) -> None:
        """Forgets every row, and every key that waits for one, and gives the memory back."""
        if self.lifecycle is not None:
            self.lifecycle.waiting.clear()
        self._release_rows()

    def _release_rows(self) -> None:
        self._segments.release_all()
        self._slabs.release()
        self._memory.with_holes.discard(self.table_id)

    def close(self) -> None:
        """Gives the memory back."""
        self.keep(None)
        self.clear()

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def pass_cut(self, ranges: NDArray[np.int64], restamped: NDArray[np.int64]) -> None:
        """A cut passes in some ranges: rows that change from now on are stamped with it. restamped: see
        `PassedCuts.passed`."""
        for r in np.intersect1d(restamped, self._descriptors.there).tolist():
            stamps.clear_stamps(self._header, r)
        if self.retained is not None:
            self.retained.end(ranges)
        self._header[field.H_STAMP] = self._cuts.newest_stamp << field.STAMP_BIT

    def keep(self, allowance: Allowance | None) -> None:
        """From now on rows are kept aside before they change; None: no more."""
        if self.retained is not None:
            self.retained.stop()
            self.retained = None
        if allowance is not None:
            self.retained = RetainedRows(self._header, self._descriptors, self._cuts, self._memory, allowance)

    def make_room(self, rows: int) -> None:
        """For so many rows to be kept aside."""
        if self.retained is not None:
            self.retained.make_room(rows)

    # --- memory -------------------------------------------------------------------------------------------------------

    @property
    def _name(self) -> str:
        return f"table {self.spec.name!r}"

    def _scratch_rows(self, n: int) -> NDArray[np.int64]:
        if n > len(self._rows):
            self._rows = np.empty(2 * n, np.int64)
        return self._rows

    def _find_to_change(self, keys: NDArray[np.int64], rows: NDArray[np.int64]) -> int:
        """Addresses of the rows of keys, which are about to change; how many have none."""
        missing: int = index.find(self._header, keys, rows)
        self._touch(keys, rows)
        return missing

    def _touch(self, keys: NDArray[np.int64], rows: NDArray[np.int64]) -> None:
        """`find` has just been called for these."""
        if stale := int(self._header[field.H_STALE]):
            self.make_room(stale)
            stamps.touch(self._header, keys, rows)

    def list_words(self, r: int, low: int, high: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Keys of range r whose hashes are in low..high-1, and the words of their rows (address and stamp): int64 [n]
        each."""
        keys, words = np.empty(self.count_range(r), np.int64), np.empty(self.count_range(r), np.int64)
        n = intervals.list_interval(self._header, r, low, high, keys, words)
        return keys[:n], words[:n]

    def _insert(self, keys: NDArray[np.int64], rows: NDArray[np.int64], values: NDArray[np.float32], mode: int) -> None:
        at = index.insert(self._header, keys, values, mode, rows, 0)
        while at < len(keys):
            need = int(self._header[field.H_NEED])
            if need == field.NEED_SLAB:
                self._slabs.add()
            else:
                self._segments.grow(need)
            at = index.insert(self._header, keys, values, mode, rows, at)

    def reclaim(self, rows: int) -> int:
        """See `Slabs.reclaim`."""
        return self._slabs.reclaim(rows)

    def shrink(self, rows: int) -> int:
        """Exchanges sparse segments of the index, and of that of keys that wait for a row; see `Segments.shrink`. Of a
        table with usage."""
        assert self.lifecycle is not None
        return self.lifecycle.waiting.segments.shrink(self._segments.shrink(rows))
