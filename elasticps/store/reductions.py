"""Functions over all rows of a table, computed where the rows are: those that everybody knows, and those of users.

A reduction is two functions. `chunk` makes a state, float64 [size], of some rows; `merge` adds a later state to an
earlier one. Replicas must get the same bits from the same rows: these come in an order that depends on nothing else,
and nothing here is summed in another one. `elasticps.server.core.partial` takes a range to pieces for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numba import njit, types
from numba.core.compiler_lock import global_compiler_lock
from numba.core.dispatcher import Dispatcher
from numpy.typing import NDArray

from elasticps.errors import SpecError
from elasticps.model.optimizers import integer, text
from elasticps.store.native import kernel

Keys = NDArray[np.int64]
Floats = NDArray[np.float32]
State = NDArray[np.float64]

MAX_STATE = 4096  # floats
MAX_CONSTANTS = 256
MAX_NAME = 200

_chunk_types = (
    types.Array(types.int64, 1, "C"), types.Array(types.float32, 2, "C"), types.Array(types.float64, 1, "C"),
    types.Array(types.float64, 1, "C"),
)  # fmt: skip
_merge_types = (types.Array(types.float64, 1, "C"), types.Array(types.float64, 1, "C"))


class Reduction(NamedTuple):
    """chunk(keys int64 [n], rows float32 [n, dim], state float64 [size] of zeros, constants float64); n is not 0.
    merge(state, later state). result(state): what a caller gets; of None, without rows."""

    size: int
    constants: int
    chunk: Callable[..., None]
    merge: Callable[..., None]
    result: Callable[[State | None], float | State]
    given: tuple[object, object]


# --- those that everybody knows ---------------------------------------------------------------------------------------


def _first(state: State | None, empty: float) -> float:
    return empty if state is None else float(state[0])


@kernel
def _sum(keys: Keys, w: Floats, s: State, c: State) -> None:
    for i in range(w.shape[0]):
        for j in range(w.shape[1]):
            s[0] += w[i, j]


@kernel
def _l1(keys: Keys, w: Floats, s: State, c: State) -> None:
    for i in range(w.shape[0]):
        for j in range(w.shape[1]):
            s[0] += abs(w[i, j])


@kernel
def _squares(keys: Keys, w: Floats, s: State, c: State) -> None:
    for i in range(w.shape[0]):
        for j in range(w.shape[1]):
            x = np.float64(w[i, j])
            s[0] += x * x


@kernel
def _max(keys: Keys, w: Floats, s: State, c: State) -> None:
    s[0] = w[0, 0]
    for i in range(w.shape[0]):
        for j in range(w.shape[1]):
            if w[i, j] > s[0] or w[i, j] != w[i, j]:  # NaN stays
                s[0] = w[i, j]


@kernel
def _min(keys: Keys, w: Floats, s: State, c: State) -> None:
    s[0] = w[0, 0]
    for i in range(w.shape[0]):
        for j in range(w.shape[1]):
            if w[i, j] < s[0] or w[i, j] != w[i, j]:
                s[0] = w[i, j]


@kernel
def _linf(keys: Keys, w: Floats, s: State, c: State) -> None:
    for i in range(w.shape[0]):
        for j in range(w.shape[1]):
            x = abs(w[i, j])
            if x > s[0] or x != x:
                s[0] = x


@kernel
def _nonzero(keys: Keys, w: Floats, s: State, c: State) -> None:
    for i in range(w.shape[0]):
        for j in range(w.shape[1]):
            if w[i, j] != 0:
                s[0] += 1.0


@kernel
def _add(s: State, later: State) -> None:
    s[0] += later[0]


@kernel
def _larger(s: State, later: State) -> None:
    if later[0] > s[0] or later[0] != later[0]:
        s[0] = later[0]


@kernel
def _smaller(s: State, later: State) -> None:
    if later[0] < s[0] or later[0] != later[0]:
        s[0] = later[0]


_BUILT_IN: dict[str, tuple[Any, Any, Callable[[State | None], float]]] = {
    "sum": (_sum, _add, lambda s: _first(s, 0.0)),
    "l1": (_l1, _add, lambda s: _first(s, 0.0)),
    "l2": (_squares, _add, lambda s: math.sqrt(_first(s, 0.0))),
    "linf": (_linf, _larger, lambda s: _first(s, 0.0)),
    "nonzero": (_nonzero, _add, lambda s: int(_first(s, 0.0))),
    "max": (_max, _larger, lambda s: _first(s, -math.inf)),
    "min": (_min, _smaller, lambda s: _first(s, math.inf)),
}
COUNT = "count"
"""Needs no rows, only how many there are."""
_known: dict[str, Reduction] = {}


def load() -> None:
    """Compiles, or loads from the cache, those that everybody knows."""
    if _BUILT_IN.keys() <= _known.keys():
        return
    with global_compiler_lock:
        for name, (chunk, merge, result) in _BUILT_IN.items():
            made = _compiled(chunk, _chunk_types), _compiled(merge, _merge_types)
            _known[name] = Reduction(1, 0, *made, result, (chunk, merge))


# --- those of users ---------------------------------------------------------------------------------------------------


def register_reduction(
    name: str, chunk: Callable[..., None], merge: Callable[..., None], *, size: int = 1, constants: int = 0
) -> None:
    """Makes a function over all rows of a table known as `table.reduce(name)`. Call it in a plugin module that every
    server loads, and every worker that asks imports.

    Both are numba functions (or plain ones that numba can compile). `chunk(keys, w, s, c)` writes to s, float64 [size]
    and zero at first, what some rows give: keys int64 [n], w float32 [n, dim], n at least 1. `merge(s, later)` adds
    what comes after it to s. c: as many `constants`, float64, as `reduce` is given. SpecError if they do not compile.
    """
    with global_compiler_lock:
        load()
        known = _known.get(text(name, "a reduction's name"))
        if known is not None:
            if (known.given, known.size, known.constants) == ((chunk, merge), size, constants):
                return
            raise SpecError(f"another reduction is already registered as {name!r}")
        integer(size, f"reduction {name!r}: size", 1, MAX_STATE)
        integer(constants, f"reduction {name!r}: constants", 0, MAX_CONSTANTS)
        if not 0 < len(name) <= MAX_NAME or name == COUNT:
            raise SpecError(f"a reduction's name has 1 to {MAX_NAME} characters and is not {COUNT!r}, got {name!r}")
        try:
            made = _compiled(chunk, _chunk_types), _compiled(merge, _merge_types)
        except Exception as error:
            raise SpecError(f"reduction {name!r} does not compile: {error}") from error
        _known[name] = Reduction(
            size, constants, *made, lambda state: np.zeros(size) if state is None else state, (chunk, merge)
        )


def reduction(name: str, constants: Sequence[float]) -> Reduction:
    """Its functions. SpecError if nobody has registered it here, or it takes another number of constants."""
    load()
    known = _known.get(name)
    if known is None:
        raise SpecError(
            f"no reduction is registered as {name!r} (registered: {', '.join(sorted({*_known, COUNT}))}); start every "
            f"server with the plugin module that calls elasticps.store.register_reduction({name!r}, ...), and import "
            "it in every worker that asks"
        )
    if len(constants) != known.constants:
        raise SpecError(f"reduction {name!r} takes {known.constants} constants, not {len(constants)}")
    return known


def _compiled(function: Any, signature: tuple[Any, ...]) -> Callable[..., None]:
    compiled: Any = function if isinstance(function, Dispatcher) else njit(nogil=True, error_model="numpy")(function)
    if signature not in compiled.signatures:
        compiled.compile(signature)
    compiled.disable_compile()
    made: Callable[..., None] = compiled
    return made
