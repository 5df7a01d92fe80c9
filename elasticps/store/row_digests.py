"""Digests of rows as pulls show them: whoever has a row asks for that to know whether it is still the same."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from elasticps.kernels.hashing import mix64
from elasticps.store.native import kernel

WORDS = 2  # float32 that a digest takes in an answer
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def digests(rows: NDArray[np.float32]) -> NDArray[np.uint64]:
    """64 bits of each of rows float32 [n, dim], C-contiguous: uint64 [n]. Equal bits give equal digests; of two other
    rows equal ones come once in 2^64."""
    out = np.empty(len(rows), np.uint64)
    digest_rows(rows.view(np.uint32), out)
    return out


@kernel
def digest_rows(bits: NDArray[np.uint32], out: NDArray[np.uint64]) -> None:
    """The same of bits [n, dim] into out [n]."""
    for i in range(bits.shape[0]):
        digest = np.uint64(bits.shape[1])
        for j in range(0, bits.shape[1] - 1, 2):
            digest = mix64((digest + _GOLDEN) ^ (np.uint64(bits[i, j]) | np.uint64(bits[i, j + 1]) << np.uint64(32)))
        if bits.shape[1] & 1:
            digest = mix64((digest + _GOLDEN) ^ np.uint64(bits[i, bits.shape[1] - 1]))
        out[i] = digest
