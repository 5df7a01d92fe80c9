"""The check of keys that callers hand in."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from elasticps.errors import InputError

_NUMBER = "a key is an integer: number what it stands for, or hash it to int64"
_HINTS = {
    "f": "keys are integers; NaN and fractions have no row",
    "u": "convert with .astype(np.int64); keys may be negative",
    "b": "take the positions that a mask selects with np.flatnonzero(mask)",
}
"""What to do about keys that are no int64, by the kind of their dtype."""


def integer_keys(keys: object, where: str = "") -> NDArray[np.int64]:
    """Keys as a contiguous int64 [n]; InputError for anything that is not a one-dimensional array of integers. where:
    what its text begins with."""
    try:
        array = np.asarray(keys)
    except (TypeError, ValueError) as error:  # lists of different lengths, torch's bfloat16
        raise InputError(
            f"{where}keys must be int64 [n], and this {type(keys).__name__} is no array: {error}; lists of "
            "different lengths are to be joined first, as np.concatenate does"
        ) from None
    if array.ndim == 1 and not array.size and not isinstance(keys, np.ndarray):
        return np.empty(0, np.int64)
    if array.dtype.kind not in "iu" or array.dtype == np.uint64:
        got = array.dtype if array.dtype.kind != "O" else type(keys).__name__ if array.ndim == 0 else "objects"
        raise InputError(f"{where}keys must be int64, got {got}: {_HINTS.get(array.dtype.kind, _NUMBER)}")
    if array.ndim != 1:
        raise InputError(f"{where}keys must have one dimension, got shape {array.shape}; flatten them first")
    return np.ascontiguousarray(array, np.int64)
