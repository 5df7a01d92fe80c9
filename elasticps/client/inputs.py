"""What callers hand in, checked at the edge: nothing wrong gets as far as a socket."""

from __future__ import annotations

from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from elasticps.errors import ConfigError, InputError

_INT64 = np.dtype(np.int64)
_FLOAT32 = np.dtype(np.float32)
_NUMBER = "a key is an integer: number what it stands for, or hash it to int64"
_KEY_HINTS = {
    "f": "keys are integers; NaN and fractions have no row",
    "u": "convert with .astype(np.int64); keys may be negative",
    "b": "take the positions that a mask selects with np.flatnonzero(mask)",
}
"""What to do about keys that are no int64, by the kind of their dtype."""


def refuse_pickling(what: str) -> NoReturn:
    """ConfigError for what belongs to the connections of this process."""
    raise ConfigError(
        f"{what} cannot be copied or pickled, as it belongs to this process's connections: hand the cluster's URL and "
        "the table's name to the other process, and call elasticps.connect(url, worker=…) and ps.open(name) there"
    )


def checked_keys(name: str, keys: object) -> NDArray[np.int64]:
    """Keys as a contiguous int64 [n]; InputError for anything that is not a one-dimensional array of integers."""
    if type(keys) is np.ndarray and keys.dtype is _INT64 and keys.ndim == 1 and keys.flags.c_contiguous:
        return keys
    try:
        array = np.asarray(keys)
    except (TypeError, ValueError) as error:  # lists of different lengths, torch's bfloat16
        raise InputError(
            f"table {name!r}: keys must be int64 [n], and this {type(keys).__name__} is no array: {error}; lists of "
            "different lengths are to be joined first, as np.concatenate does"
        ) from None
    if array.ndim == 1 and not array.size and not isinstance(keys, np.ndarray):
        return np.empty(0, np.int64)
    if array.dtype.kind not in "iu" or array.dtype == np.uint64:
        got = array.dtype if array.dtype.kind != "O" else type(keys).__name__ if array.ndim == 0 else "objects"
        raise InputError(f"table {name!r}: keys must be int64, got {got}: {_KEY_HINTS.get(array.dtype.kind, _NUMBER)}")
    if array.ndim != 1:
        raise InputError(f"table {name!r}: keys must have one dimension, got shape {array.shape}; flatten them first")
    return np.ascontiguousarray(array, np.int64)


def checked_gradients(name: str, pair: object, dim: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The keys int64 [n] and gradients float32 [n, dim] that a table is pushed; InputError for anything else."""
    if not isinstance(pair, tuple) or len(pair) != 2:
        got = f"a tuple of {len(pair)}" if isinstance(pair, tuple) else type(pair).__name__
        raise InputError(f"table {name!r}: push a pair (keys, grads), got {got}")
    keys = checked_keys(name, pair[0])
    return keys, checked_floats(f"table {name!r}: grads", pair[1], (len(keys), dim), "a row for each key")


def checked_floats(what: str, values: object, shape: tuple[int, ...], why: str = "") -> NDArray[np.float32]:
    """Values as a C-contiguous float32 array of `shape`; InputError otherwise. Lists are converted, arrays are not.
    why: what gives the shape, in words."""
    if (
        type(values) is np.ndarray
        and values.dtype is _FLOAT32
        and values.shape == shape
        and values.flags.c_contiguous
    ):  # fmt: skip
        return values
    if values is None:  # numpy makes NaN of it
        raise InputError(f"{what} must be float32 of shape {shape}, got None")
    try:
        array = np.asarray(values) if hasattr(values, "dtype") else np.asarray(values, np.float32)
    except (TypeError, ValueError) as error:
        hint = f"it holds what is no number, or lists of different lengths ({error})"
        if hasattr(values, "detach"):
            hint = f"{error}; of a tensor of torch's take values.detach().float().cpu()"
        raise InputError(
            f"{what} must be float32 of shape {shape}, and this {type(values).__name__} is no such array: {hint}"
        ) from None
    if array.dtype != np.float32:
        raise InputError(f"{what} must be float32, got {array.dtype}; convert with .astype(np.float32)")
    if array.shape != shape:
        raise InputError(f"{what} must have shape {shape}, got {array.shape}{f': {why}' * bool(why)}")
    return np.asarray(array, order="C")  # ascontiguousarray would give a scalar a dimension


def checked_out(what: str, out: object, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """An array to receive into; InputError if it is not a writable C-contiguous float32 array of `shape`."""
    if not isinstance(out, np.ndarray) or out.dtype != np.float32 or out.shape != shape:
        got = f"{out.dtype} {out.shape}" if isinstance(out, np.ndarray) else type(out).__name__
        raise InputError(f"{what}: out must be a float32 array of shape {shape}, got {got}")
    if not (out.flags.c_contiguous and out.flags.writeable):
        raise InputError(f"{what}: out must be C-contiguous and writable")
    return out


def checked_read(name: str, read: object) -> None:
    """InputError unless `read` names who may answer a pull."""
    if read not in ("tail", "any"):
        raise InputError(f"{name!r}: read must be 'tail' (committed values) or 'any' (any replica's), got {read!r}")
