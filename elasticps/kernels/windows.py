"""Finds the parts of a WINDOW's body, see `elasticps.wire.windows`."""

from __future__ import annotations

import numpy as np
from numba import types
from numpy.typing import NDArray

from elasticps.kernels import njit

RUNS_AT, RUNS, RECORDS_AT, RECORDS, FIRST_BLOCK = range(5)
"""Of what `locate` finds: words of the body, and how many of each there are. Then of each block:"""
TABLE, ROWS, ROW_WORDS, GONE, CLEARED, KEYS_AT, BLOCK = range(7)
_BODY = types.Array(types.int64, 1, "C", readonly=True, aligned=False)
_WORDS = types.Array(types.int64, 1, "C")
_INT = types.int64
_LOW = 0xFFFFFFFF


@njit(
    nogil=True, cache=True, error_model="numpy",
    signature=(_BODY, _INT, _INT, _INT, _INT, _INT, _INT, _INT, _WORDS),
)  # fmt: skip
def locate(
    body: NDArray[np.int64], at: int, named: int, blocks: int, ranges: int, most: int, most_floats: int,
    most_words: int, out: NDArray[np.int64],
) -> bool:  # fmt: skip
    """Whether body [n] has, from word `at` on, the positions of `named` ranges, -1 for none of that and what follows:
    runs of progress, and records of steps, `most` of each at most; and so many blocks, each of `most_floats` at most
    and of rows of `most_words`; and nothing else, nor a range that there is not. out: [FIRST_BLOCK + BLOCK * blocks].
    """
    n = body.shape[0]
    out[RUNS_AT] = out[RUNS] = out[RECORDS_AT] = out[RECORDS] = 0
    if named >= 0:
        if named > ranges or at + 2 * named + 1 > n:
            return False
        for i in range(at, at + named):
            if not 0 <= body[i] < ranges:
                return False
        at += 2 * named
        runs = body[at]
        at += 1
        if not 0 <= runs <= most or at + 4 * runs + 1 > n:
            return False
        out[RUNS_AT], out[RUNS] = at, runs
        for i in range(at, at + 4 * runs, 4):
            if not 0 <= body[i + 1] <= body[i + 2] < ranges:
                return False
        at += 4 * runs
        records = body[at]
        at += 1
        if not 0 <= records <= most:
            return False
        out[RECORDS_AT], out[RECORDS] = at, records
        at += records * (3 + ((ranges + 63) >> 6))
    for b in range(blocks):
        if at + 3 > n:
            return False
        place = FIRST_BLOCK + BLOCK * b
        rows, words = (body[at] >> 32) & _LOW, body[at + 1] & _LOW
        gone, cleared = (body[at + 1] >> 32) & _LOW, body[at + 2] & _LOW
        if words > most_words or cleared > ranges or rows * max(words, 1) > most_floats:
            return False
        out[place + TABLE], out[place + ROWS], out[place + ROW_WORDS] = body[at] & _LOW, rows, words
        out[place + GONE], out[place + CLEARED], out[place + KEYS_AT] = gone, cleared, at + 3
        begin = at + 3 + rows + gone
        at = begin + cleared + ((rows * words + 1) >> 1)
        if at > n:
            return False
        for i in range(begin, begin + cleared):
            if not 0 <= body[i] < ranges:
                return False
    return bool(at == n)
