"""Registers users' filters: each is two functions on one row, compiled when it is registered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from numba import njit, types
from numba.core.compiler_lock import global_compiler_lock
from numba.core.dispatcher import Dispatcher

from elasticps.errors import SpecError

_rows = types.Array(types.float32, 2, "C")
_words = types.Array(types.uint32, 2, "C")
_constants = types.Array(types.float32, 1, "C")


class UserFilter(NamedTuple):
    """encode: rows float32 [n, dim], words uint32 [n, words], constants; decode: words, rows, constants."""

    given: tuple[object, object]
    encode: Callable[..., None]
    decode: Callable[..., None]


_known: dict[str, UserFilter] = {}


def register_filter(name: str, encode: Callable[..., None], decode: Callable[..., None]) -> None:
    """Makes a filter of your own known as `CustomFilter(name=...)`. Call it in a plugin module that every server loads,
    and every worker imports.

    Both are numba functions (or plain ones that numba can compile) on one row. `encode(x, words, c)` writes what is
    sent of x, float32 [dim], to words, uint32 and zero at first; `decode(words, x, c)` makes x of that. c: the filter's
    `constant_values`, float32. Replicas must decode the same bits: as for `register_optimizer`. Words come from the
    network: decode must not take them for places outside of x, nor raise.
    """
    known = _known.get(name)
    if known is not None:
        if known.given == (encode, decode):
            return
        raise SpecError(f"another filter is already registered as {name!r}")
    with global_compiler_lock:
        try:
            made = _loop(encode, (_rows, _words, _constants)), _loop(decode, (_words, _rows, _constants))
        except Exception as error:
            raise SpecError(f"filter {name!r} does not compile: {error}") from error
        _known[name] = UserFilter((encode, decode), *made)


def user_filter(name: str) -> UserFilter:
    """The functions of a filter. Raises SpecError if it is not registered here."""
    known = _known.get(name)
    if known is None:
        names = ", ".join(sorted(_known)) or "none"
        raise SpecError(
            f"no filter is registered as {name!r} (registered: {names}); start every server with the plugin module "
            f"that calls elasticps.store.register_filter({name!r}, ...), and import it in every worker"
        )
    return known


def _loop(function: Callable[..., None], signature: tuple[Any, ...]) -> Callable[..., None]:
    one: Any = function if isinstance(function, Dispatcher) else njit(error_model="numpy")(function)

    def run(source: Any, target: Any, c: Any) -> None:
        for i in range(source.shape[0]):
            one(source[i], target[i], c)

    looped: Any = njit(nogil=True, error_model="numpy")(run)
    looped.compile(signature)
    looped.disable_compile()
    made: Callable[..., None] = looped
    return made
