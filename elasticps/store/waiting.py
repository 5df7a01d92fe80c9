"""The keys of a table that wait for a row: their index, the sketches of its ranges, and the memory of both."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from elasticps.kernels.hashing import HASH_END
from elasticps.model.policies import Admission
from elasticps.store import intervals
from elasticps.store import native as field
from elasticps.store.admission import BLOCKS, NO_BLOCKS, admit, foresee, put, remove, remove_admitted, sketch_width
from elasticps.store.memory import Allocator
from elasticps.store.native import H_NEED, H_ROWS, H_SALT, H_SHIFT, H_WAITING, P_SKETCH, P_WIDTH
from elasticps.store.range_map import RangeMap
from elasticps.store.segments import Segments

_GROWTH = 4, 3  # of segments: 27 bytes a candidate at most, but for small ranges
_OWN_BYTES = 1 << 15  # what growing segments leave in shared chunks is too small for larger ones


class Waiting:
    """The keys of one table that wait for a row, by range: candidates, and the table's sketch.

    header: the table's, by whose policies and times keys are counted; policies: of its ranges, see `native.P_DECAY`."""

    def __init__(self, header: NDArray[np.int64], policies: RangeMap, memory: Allocator) -> None:
        self._table, self._policies, ranges = header, policies, policies.ranges
        self._ranges = ranges
        self.sketches: dict[int, NDArray[np.uint8]] = {}  # by range, uint8 [BLOCKS, width]
        c = self._header = np.zeros(field.HEADER_SIZE, np.int64)
        self.segments = Segments(c, ranges, memory, _GROWTH, _OWN_BYTES)  # of candidates
        c[H_SALT], c[H_SHIFT] = header[H_SALT], header[H_SHIFT]
        header[H_WAITING] = c.ctypes.data

    @property
    def candidates(self) -> int:
        """Keys that are counted exactly."""
        return int(self._header[H_ROWS])

    @property
    def nbytes(self) -> int:
        """Bytes of index segments and sketches."""
        return self.segments.nbytes + sum(sketch.nbytes for sketch in self.sketches.values())

    def count_range(self, r: int | NDArray[np.int64]) -> int:
        """Candidates of range r, or of several ranges together."""
        return self.segments.count(r)

    @property
    def counts(self) -> NDArray[np.int64]:
        """Candidates of each range, int64 [ranges], as they are now."""
        return self.segments.counts

    def size_of(self, r: int | NDArray[np.int64]) -> int:
        """Bytes that candidates and sketch of range r, or of several ranges, take in pieces and files."""
        return 16 * self.count_range(r) + BLOCKS * int(self._policies.read(np.atleast_1d(r), P_WIDTH).sum())

    def admit(self, keys: NDArray[np.int64], rows: NDArray[np.int64], worker: int, clock: int) -> NDArray[np.float32]:
        """Counts the pushes of keys [n] without a row (rows[i] = 0), in step `clock` of a worker; sets rows[i] to WAITS
        where the key gets none yet. Returns how often those that get one were counted before, float32 [n]; see
        `admit`."""
        counts, missing = np.full(len(keys), -1, np.float32), np.flatnonzero(rows == 0)
        keys, found, counted = keys[missing], rows[missing], np.empty(len(missing), np.float32)
        at = admit(self._table, keys, found, worker, clock, 0, counted)
        while at < len(keys):
            self.grow()
            at = admit(self._table, keys, found, worker, clock, at, counted)
        remove_admitted(self._table, keys, found)
        rows[missing], counts[missing] = found, counted
        return counts

    def foresee(self, keys: NDArray[np.int64], worker: int, clock: int) -> NDArray[np.int64]:
        """What `admit` would make of keys [n] without a row: ADDS_ROW, ADDS_CANDIDATE or ADDS_NOTHING, int64 [n]."""
        found = np.empty(len(keys), np.int64)
        foresee(self._table, keys, worker, clock, found)
        return found

    def remove(self, keys: NDArray[np.int64]) -> int:
        """Forgets the candidates among keys [n]; returns how many they were."""
        return int(remove(self._header, keys)) if self.candidates else 0

    def list_interval(self, r: int, low: int, high: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Candidates of range r whose hashes are in low..high-1: keys and words, int64 [n] each, in no order."""
        keys, words = np.empty(self.count_range(r), np.int64), np.empty(self.count_range(r), np.int64)
        n = intervals.list_interval(self._header, r, low, high, keys, words)
        return keys[:n], words[:n]

    def put(self, keys: NDArray[np.int64], words: NDArray[np.int64]) -> None:
        """Stores candidates with their words, int64 [n] each."""
        at = put(self._header, keys, words, 0)
        while at < len(keys):
            self.grow()
            at = put(self._header, keys, words, at)

    def drop_interval(self, r: int, low: int, high: int) -> None:
        """Forgets the candidates of range r whose hashes are in low..high-1, and the blocks of its sketch."""
        self.remove(self.list_interval(r, low, high)[0])
        if r in self.sketches:
            self._blocks(r, low, high)[:] = 0

    def drop_range(self, r: int) -> None:
        """Forgets the candidates of range r, and its sketch; gives their memory back."""
        self._header[H_ROWS] -= self.count_range(r)
        self.segments.release(r)
        if r in self.sketches:  # a fresh one: the old one's pages go back to the system
            self._make_sketch(r, self.sketches[r].shape[1])

    def clear(self) -> None:
        """Forgets all candidates, and what sketches have counted."""
        self.segments.release_all()
        for r, sketch in self.sketches.items():
            self._make_sketch(r, sketch.shape[1])

    # --- sketches -----------------------------------------------------------------------------------------------------

    def use_sketch(self, r: int, policy: Admission | None) -> None:
        """Range r is under this policy: makes its sketch, or gives it back."""
        width = sketch_width(policy, self._ranges)
        if width:
            if r not in self.sketches or self.sketches[r].shape[1] != width:  # counters of another width say nothing
                self._make_sketch(r, width)
        elif r in self.sketches:
            for word in (P_SKETCH, P_WIDTH):
                self._policies.set(r, word, 0)
            del self.sketches[r]

    def _make_sketch(self, r: int, width: int) -> None:
        made = np.zeros((BLOCKS, width), np.uint8)
        self._policies.set(r, P_SKETCH, made.ctypes.data)
        self._policies.set(r, P_WIDTH, width)
        self.sketches[r] = made

    def halve(self, r: int) -> None:
        """Halves the counters of range r's sketch."""
        if r in self.sketches:
            self.sketches[r] >>= 1

    def read_blocks(self, r: int, low: int, high: int) -> NDArray[np.uint8]:
        """The blocks of range r's sketch that begin in low..high-1: uint8 [n, width], n = 0 without a sketch."""
        return self._blocks(r, low, high) if r in self.sketches else NO_BLOCKS

    def write_blocks(self, r: int, low: int, blocks: NDArray[np.uint8]) -> None:
        """Stores what `read_blocks` gave from `low` on."""
        first = self._first_block(r, low)
        self.sketches[r][first : first + len(blocks)] = blocks

    def restore_sketch(self, r: int, blocks: NDArray[np.uint8], bound: int) -> None:
        """Stores those blocks of a whole sketch of range r, uint8 [BLOCKS, width], that begin below a hash. Counters of
        another width, or of a range that has no sketch, say nothing: then it stays as it is."""
        if r in self.sketches and blocks.shape == self.sketches[r].shape:
            n = self._first_block(r, bound)
            self.sketches[r][:n] = blocks[:n]

    def _blocks(self, r: int, low: int, high: int) -> NDArray[np.uint8]:
        return self.sketches[r][self._first_block(r, low) : self._first_block(r, high)]

    def _first_block(self, r: int, hash_: int) -> int:
        """The first block that begins at a hash or above it."""
        width = HASH_END // self._ranges
        return -(-min(max(hash_ - r * width, 0), width) * BLOCKS // width)

    def words(self, r: int) -> list[int]:
        """Numbers on which replicas of range r must agree, for digests."""
        found = []
        if self.count_range(r):
            keys, words = self.list_interval(r, 0, HASH_END)
            mixed = (keys.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) ^ words.astype(np.uint64)
            mixed *= np.uint64(0x9FB21C651E98DF25)
            total = np.sum(mixed ^ mixed >> np.uint64(32), dtype=np.uint64)
            found += [len(keys), int(total.astype(np.int64))]
        if r in self.sketches and self.sketches[r].any():
            counters = self.sketches[r].ravel().astype(np.uint64)
            weights = np.arange(1, len(counters) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
            found.append(int(np.sum(counters * weights, dtype=np.uint64).astype(np.int64)))
        return found

    def grow(self) -> None:
        """Makes room for more candidates in the range whose segment was too small."""
        self.segments.grow(int(self._header[H_NEED]))
