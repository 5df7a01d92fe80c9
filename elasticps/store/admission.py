"""Decides which keys that are pushed get a row: by counting their pushes, exactly or in a sketch, or by chance.

A key that waits for a row is a candidate. Candidates have an index of their own, of the same form as the table's
(`elasticps.store.index`), in which an entry's second word is no address but the candidate's count (16 bits) and the
time of its last push (32 bits): 16 bytes an entry, 20 to 27 with the empty ones.

A sketch is a count-min sketch with conservative update. It is cut into blocks by intervals of a range's hashes, so that
an interval can be handed to another replica with the counters of its own keys, and those of no others.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from elasticps.errors import SpecError
from elasticps.kernels.hashing import hash_key as _hash_key
from elasticps.kernels.hashing import mix64 as _mix64
from elasticps.model.policies import Admission, MinCount, MinCountSketch, Probability
from elasticps.store import index, intervals
from elasticps.store import native as field
from elasticps.store.intervals import HASH_END
from elasticps.store.memory import Allocator
from elasticps.store.native import (
    DESCRIPTOR,
    FLOATS_OUT,
    H_COUNTS,
    H_NEED,
    H_POLICIES,
    H_ROWS,
    H_SALT,
    H_SHIFT,
    H_SKETCH_WIDTHS,
    H_SKETCHES,
    H_SPARE,
    H_STRIDE,
    H_TIMES,
    H_WAITING,
    HEADER_SIZE,
    INT,
    KEYS,
    P_ADMISSION,
    P_THRESHOLD,
    POLICY,
    WORDS,
    carray,
    kernel,
    linked,
    load64,
    pointer,
    prefetch,
    store64,
)
from elasticps.store.segments import Segments

hash_key: Any = _hash_key
mix64: Any = _mix64

EVERY_KEY, MIN_COUNT, SKETCH, PROBABILITY = 0, 1, 2, 3  # admission policies, as kernels know them
ADDS_NOTHING, ADDS_CANDIDATE, ADDS_ROW = 0, 1, 2  # what a push of a key without a row makes of it
WAITS = -1  # in place of a row's address: the key gets none yet
BLOCKS = 64  # of a range's sketch
NO_BLOCKS = np.empty((0, 0), np.uint8)
_DEPTH = 4  # counters of a key
_MOST_BLOCK_BYTES = 1 << 20
_PREFETCH = 12  # keys between a prefetch and its use
_TIME_BIT = 16  # of a candidate's word
COUNT_MASK = (1 << _TIME_BIT) - 1
_ADMITTED = COUNT_MASK  # as a count: the key gets its row with this batch
_S64, _S58, _S11 = np.uint64(64), np.uint64(58), np.uint64(11)
_UNIT = 2.0**-53
_GROWTH = 4, 3  # of segments: 27 bytes a candidate at most, but for small ranges
_OWN_BYTES = 1 << 15  # what growing segments leave in shared chunks is too small for larger ones


def numbers_of(policy: Admission | None) -> tuple[int, float]:
    """A policy's number and its threshold, as kernels know them."""
    if isinstance(policy, MinCount):
        return (MIN_COUNT if policy.count > 1 else EVERY_KEY), policy.count
    if isinstance(policy, MinCountSketch):
        return (SKETCH if policy.count > 1 else EVERY_KEY), policy.count
    if isinstance(policy, Probability):
        return PROBABILITY, policy.p
    return EVERY_KEY, 0.0


def sketch_width(policy: Admission | None, ranges: int) -> int:
    """Bytes of a block of the sketch that each of `ranges` ranges has under a policy; 0 for no sketch."""
    if not isinstance(policy, MinCountSketch):
        return 0
    return max(_DEPTH, policy.nbytes // (ranges * BLOCKS) // _DEPTH * _DEPTH)


def check_sketch(policy: Admission | None, ranges: int) -> None:
    """The sketch that a policy makes, if any, may be allocated in a cluster of `ranges` ranges. Raises SpecError."""
    if sketch_width(policy, ranges) > _MOST_BLOCK_BYTES:
        raise SpecError(
            f"MinCountSketch.nbytes must be at most {_MOST_BLOCK_BYTES * BLOCKS * ranges:,} in a cluster of {ranges:,} "
            f"ranges, got {policy.nbytes:,}"  # type: ignore[union-attr]
        )


@kernel
def _chance(key: int, worker: int, clock: int) -> float:
    """A number in [0, 1) that depends on a key and the step that pushes it."""
    step = mix64(np.uint64(clock) ^ mix64(np.uint64(worker)))
    return np.int64(mix64(np.uint64(key) ^ step) >> _S11) * _UNIT


@kernel
def _sketched(sketch: int, width: int, hashed: np.uint64, range_bits: np.uint64, threshold: np.int64) -> bool:
    """Counts a key in the sketch of its range; whether it has come `threshold` times, as far as the sketch can tell."""
    block = np.int64((hashed << range_bits) >> _S58)
    counters = carray(pointer(sketch + block * width), (width,), np.uint8)
    part = width // _DEPTH
    mixed = hashed
    least = np.int64(255)
    for d in range(_DEPTH):
        mixed = mix64(mixed + np.uint64(d + 1))
        least = min(least, np.int64(counters[d * part + np.int64(mixed % np.uint64(part))]))
    if least + 1 >= threshold:
        return True
    mixed = hashed
    for d in range(_DEPTH):
        mixed = mix64(mixed + np.uint64(d + 1))
        at = d * part + np.int64(mixed % np.uint64(part))
        if counters[at] == least:
            counters[at] = np.uint8(least + 1)
    return False


@kernel
def candidates_of(h: NDArray[np.int64]) -> NDArray[np.int64]:
    """The header of a table's candidates."""
    found: NDArray[np.int64] = carray(pointer(h[H_WAITING]), (HEADER_SIZE,), np.int64)
    return found


@linked(WORDS, KEYS, WORDS, INT, INT, INT, FLOATS_OUT)
def admit(
    h: NDArray[np.int64], keys: NDArray[np.int64], rows: NDArray[np.int64], worker: int, clock: int, start: int,
    counts: NDArray[np.float32],
) -> int:  # fmt: skip
    """Counts the pushes of keys [n], none of which has a row, from `start` on. Sets rows[i], which is 0, to WAITS where
    the key gets none, and counts[i], float32 [n], to the pushes before this one where it does, -1 for all others.

    h: the table's header. Returns the index to go on from: n when done, else the segment of range H_NEED of the
    candidates must grow first.
    """
    c = candidates_of(h)
    salt, shift = np.uint64(c[H_SALT]), np.uint64(c[H_SHIFT])
    range_bits = _S64 - shift
    ranges = 1 << (64 - c[H_SHIFT])
    sketches, widths = (
        carray(pointer(h[H_SKETCHES]), (ranges,), np.int64),
        carray(pointer(h[H_SKETCH_WIDTHS]), (ranges,), np.int64),
    )
    descriptors = index.descriptors_of(c)
    held = carray(pointer(c[H_COUNTS]), (ranges,), np.int64)
    times = carray(pointer(h[H_TIMES]), (ranges,), np.int64)
    policies = carray(pointer(h[H_POLICIES]), (ranges * POLICY,), np.float64)
    for i in range(start, keys.shape[0]):
        following = i + _PREFETCH
        if following < keys.shape[0]:
            hashed = hash_key(keys[following], salt)
            at = DESCRIPTOR * np.int64(hashed >> shift)
            entry = index.first_entry(hashed, range_bits, descriptors[at], descriptors[at + 1])
            prefetch(entry)
            prefetch(entry + 64)  # most searches for what is not there go on to the next line
        counts[i] = np.float32(0)
        key = keys[i]
        hashed = hash_key(key, salt)
        r = np.int64(hashed >> shift)
        kind, threshold = np.int64(policies[r * POLICY + P_ADMISSION]), policies[r * POLICY + P_THRESHOLD]
        base, capacity = descriptors[DESCRIPTOR * r], descriptors[DESCRIPTOR * r + 1]
        entry = index.first_entry(hashed, range_bits, base, capacity)
        word = load64(entry + 8)
        while load64(entry) != key and word != 0:
            entry += index.ENTRY
            word = load64(entry + 8)
        if word & COUNT_MASK == _ADMITTED:  # it came before in this batch
            counts[i] = np.float32(-1)
            continue
        if kind == EVERY_KEY:
            counts[i] = np.float32(word & COUNT_MASK)
            admitted = True
        elif kind == PROBABILITY:
            admitted = _chance(key, worker, clock) < threshold
        elif kind == SKETCH:
            admitted = _sketched(sketches[r], widths[r], hashed, range_bits, np.int64(threshold))
            counts[i] = np.float32(threshold - 1)
        else:
            admitted = (word & COUNT_MASK) + 1 >= np.int64(threshold)
            counts[i] = np.float32(word & COUNT_MASK)
        if not admitted:
            rows[i] = WAITS
            counts[i] = np.float32(-1)
            if kind != MIN_COUNT:
                continue
        if word == 0:
            if held[r] >= index.row_limit(capacity) or entry >= base + (capacity + min(capacity, 32) - 1) * index.ENTRY:
                c[H_NEED] = r
                rows[i] = 0
                return i
            store64(entry, key)
            held[r] += 1
            c[H_ROWS] += 1
        count = _ADMITTED if admitted else (word & COUNT_MASK) + 1
        store64(entry + 8, times[r] << _TIME_BIT | count)
    return keys.shape[0]


@linked(WORDS, KEYS, WORDS)
def remove_admitted(h: NDArray[np.int64], keys: NDArray[np.int64], rows: NDArray[np.int64]) -> None:
    """Forgets the candidates among those of keys [n] that get a row (rows[i] = 0). h: the table's header."""
    c = candidates_of(h)
    if c[H_ROWS] != 0:
        _remove(c, keys, rows)


@linked(WORDS, WORDS)
def spare(h: NDArray[np.int64], rows: NDArray[np.int64]) -> None:
    """Puts the table's spare row, cleared, in the place of WAITS."""
    at = h[H_SPARE]
    for j in range(h[H_STRIDE] // 8):
        store64(at + 8 * j, 0)
    for i in range(rows.shape[0]):
        rows[i] = at if rows[i] == WAITS else rows[i]


@kernel
def _would_be_sketched(sketch: int, width: int, hashed: np.uint64, range_bits: np.uint64, threshold: np.int64) -> bool:
    """What `_sketched` would return; counts nothing."""
    block = np.int64((hashed << range_bits) >> _S58)
    counters = carray(pointer(sketch + block * width), (width,), np.uint8)
    part = width // _DEPTH
    least = np.int64(255)
    for d in range(_DEPTH):
        hashed = mix64(hashed + np.uint64(d + 1))
        least = min(least, np.int64(counters[d * part + np.int64(hashed % np.uint64(part))]))
    return bool(least + 1 >= threshold)


@kernel
def foresee(
    h: NDArray[np.int64], keys: NDArray[np.int64], worker: int, clock: int, out: NDArray[np.int64],
) -> None:  # fmt: skip
    """Writes what a push would make of each of keys [n] without a row: ADDS_ROW, ADDS_CANDIDATE or ADDS_NOTHING.
    Changes nothing; arguments as for `admit`."""
    c = candidates_of(h)
    salt, shift = np.uint64(c[H_SALT]), np.uint64(c[H_SHIFT])
    range_bits = _S64 - shift
    ranges = 1 << (64 - c[H_SHIFT])
    sketches = carray(pointer(h[H_SKETCHES]), (ranges,), np.int64)
    widths = carray(pointer(h[H_SKETCH_WIDTHS]), (ranges,), np.int64)
    policies = carray(pointer(h[H_POLICIES]), (ranges * POLICY,), np.float64)
    for i in range(keys.shape[0]):
        hashed = hash_key(keys[i], salt)
        r = np.int64(hashed >> shift)
        kind, threshold = np.int64(policies[r * POLICY + P_ADMISSION]), policies[r * POLICY + P_THRESHOLD]
        out[i] = ADDS_NOTHING
        if kind == MIN_COUNT:
            base, capacity = index.segment_of(c, r)
            entry = index.first_entry(hashed, range_bits, base, capacity)
            word = load64(entry + 8)
            while load64(entry) != keys[i] and word != 0:
                entry += index.ENTRY
                word = load64(entry + 8)
            if (word & COUNT_MASK) + 1 >= np.int64(threshold):
                out[i] = ADDS_ROW
            elif word == 0:
                out[i] = ADDS_CANDIDATE
        elif kind == PROBABILITY:
            if _chance(keys[i], worker, clock) < threshold:
                out[i] = ADDS_ROW
        elif kind == SKETCH:
            if _would_be_sketched(sketches[r], widths[r], hashed, range_bits, np.int64(threshold)):
                out[i] = ADDS_ROW
        else:
            out[i] = ADDS_ROW


@kernel
def remove(c: NDArray[np.int64], keys: NDArray[np.int64]) -> int:
    """Forgets the candidates among keys; how many they were."""
    return _remove(c, keys, carray(pointer(c[H_COUNTS]), (0,), np.int64))


@kernel
def _remove(c: NDArray[np.int64], keys: NDArray[np.int64], rows: NDArray[np.int64]) -> int:
    """Forgets the candidates among keys, or, unless `rows` is empty, those with rows[i] = 0; how many they were."""
    salt, shift = np.uint64(c[H_SALT]), np.uint64(c[H_SHIFT])
    range_bits = _S64 - shift
    held = carray(pointer(c[H_COUNTS]), (1 << (64 - c[H_SHIFT]),), np.int64)
    removed = 0
    for i in range(keys.shape[0]):
        if rows.shape[0] and rows[i] != 0:
            continue
        hashed = hash_key(keys[i], salt)
        r = np.int64(hashed >> shift)
        base, capacity = index.segment_of(c, r)
        entry = index.first_entry(hashed, range_bits, base, capacity)
        word = load64(entry + 8)
        while load64(entry) != keys[i] and word != 0:
            entry += index.ENTRY
            word = load64(entry + 8)
        if word != 0:
            index.close_gap(entry, salt, range_bits, base, capacity)
            held[r] -= 1
            c[H_ROWS] -= 1
            removed += 1
    return removed


@kernel
def put(c: NDArray[np.int64], keys: NDArray[np.int64], words: NDArray[np.int64], start: int) -> int:
    """Stores candidates with their words, replacing those of equal keys, from `start` on; returns as `admit` does."""
    salt, shift = np.uint64(c[H_SALT]), np.uint64(c[H_SHIFT])
    held = carray(pointer(c[H_COUNTS]), (1 << (64 - c[H_SHIFT]),), np.int64)
    for i in range(start, keys.shape[0]):
        hashed = hash_key(keys[i], salt)
        r = np.int64(hashed >> shift)
        base, capacity = index.segment_of(c, r)
        entry = index.first_entry(hashed, _S64 - shift, base, capacity)
        word = load64(entry + 8)
        while load64(entry) != keys[i] and word != 0:
            entry += index.ENTRY
            word = load64(entry + 8)
        if word == 0:
            if held[r] >= index.row_limit(capacity) or entry >= base + (capacity + min(capacity, 32) - 1) * index.ENTRY:
                c[H_NEED] = r
                return i
            store64(entry, keys[i])
            held[r] += 1
            c[H_ROWS] += 1
        store64(entry + 8, words[i])
    return keys.shape[0]


def rank(words: NDArray[np.int64]) -> NDArray[np.int64]:
    """Ranks of candidates, int64 [n], smaller for those that are to go first: pushed less often, or longer ago."""
    return (words & COUNT_MASK) << 32 | words >> _TIME_BIT


def last_push(words: NDArray[np.int64]) -> NDArray[np.int64]:
    """When candidates were pushed last: seconds of cluster time, int64 [n]."""
    return words >> _TIME_BIT


class Waiting:
    """The keys of one table that wait for a row, by range: candidates, and the table's sketch.

    header: the table's, by whose policies and times keys are counted."""

    def __init__(self, header: NDArray[np.int64], ranges: int, memory: Allocator) -> None:
        self._table, self._ranges = header, ranges
        self.sketches: dict[int, NDArray[np.uint8]] = {}  # by range, uint8 [BLOCKS, width]
        self._sketch_at = np.zeros(ranges, np.int64)  # their addresses
        self._widths = np.zeros(ranges, np.int64)  # bytes of a block of each
        c = self._header = np.zeros(field.HEADER_SIZE, np.int64)
        self.segments = Segments(c, ranges, memory, _GROWTH, _OWN_BYTES)  # of candidates
        self.counts = self.segments.counts  # candidates of each range
        c[H_SALT], c[H_SHIFT] = header[H_SALT], header[H_SHIFT]
        header[H_WAITING], header[H_SKETCHES] = c.ctypes.data, self._sketch_at.ctypes.data
        header[H_SKETCH_WIDTHS] = self._widths.ctypes.data

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
        return int(self.counts[r].sum())

    def size_of(self, r: int | NDArray[np.int64]) -> int:
        """Bytes that candidates and sketch of range r, or of several ranges, take in pieces and files."""
        return 16 * self.count_range(r) + BLOCKS * int(self._widths[r].sum())

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
        self._header[H_ROWS] -= self.counts[r]
        self.counts[r] = 0
        self.segments.release(r)
        if r in self.sketches:  # a fresh one: the old one's pages go back to the system
            self.sketches[r] = np.zeros(self.sketches[r].shape, np.uint8)
            self._sketch_at[r] = self.sketches[r].ctypes.data

    # --- sketches -----------------------------------------------------------------------------------------------------

    def use_sketch(self, r: int, policy: Admission | None) -> None:
        """Range r is under this policy: makes its sketch, or gives it back."""
        width = sketch_width(policy, self._ranges)
        if width:
            if r not in self.sketches or self._widths[r] != width:  # counters of another width say nothing
                self.sketches[r] = np.zeros((BLOCKS, width), np.uint8)
                self._sketch_at[r], self._widths[r] = self.sketches[r].ctypes.data, width
        elif r in self.sketches:
            del self.sketches[r]
            self._widths[r] = 0

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
        if self.counts[r]:
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
