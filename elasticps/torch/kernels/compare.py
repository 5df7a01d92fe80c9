"""Compares many pairs of arrays in one compiled call: a call of numpy's for each would take longer than the comparison
of a parameter."""

from __future__ import annotations

from typing import Any

import numpy as np

from elasticps.kernels import njit
from elasticps.store.native import carray, pointer


def _compare(pairs: Any) -> Any:
    bits = np.int32(0)
    for i in range(pairs.shape[0]):
        one = carray(pointer(pairs[i, 0]), (pairs[i, 2],), np.int32)
        other = carray(pointer(pairs[i, 1]), (pairs[i, 2],), np.int32)
        for j in range(pairs[i, 2]):
            bits |= one[j] ^ other[j]
    return bits != 0


differ: Any = njit("boolean(int64[:, ::1])", nogil=True, cache=True)(_compare)
"""Whether the arrays of any pair differ: int64 [n, 3], two addresses each, and how many words of 4 bytes they have."""
