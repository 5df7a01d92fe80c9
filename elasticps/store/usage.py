"""Kernels over the usage of rows: when a row was used last, how often, and the caller's score.

Usage lies at the end of a row, in words of 4 bytes: last use uint32, seconds of cluster time; count float32, pushes;
and in tables with scores, score float32. Counts and scores may fall by half in a time: that is computed when a row is
used or compared, from its last use, with multiplications and additions alone, so every replica and every reader of a
file gets the same bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from elasticps.kernels.hashing import hash_key as _hash_key
from elasticps.kernels.hashing import mix64 as _mix64
from elasticps.store.native import (
    ADDRESS,
    FLOATS,
    H_DIM,
    H_DTYPE,
    H_POLICIES,
    H_POLICIES_LAST,
    H_SALT,
    H_SCRATCH,
    H_SHIFT,
    H_TIMES,
    H_USAGE_AT,
    H_USAGE_FLOATS,
    KEYS,
    P_ADMITTED,
    P_DECAY,
    POLICY,
    WORDS,
    carray,
    float32_bits,
    float64_from_bits,
    inlined,
    kernel,
    linked,
    pointer,
    prefetch,
)
from elasticps.store.range_map import place_of
from elasticps.store.values import unpack

hash_key: Any = _hash_key
mix64: Any = _mix64

LAST_USE, COUNT, SCORE, NORM = 0, 1, 2, 3  # measures of a row, see `measure`
USAGE = 3  # words that `read_usage` writes for a row
USED_LATER = 1 << 62  # a rank above all others: of a row that was used after the time at which it is measured
MAX_COUNT = np.float32(1 << 22)  # above it one push more would be lost in a float32's rounding
LEAST_SCORE = np.float32(2.0**-126)  # to which one falls, and no further: it differs from none for ever
_PREFETCHED = 12  # rows between a prefetch and its use
_TIE_SEED = np.uint64(0xD6E8FEB86659FD93)
_LOW32 = np.uint64(0xFFFFFFFF)
# Taylor's series of 2^-f = exp(-f ln 2), whose error on [0, 1) is below 1e-9.
_C1, _C2, _C3, _C4 = -0.6931471805599453, 0.2402265069591007, -0.05550410866482158, 0.009618129107628477
_C5, _C6, _C7 = -0.0013333558146428443, 0.0001540353039338161, -1.525273380405984e-05
_C8, _C9, _C10 = 1.3215486790144307e-06, -1.0178086009239696e-07, 7.054911620801121e-09


@kernel
def falling(x: float) -> float:
    """2^-x for x >= 0, a number of half-lives: the same bits on any CPU; 0 from 140 on."""
    if x >= 140.0:
        return 0.0
    n = np.int64(x)
    f = x - n
    p = _C10
    p = _C9 + f * p
    p = _C8 + f * p
    p = _C7 + f * p
    p = _C6 + f * p
    p = _C5 + f * p
    p = _C4 + f * p
    p = _C3 + f * p
    p = _C2 + f * p
    p = _C1 + f * p
    return (1.0 + f * p) * float64_from_bits((1023 - n) << 52)


@kernel
def _usage(row: int, floats: int) -> tuple[NDArray[np.uint32], NDArray[np.float32]]:
    return carray(pointer(row), (floats,), np.uint32), carray(pointer(row), (floats,), np.float32)


@inlined
def policies_of(h: NDArray[np.int64]) -> NDArray[np.int64]:
    """The policies of ranges, flat: see `range_map.place_of`."""
    found: NDArray[np.int64] = carray(pointer(h[H_POLICIES]), (POLICY * (h[H_POLICIES_LAST] + 1),), np.int64)
    return found


@inlined
def clock_of(h: NDArray[np.int64]) -> tuple[np.uint64, np.uint64, NDArray[np.int64], NDArray[np.int64]]:
    """What the time of a key's range is found by: salt and shift of hashes; times, by range, and policies, see
    `decay_of`. Those are nothing to read where rows keep no usage."""
    times = carray(pointer(h[H_TIMES]), (1 << (64 - h[H_SHIFT]),), np.int64)
    return np.uint64(h[H_SALT]), np.uint64(h[H_SHIFT]), times, policies_of(h)


@inlined
def decay_of(h: NDArray[np.int64], policies: NDArray[np.int64], r: int | np.int64) -> float:
    """By which share of a half-life counts of range r fall in a second."""
    return float64_from_bits(policies[place_of(policies, h[H_POLICIES_LAST], POLICY, r) + P_DECAY])


@inlined
def note_use(at: int, now: int, decay: float) -> float:
    """Notes a push at `now` to the row whose usage lies at an address. Returns the share that is left of what has
    fallen since its last use."""
    word, value = _usage(at, 2)
    count = value[1]
    elapsed = now - np.int64(word[0])
    share = 1.0
    if decay > 0.0 and elapsed > 0:
        share = falling(elapsed * decay)
        count = np.float32(count * share)
    value[1] = min(count + np.float32(1), MAX_COUNT)
    word[0] = np.uint32(now)
    return share


@linked(WORDS, KEYS, WORDS, FLOATS)
def use(h: NDArray[np.int64], keys: NDArray[np.int64], rows: NDArray[np.int64], scores: NDArray[np.float32]) -> None:
    """Notes a push with scores, float32 [n], to the rows of keys [n] at their ranges' time. One without is noted by
    `updates.apply`."""
    salt, shift, times, policies = clock_of(h)
    for i in range(keys.shape[0]):
        r = np.int64(hash_key(keys[i], salt) >> shift)
        at = rows[i] + h[H_USAGE_AT]
        share = note_use(at, times[r], decay_of(h, policies, r))
        score = _usage(at, 3)[1]
        fallen = score[2]
        if fallen > 0 and share < 1.0:
            fallen = max(np.float32(fallen * share), LEAST_SCORE)
        score[2] = min(fallen + scores[i], MAX_COUNT)


@kernel
def begin(h: NDArray[np.int64], keys: NDArray[np.int64], rows: NDArray[np.int64], counts: NDArray[np.float32]) -> None:
    """Sets the usage of the rows of keys [n]: last used now, with these counts, float32 [n], as rows that
    a policy has admitted, or none if it is empty. A negative count leaves its row as it is."""
    at, floats = h[H_USAGE_AT], h[H_USAGE_FLOATS]
    salt, shift, times, policies = clock_of(h)
    for i in range(keys.shape[0]):
        if counts.shape[0] and counts[i] < 0:
            continue
        word, value = _usage(rows[i] + at, floats)
        r = np.int64(hash_key(keys[i], salt) >> shift)
        word[0] = np.uint32(times[r])
        value[1] = np.float32(0)
        if counts.shape[0]:
            value[1] = counts[i]
            policy = place_of(policies, h[H_POLICIES_LAST], POLICY, r)  # its own, as it has a row
            policies[policy + P_ADMITTED] += 1
        if floats > 2:
            value[2] = np.float32(0)


@kernel
def read_usage(h: NDArray[np.int64], rows: NDArray[np.int64], out: NDArray[np.uint32]) -> None:
    """Writes the usage of rows as uint32 [n, USAGE]: seconds, and the bits of count and score. A row that is not there
    (0), or has no score, reads as NaN."""
    at, floats = h[H_USAGE_AT], h[H_USAGE_FLOATS]
    for i in range(rows.shape[0]):
        out[i, 0], out[i, 1], out[i, 2] = 0, 0x7FC00000, 0x7FC00000
        if rows[i] != 0 and at != 0:
            word, _ = _usage((rows[i] & ADDRESS) + at, floats)
            for j in range(floats):
                out[i, j] = word[j]


@kernel
def _squares(w: NDArray[np.float32]) -> np.float32:
    """Sum of squares, in four fixed sums, which a compiler may take side by side."""
    n = w.shape[0]
    a0 = a1 = a2 = a3 = np.float32(0)
    for j in range(0, n - 3, 4):
        a0 += w[j] * w[j]
        a1 += w[j + 1] * w[j + 1]
        a2 += w[j + 2] * w[j + 2]
        a3 += w[j + 3] * w[j + 3]
    for j in range(n & -4, n):
        a0 += w[j] * w[j]
    return (a0 + a1) + (a2 + a3)


@kernel
def measure(
    h: NDArray[np.int64], rows: NDArray[np.int64], what: int, now: int, decay: float, out: NDArray[np.int64]
) -> None:
    """Writes a rank of each row, int64 [n], smaller for those that are to go first. rows: addresses or words, [n].

    what: LAST_USE; COUNT or SCORE, fallen to what they are at `now` with `decay` half-lives a second, or USED_LATER
    where the last use has made them fall further than that; NORM of weights.
    A score above 0 falls to LEAST_SCORE, so a row whose rank by score is 0 never had one, nor had its older versions.
    Ranks of floats are their bits, which are in the order of the floats, as none is negative.
    """
    at, floats, n = h[H_USAGE_AT], h[H_USAGE_FLOATS], rows.shape[0]
    begins = 0 if what == NORM else at
    for i in range(min(n, _PREFETCHED)):
        prefetch((rows[i] & ADDRESS) + begins)
    for i in range(n):
        if i + _PREFETCHED < n:
            prefetch((rows[i + _PREFETCHED] & ADDRESS) + begins)
        row = rows[i] & ADDRESS
        if what == NORM:
            weights = row
            if h[H_DTYPE] != 0:
                weights = h[H_SCRATCH]
                unpack(row, carray(pointer(weights), (h[H_DIM],), np.float32), h[H_DTYPE])
            out[i] = float32_bits(_squares(carray(pointer(weights), (h[H_DIM],), np.float32)))
        else:
            word, value = _usage(row + at, floats)
            if what == LAST_USE:
                out[i] = word[0]
            else:
                elapsed: Any = now - np.int64(word[0])
                share = falling(max(elapsed, 0) * decay)
                fallen = np.float32(value[what] * share)
                if what == SCORE and value[what] > 0 and share < 1.0:
                    fallen = max(fallen, LEAST_SCORE)
                out[i] = float32_bits(fallen)
                if elapsed < 0 and decay > 0:
                    out[i] = USED_LATER


@kernel
def ties(keys: NDArray[np.int64], out: NDArray[np.int64]) -> None:
    """Writes a number of 32 bits for each key, which decides among rows of equal rank, whatever the key's range."""
    for i in range(keys.shape[0]):
        out[i] = np.int64(mix64(np.uint64(keys[i]) ^ _TIE_SEED) & _LOW32)
