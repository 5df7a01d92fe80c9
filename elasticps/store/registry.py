"""Lists all kernels with the argument types they are compiled for, and registers users' optimizers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from numba import njit, types
from numba.core.compiler_lock import global_compiler_lock
from numba.core.dispatcher import Dispatcher

from elasticps.errors import SpecError
from elasticps.kernels import compiled_once
from elasticps.model.spec import Custom, ServerOptimizer
from elasticps.store import admission, codec, index, intervals, layout, reductions, sparse, stamps, updates, usage
from elasticps.store.native import FLOATS, INT, KEYS, MATRIX, WORDS, signature_of
from elasticps.store.values import canonical

# One signature each. Anything else, like int32 keys or a strided array, is a TypeError: no call ever compiles.
_UPDATE = (WORDS, KEYS, MATRIX, FLOATS, WORDS, INT)
_SIGNATURES: tuple[tuple[Any, tuple[Any, ...]], ...] = (
    (index.find, signature_of(index.find)),
    (index.insert, signature_of(index.insert)),
    (layout.overwrite, (WORDS, MATRIX, WORDS)),
    (index.regrow, (WORDS, INT, INT, INT)),
    (index.free_rows, (WORDS, WORDS)),
    (index.remove, (WORDS, KEYS)),
    (index.copy_slots, (WORDS, WORDS, types.Array(types.float32, 2, "C"))),
    (index.copy_out, (WORDS, types.Array(types.uint64, 2, "C"))),
    (index.copy_in, (WORDS, types.Array(types.uint64, 2, "C", readonly=True, aligned=False))),
    (index.digest, (WORDS, WORDS, WORDS)),
    (intervals.first_foreign, (WORDS, KEYS, types.Array(types.boolean, 1, "C", readonly=True))),
    (intervals.first_misplaced, (WORDS, KEYS, WORDS)),
    (intervals.first_at, (WORDS, KEYS, WORDS, INT)),
    (intervals.select, (WORDS, KEYS, WORDS, WORDS)),
    (index.sweep, (WORDS, INT)),
    (index.keep_slab, (WORDS,)),
    (index.move_out, (WORDS, INT)),
    (intervals.ranges_of, (WORDS, KEYS, WORDS)),
    (intervals.hashes_of, (WORDS, KEYS, WORDS)),
    (intervals.list_interval, (WORDS, INT, INT, INT, WORDS, WORDS)),
    (intervals.digest_interval, (WORDS, INT, INT, INT)),
    (stamps.touch, signature_of(stamps.touch)),
    (stamps.set_stamps, (WORDS, KEYS, types.Array(types.uint16, 1, "C", readonly=True, aligned=False))),
    (stamps.clear_stamps, (WORDS, INT)),
    (stamps.list_parts, (WORDS, INT, INT, WORDS, WORDS)),
    (stamps.choose, (WORDS, INT, INT, INT, WORDS, WORDS)),
    (stamps.count_retained, (WORDS,)),
    (stamps.pass_parts, (WORDS, WORDS, INT, WORDS, WORDS)),
    (layout.write_slots, (WORDS, MATRIX, WORDS)),
    (layout.split, (WORDS, WORDS, INT, types.Array(types.int32, 1, "C"))),
    (index.gather_to, signature_of(index.gather_to)),
    (index.gather, (WORDS, KEYS, types.Array(types.float32, 2, "C", aligned=False), WORDS)),
    (codec.digest_rows, (types.Array(types.uint32, 2, "C", readonly=True), types.Array(types.uint64, 1, "C"))),
    (codec.encode_rows, signature_of(codec.encode_rows)),
    (codec.decode_rows, signature_of(codec.decode_rows)),
    (updates.apply, signature_of(updates.apply)),
    (sparse.spread_rows, (INT,) * 7),
    (sparse.draw_rows, (INT,) * 8),
)
_LIFECYCLE: tuple[tuple[Any, tuple[Any, ...]], ...] = (
    (usage.use, signature_of(usage.use)),
    (usage.begin, (WORDS, KEYS, WORDS, FLOATS)),
    (usage.read_usage, (WORDS, WORDS, types.Array(types.uint32, 2, "C"))),
    (usage.measure, (WORDS, WORDS, INT, INT, types.float64, WORDS)),
    (usage.ties, (KEYS, WORDS)),
    (admission.admit, signature_of(admission.admit)),
    (admission.remove_admitted, signature_of(admission.remove_admitted)),
    (admission.spare, signature_of(admission.spare)),
    (admission.foresee, (WORDS, KEYS, INT, INT, WORDS)),
    (admission.remove, (WORDS, KEYS)),
    (admission.put, (WORDS, KEYS, KEYS, INT)),
)
Update = Callable[..., int]


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


def load_lifecycle() -> None:
    """Compiles, or loads from the cache, what a table needs that keeps usage."""
    for kernel, signature in _LIFECYCLE:
        _load(kernel, signature)


def warm() -> None:
    """Compiles, or loads from the cache, every built-in kernel: afterwards no operation waits for a compiler."""
    with compiled_once(__file__):
        load_kernels()
        load_lifecycle()
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

    @njit(error_model="numpy")
    def one(kind: Any, w: Any, s: Any, g: Any, v: Any, c: Any) -> None:
        row(w, s, g, v, c)
        canonical(w.ctypes.data, w.shape[0])
        canonical(s.ctypes.data, s.shape[0])

    def apply(h: Any, keys: Any, grads: Any, v: Any, rows: Any, mode: Any) -> Any:
        return run(h, keys, grads, v, rows, mode, one, 0)

    kernel: Any = njit(nogil=True, error_model="numpy")(apply)
    load_kernels()
    try:
        _load(kernel, _UPDATE)
    except Exception as error:
        raise SpecError(f"optimizer {name!r} does not compile: {error}") from error
    made = _custom.setdefault(name, _Registered(update, kernel, slots, row_slots))
    if (made.function, made.slots, made.row_slots) != (update, slots, row_slots):  # another thread was faster
        raise SpecError(f"another optimizer is already registered as {name!r}")


def update_kernel(optimizer: ServerOptimizer) -> Update:
    """The compiled kernel of an optimizer. Raises SpecError for a custom one that nobody registered here."""
    if not isinstance(optimizer, Custom):
        _load(updates.apply, signature_of(updates.apply))
        return partial(updates.apply, updates.KINDS.index(optimizer.kind))
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
