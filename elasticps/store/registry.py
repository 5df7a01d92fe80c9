"""Which kernels there are, with the argument types they are compiled for, and the optimizers that users add."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numba import njit, types
from numba.core.compiler_lock import global_compiler_lock
from numba.core.dispatcher import Dispatcher

from elasticps.errors import SpecError
from elasticps.kernels import compiled_once
from elasticps.spec import Custom, Optimizer
from elasticps.store import codec, columns, index, intervals, reductions, row_digests, sparse, stamps, updates

# One signature each, in which keys and floats may be read-only and unaligned, as slices of a received frame are.
# Anything else, like int32 keys or a strided array, is a TypeError: no call ever compiles.
_words = types.Array(types.int64, 1, "C")
_keys = types.Array(types.int64, 1, "C", readonly=True, aligned=False)
_floats1 = types.Array(types.float32, 1, "C", readonly=True, aligned=False)
_floats2 = types.Array(types.float32, 2, "C", readonly=True, aligned=False)
_int = types.int64
_UPDATE = (_words, _keys, _floats2, _floats1, _words, types.boolean)
_SIGNATURES: tuple[tuple[Any, tuple[Any, ...]], ...] = (
    (index.find, (_words, _keys, _words)),
    (index.insert, (_words, _keys, _floats2, _int, _words, _int)),
    (index.overwrite, (_words, _floats2, _words)),
    (index.regrow, (_words, _int, _int, _int)),
    (index.list_range, (_words, _int, _words, _words)),
    (index.free_rows, (_words, _words)),
    (index.remove, (_words, _keys)),
    (index.copy_slots, (_words, _words, types.Array(types.float32, 2, "C"))),
    (index.copy_out, (_words, types.Array(types.uint64, 2, "C"))),
    (index.copy_in, (_words, types.Array(types.uint64, 2, "C", readonly=True, aligned=False))),
    (index.digest, (_words, _words, _words)),
    (index.first_foreign, (_words, _keys, types.Array(types.boolean, 1, "C", readonly=True))),
    (intervals.first_misplaced, (_words, _keys, _words)),
    (intervals.first_at, (_words, _keys, _words, _int)),
    (intervals.select, (_words, _keys, _words, _words)),
    (index.sweep, (_words, _int)),
    (index.keep_slab, (_words,)),
    (index.move_out, (_words, _int)),
    (intervals.ranges_of, (_words, _keys, _words)),
    (intervals.places_of, (_words, _keys, _words)),
    (intervals.list_interval, (_words, _int, _int, _int, _words, _words)),
    (intervals.digest_interval, (_words, _int, _int, _int)),
    (stamps.touch, (_words, _keys, _words)),
    (stamps.set_stamps, (_words, _keys, types.Array(types.uint16, 1, "C", readonly=True, aligned=False))),
    (stamps.clear_stamps, (_words, _int)),
    (stamps.list_parts, (_words, _int, _int, _words, _words)),
    (stamps.choose, (_words, _int, _int, _int, _words, _words)),
    (stamps.count_kept, (_words, _int, _int)),
    (stamps.pass_parts, (_words, _int, _int, _words, _words)),
    (columns.write_slots, (_words, _floats2, _words)),
    (columns.split, (_words, _words, _int, types.Array(types.int32, 1, "C"))),
    (index.gather, (_words, _keys, types.Array(types.float32, 2, "C", aligned=False), _words)),
    (row_digests.digest_rows, (types.Array(types.uint32, 2, "C", readonly=True), types.Array(types.uint64, 1, "C"))),
    (codec.encode_rows, (_int,) * 6),
    (codec.decode_rows, (_int,) * 6),
    (sparse.spread_rows, (_int,) * 7),
    (sparse.draw_rows, (_int,) * 8),
)
Update = Callable[..., int]
_BUILT_IN: dict[str, Any] = {
    "sgd": updates.apply_sgd,
    "adagrad": updates.apply_adagrad,
    "row_adagrad": updates.apply_row_adagrad,
    "adam": updates.apply_adam,
    "adamw": updates.apply_adamw,
    "ftrl": updates.apply_ftrl,
    "assign": updates.apply_assign,
    "accumulate": updates.apply_accumulate,
}


@dataclass(frozen=True)
class _Registered:
    function: object
    apply: Update
    slots: int
    row_slots: int


_custom: dict[str, _Registered] = {}


_loaded: set[Any] = set()


def _load(kernel: Any, signature: tuple[Any, ...]) -> None:
    if kernel in _loaded:
        return
    with global_compiler_lock:  # the first use may come from several threads at once
        if kernel not in _loaded:
            if signature not in kernel.signatures:  # other kernels may have had it compiled for other arrays
                kernel.compile(signature)
            kernel.disable_compile()
            _loaded.add(kernel)


def load_kernels() -> None:
    """Compiles, or loads from the cache, what every table needs."""
    for kernel, signature in _SIGNATURES:
        _load(kernel, signature)


def warm() -> None:
    """Compiles, or loads from the cache, every built-in kernel: afterwards no operation waits for a compiler."""
    with compiled_once(__file__):
        load_kernels()
        for kernel in _BUILT_IN.values():
            _load(kernel, _UPDATE)
        reductions.load()


def register_optimizer(name: str, update: Callable[..., None], *, slots: int = 0, row_slots: int = 0) -> None:
    """Makes an optimizer of your own known as `Custom(name=...)`. Call it in a plugin module that every server loads.

    `update(w, s, g, v, c)` is a numba function (or a plain one that numba can compile) on one row, all float32: it
    changes the weights w [dim] and the slots s [slots * dim + row_slots, zero at first], given the gradient g [dim],
    the step's values v = [lr, clock] and the constants c of `Custom.constant_values`. Replicas must agree bit for bit:
    add, multiply, divide, square root; no fastmath, no libm (exp, log, pow), no randomness, no state. A raised
    exception ends the server: it can't know what is half done.
    """
    known = _custom.get(name)
    if known is not None:
        if (known.function, known.slots, known.row_slots) == (update, slots, row_slots):
            return
        raise SpecError(f"another optimizer is already registered as {name!r}")
    row = update if isinstance(update, Dispatcher) else njit(error_model="numpy")(update)
    run: Any = updates.run

    def apply(h: Any, keys: Any, grads: Any, v: Any, rows: Any, found: Any) -> Any:
        return run(h, keys, grads, v, rows, found, row)

    kernel: Any = njit(nogil=True, error_model="numpy")(apply)
    load_kernels()
    try:
        _load(kernel, _UPDATE)
    except Exception as error:
        raise SpecError(f"optimizer {name!r} does not compile: {error}") from error
    made = _custom.setdefault(name, _Registered(update, kernel, slots, row_slots))
    if (made.function, made.slots, made.row_slots) != (update, slots, row_slots):  # another thread was faster
        raise SpecError(f"another optimizer is already registered as {name!r}")


def update_kernel(optimizer: Optimizer) -> Update:
    """The compiled kernel of an optimizer. Raises SpecError for a custom one that nobody registered here."""
    if not isinstance(optimizer, Custom):
        kernel: Update = _BUILT_IN[optimizer.kind]
        _load(kernel, _UPDATE)
        return kernel
    known = _custom.get(optimizer.name)
    if known is None:
        names = ", ".join(sorted(_custom)) or "none"
        raise SpecError(
            f"no optimizer is registered as {optimizer.name!r} (registered: {names}); start every server with the "
            f"plugin module that calls elasticps.store.register_optimizer({optimizer.name!r}, ...)"
        )
    if (known.slots, known.row_slots) != (optimizer.slots, optimizer.row_slots):
        raise SpecError(
            f"optimizer {optimizer.name!r} is registered with slots={known.slots}, row_slots={known.row_slots}; "
            f"the table's spec says slots={optimizer.slots}, row_slots={optimizer.row_slots}"
        )
    return known.apply
