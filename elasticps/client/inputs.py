"""Checks what callers hand in: keys, gradients, tables. Nothing wrong gets as far as a socket.

`checked_pull` and `checked_push` check all that one call names, tables and tensors, before anything of it is sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from elasticps.errors import ConfigError, InputError
from elasticps.model.integer_keys import integer_keys
from elasticps.model.policies import SCORES
from elasticps.model.spec import TableSpec
from elasticps.wire.frames import MAX_BLOCKS


class Target(Protocol):
    """A table or a tensor that is open on this client."""

    @property
    def name(self) -> str: ...
    @property
    def spec(self) -> TableSpec: ...


TargetT = TypeVar("TargetT", bound=Target)
_INT64 = np.dtype(np.int64)
_FLOAT32 = np.dtype(np.float32)


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
    return integer_keys(keys, f"table {name!r}: ")


def checked_gradients(
    name: str, pair: object, dim: int, scored: bool = False
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The keys int64 [n] and gradients float32 [n, dim] that a table is pushed; of one that keeps scores, float32
    [n, dim + 1] with the scores, zeros if there are none. InputError for anything else."""
    if not isinstance(pair, tuple) or len(pair) not in (2, 3):
        got = f"a tuple of {len(pair)}" if isinstance(pair, tuple) else type(pair).__name__
        raise InputError(f"table {name!r}: push a pair (keys, grads), got {got}")
    keys = checked_keys(name, pair[0])
    grads = checked_floats(f"table {name!r}: grads", pair[1], (len(keys), dim), "a row for each key")
    if len(pair) == 2 and not scored:
        return keys, grads
    if not scored:
        raise InputError(f'table {name!r} keeps no scores: push a pair (keys, grads), or make it with usage="score"')
    return keys, _with_scores(name, keys, grads, pair[2] if len(pair) == 3 else np.zeros(len(keys), np.float32))


def _with_scores(name: str, keys: NDArray[np.int64], grads: NDArray[np.float32], given: object) -> NDArray[np.float32]:
    scores = checked_floats(f"table {name!r}: scores", given, (len(keys),), "one for each key")
    wrong = ~(scores >= 0) | ~np.isfinite(scores)  # NaN is not below 0
    if wrong.any():
        at = int(np.argmax(wrong))
        raise InputError(
            f"table {name!r}: scores must be finite and at least 0, that of key {keys[at]} is {scores[at]}"
        )
    return np.concatenate([grads, scores[:, None]], axis=1)


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


def checked_handles(
    opened: Mapping[str, TargetT], given: Mapping[TargetT, object], call: str
) -> Iterable[tuple[TargetT, object]]:
    """Returns the tables and tensors that a call (`pull`, `push`) names, and what it gives for each. InputError unless
    it names them in a mapping and all of them are among those that this client has opened."""
    if type(given) is not dict and not isinstance(given, Mapping):  # to ask an abstract class takes longer
        raise InputError(
            f"{call} takes a mapping from tables and tensors, as {{table: (keys, grads), tensor: grad}}, got "
            f"{type(given).__name__}"
        )
    for handle in given:
        if opened.get(getattr(handle, "name", "")) is not handle:
            _refuse_handle(call, handle)
    return given.items()


def _refuse_handle(call: str, handle: Any) -> NoReturn:
    if not hasattr(handle, "salt"):  # which tables and tensors have, and no `TableInfo`
        raise InputError(f"{call} takes tables and tensors as keys, as ps.table(…) returns them, got {handle!r:.200}")
    again = "ps.table" if handle.spec.shape is None else "ps.tensor"
    raise InputError(
        f"{call}: {handle.name!r} is not open on this client: it was dropped, or another client opened it, such as "
        f"one that a notebook's cell made before. Open it on this one: {again}({handle.name!r}, …)"
    )


def checked_pull(
    opened: Mapping[str, TargetT], keys: Mapping[TargetT, object], outs: Mapping[TargetT, object] | None, read: object
) -> list[tuple[TargetT, NDArray[np.int64] | None, NDArray[np.float32]]]:
    """Returns what a pull asks for: tables with their keys, int64 [n], tensors with None, and where the rows of each
    go. InputError for unusable arguments."""
    checked = []
    for handle, given in checked_handles(opened, keys, "pull"):
        out = None if outs is None else outs.get(handle)
        checked.append((handle, *checked_rows(handle, given, out, read)))
    return checked


def checked_rows(
    handle: Target, keys: object, out: object, read: object
) -> tuple[NDArray[np.int64] | None, NDArray[np.float32]]:
    """Returns the keys of one table's pull, int64 [n], None for a tensor, and where the rows go: `out`, or new memory.
    InputError for unusable arguments."""
    shape, array, what = handle.spec.shape, None, "tensor"
    if shape is not None and keys is not None:
        raise InputError(f"tensor {handle.name!r} is pulled as a whole: give None, not keys; `take` gives some floats")
    checked_read(handle.name, read)
    if shape is None:
        array = checked_keys(handle.name, keys)
        shape, what = (len(array), handle.spec.dim), "table"
    return array, np.empty(shape, np.float32) if out is None else checked_out(f"{what} {handle.name!r}", out, shape)


def checked_push(
    opened: Mapping[str, TargetT], values: Mapping[TargetT, object]
) -> list[tuple[TargetT, NDArray[np.int64] | None, NDArray[np.float32]]]:
    """Returns the gradients of a push: of each table its keys, int64 [n], and float32 [n, push_width]; of a tensor
    None, and float32 of its shape. InputError for unusable arguments."""
    handles = checked_handles(opened, values, "push")
    if len(values) > MAX_BLOCKS:
        raise InputError(f"a push of {len(values)} tables is over the limit of {MAX_BLOCKS}; push them in parts")
    checked: list[tuple[TargetT, NDArray[np.int64] | None, NDArray[np.float32]]] = []
    for handle, value in handles:
        name, spec, shape = handle.name, handle.spec, handle.spec.shape
        if shape is None:
            checked.append((handle, *checked_gradients(name, value, spec.dim, spec.usage == SCORES)))
        else:
            checked.append((handle, None, checked_floats(f"tensor {name!r}", value, shape)))
    return checked
