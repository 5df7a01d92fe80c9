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
from elasticps.store import index
from elasticps.store.native import (
    D_CAPACITY,
    D_COUNT,
    D_SEGMENT,
    FLOATS_OUT,
    H_DESCRIPTORS,
    H_LAST,
    H_NEED,
    H_POLICIES_LAST,
    H_ROWS,
    H_SALT,
    H_SHIFT,
    H_SPARE,
    H_STRIDE,
    H_TIMES,
    H_WAITING,
    HEADER_SIZE,
    INT,
    KEYS,
    P_ADMISSION,
    P_SKETCH,
    P_THRESHOLD,
    P_WIDTH,
    POLICY,
    WORDS,
    carray,
    float64_from_bits,
    kernel,
    linked,
    load64,
    pointer,
    prefetch,
    store64,
)
from elasticps.store.range_map import place_of
from elasticps.store.usage import policies_of

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


@kernel
def is_full(count: int, entry: int | np.int64, base: int, capacity: int) -> bool:
    """Whether a segment with so many entries has to grow before it takes another one, at a free entry."""
    full: Any = count >= index.row_limit(capacity) or entry >= base + (capacity + min(capacity, 32) - 1) * index.ENTRY
    return full


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
    descriptors, policies = index.descriptors_of(c), policies_of(h)
    times = carray(pointer(h[H_TIMES]), (1 << (64 - c[H_SHIFT]),), np.int64)
    for i in range(start, keys.shape[0]):
        following = i + _PREFETCH
        if following < keys.shape[0]:
            hashed = hash_key(keys[following], salt)
            at = index.descriptor_of(descriptors, c[H_LAST], np.int64(hashed >> shift))
            entry = index.first_entry(hashed, range_bits, descriptors[at + D_SEGMENT], descriptors[at + D_CAPACITY])
            prefetch(entry)
            prefetch(entry + 64)  # most searches for what is not there go on to the next line
        counts[i] = np.float32(0)
        key = keys[i]
        hashed = hash_key(key, salt)
        r = np.int64(hashed >> shift)
        policy = place_of(policies, h[H_POLICIES_LAST], POLICY, r)
        kind, threshold = policies[policy + P_ADMISSION], float64_from_bits(policies[policy + P_THRESHOLD])
        at = index.descriptor_of(descriptors, c[H_LAST], r)
        base, capacity = descriptors[at + D_SEGMENT], descriptors[at + D_CAPACITY]
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
            sketch, width = policies[policy + P_SKETCH], policies[policy + P_WIDTH]
            admitted = sketch != 0 and _sketched(sketch, width, hashed, range_bits, np.int64(threshold))
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
            if is_full(descriptors[at + D_COUNT], entry, base, capacity):
                c[H_NEED] = r
                rows[i] = 0
                return i
            store64(entry, key)
            descriptors[at + D_COUNT] += 1
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
    policies = policies_of(h)
    for i in range(keys.shape[0]):
        hashed = hash_key(keys[i], salt)
        r = np.int64(hashed >> shift)
        policy = place_of(policies, h[H_POLICIES_LAST], POLICY, r)
        kind, threshold = policies[policy + P_ADMISSION], float64_from_bits(policies[policy + P_THRESHOLD])
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
            sketch, width = policies[policy + P_SKETCH], policies[policy + P_WIDTH]
            if sketch != 0 and _would_be_sketched(sketch, width, hashed, range_bits, np.int64(threshold)):
                out[i] = ADDS_ROW
        else:
            out[i] = ADDS_ROW


@kernel
def remove(c: NDArray[np.int64], keys: NDArray[np.int64]) -> int:
    """Forgets the candidates among keys; how many they were."""
    return _remove(c, keys, carray(pointer(c[H_DESCRIPTORS]), (0,), np.int64))


@kernel
def _remove(c: NDArray[np.int64], keys: NDArray[np.int64], rows: NDArray[np.int64]) -> int:
    """Forgets the candidates among keys, or, unless `rows` is empty, those with rows[i] = 0; how many they were."""
    salt, shift = np.uint64(c[H_SALT]), np.uint64(c[H_SHIFT])
    range_bits = _S64 - shift
    descriptors = index.descriptors_of(c)
    removed = 0
    for i in range(keys.shape[0]):
        if rows.shape[0] and rows[i] != 0:
            continue
        hashed = hash_key(keys[i], salt)
        at = index.descriptor_of(descriptors, c[H_LAST], np.int64(hashed >> shift))
        base, capacity = descriptors[at + D_SEGMENT], descriptors[at + D_CAPACITY]
        entry = index.first_entry(hashed, range_bits, base, capacity)
        word = load64(entry + 8)
        while load64(entry) != keys[i] and word != 0:
            entry += index.ENTRY
            word = load64(entry + 8)
        if word != 0:
            index.close_gap(entry, salt, range_bits, base, capacity)
            descriptors[at + D_COUNT] -= 1
            c[H_ROWS] -= 1
            removed += 1
    return removed


@kernel
def put(c: NDArray[np.int64], keys: NDArray[np.int64], words: NDArray[np.int64], start: int) -> int:
    """Stores candidates with their words, replacing those of equal keys, from `start` on; returns as `admit` does."""
    salt, shift = np.uint64(c[H_SALT]), np.uint64(c[H_SHIFT])
    descriptors = index.descriptors_of(c)
    for i in range(start, keys.shape[0]):
        hashed = hash_key(keys[i], salt)
        r = np.int64(hashed >> shift)
        at = index.descriptor_of(descriptors, c[H_LAST], r)
        base, capacity = descriptors[at + D_SEGMENT], descriptors[at + D_CAPACITY]
        entry = index.first_entry(hashed, _S64 - shift, base, capacity)
        word = load64(entry + 8)
        while load64(entry) != keys[i] and word != 0:
            entry += index.ENTRY
            word = load64(entry + 8)
        if word == 0:
            if is_full(descriptors[at + D_COUNT], entry, base, capacity):
                c[H_NEED] = r
                return i
            store64(entry, keys[i])
            descriptors[at + D_COUNT] += 1
            c[H_ROWS] += 1
        store64(entry + 8, words[i])
    return keys.shape[0]


def rank(words: NDArray[np.int64]) -> NDArray[np.int64]:
    """Ranks of candidates, int64 [n], smaller for those that are to go first: pushed less often, or longer ago."""
    return (words & COUNT_MASK) << 32 | words >> _TIME_BIT


def last_push(words: NDArray[np.int64]) -> NDArray[np.int64]:
    """When candidates were pushed last: seconds of cluster time, int64 [n]."""
    return words >> _TIME_BIT
