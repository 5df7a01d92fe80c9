"""Optimizer kernels. Each is one function over a row; `apply` runs one of them over a batch.

A row function gets the weights w [dim], the row's slots s [slot_floats], the gradient g [dim], the step's values v and
the optimizer's constants c, all float32, and changes w and s. What it writes is `settled`: to look at the row
again when it has been written takes a seventh of a batch's time. Users register theirs in the same form, without that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elasticps.kernels.hashing import hash_key as _hash_key
from elasticps.store.corrections import corrections, next_update
from elasticps.store.index import ROW_PREFETCH, find
from elasticps.store.native import (
    FLOATS,
    H_CONSTANT_COUNT,
    H_CONSTANTS,
    H_DIM,
    H_DTYPE,
    H_SCRATCH,
    H_SLOT_FLOATS,
    H_SLOTS_AT,
    H_STALE,
    H_STRIDE,
    H_USAGE_AT,
    INT,
    KEYS,
    MATRIX,
    WORDS,
    carray,
    inlined,
    linked,
    pointer,
    prefetch_write,
    settled,
    template,
)
from elasticps.store.stamps import touch
from elasticps.store.usage import clock_of, decay_of, note_use
from elasticps.store.values import pack, unpack

hash_key: Any = _hash_key  # numba integers, which are no np.int64 to a type checker
Floats = NDArray[np.float32]
Keys = NDArray[np.int64]
Header = NDArray[np.int64]

KINDS = ("sgd", "adagrad", "row_adagrad", "adam", "adamw", "ftrl", "assign", "accumulate")
"""The optimizers that `apply` knows, by their number."""

_LINES = 8  # most cache lines of a row that are prefetched for an update: the hardware's own prefetch starts too late
TO_FIND, FOUND, USED = 0, 1, 2  # modes of `apply`
_ZERO, _ONE = np.float32(0), np.float32(1)


@inlined
def prefetched_lines(stride: int) -> int:
    """Cache lines to prefetch of a row, which begins at any multiple of the highest power of two in its stride."""
    return min((stride + 127 - min(stride & -stride, 64)) // 64, _LINES)


@template
def run(
    h: Header, keys: Keys, grads: Floats, v: Floats, rows: Keys, mode: int, update: Callable[..., None], kind: int
) -> int:
    """Applies `update`, given `kind` first, to the row of every key. Returns how many keys have no row; if any, nothing
    was changed.

    mode: with TO_FIND `rows` is scratch; else it holds the addresses already, and the rows were touched. With USED the
    push counts as their use, at their ranges' time: noted beside the update it costs little, afterwards a third of it.
    """
    if mode == TO_FIND:
        missing = find(h, keys, rows)
        if missing:
            return missing
        if h[H_STALE]:
            touch(h, keys, rows)
    n, dim, dtype = keys.shape[0], h[H_DIM], h[H_DTYPE]
    slots_at, slot_floats = h[H_SLOTS_AT], h[H_SLOT_FLOATS]
    lines = prefetched_lines(h[H_STRIDE])
    c = carray(pointer(h[H_CONSTANTS] + 4), (h[H_CONSTANT_COUNT],), np.float32)
    gradients = grads.ctypes.data
    usage_at = h[H_USAGE_AT] if mode == USED else 0
    salt, shift, times, policies = clock_of(h)
    for i in range(min(n, ROW_PREFETCH)):
        for line in range(lines):
            prefetch_write(rows[i] + line * 64)
    for i in range(n):
        if i + ROW_PREFETCH < n:
            for line in range(lines):
                prefetch_write(rows[i + ROW_PREFETCH] + line * 64)
        at = rows[i]
        if dtype != 0:
            at = h[H_SCRATCH]
            unpack(rows[i], carray(pointer(at), (dim,), np.float32), dtype)
        w = carray(pointer(at), (dim,), np.float32)
        s = carray(pointer(rows[i] + slots_at), (slot_floats,), np.float32)
        g = carray(pointer(gradients + i * dim * 4), (dim,), np.float32)
        update(kind, w, s, g, v, c)
        if dtype != 0:
            pack(w, rows[i], dtype)
        if usage_at != 0:
            r = np.int64(hash_key(keys[i], salt) >> shift)
            note_use(rows[i] + usage_at, times[r], decay_of(h, policies, r))
    return 0


@inlined
def sgd_row(w: Floats, s: Floats, g: Floats, v: Floats, c: Floats) -> None:
    """v = [lr]; c = [momentum, weight decay, nesterov]."""
    lr, momentum, decay, nesterov = v[0], c[0], c[1], c[2]
    if momentum == _ZERO:
        if decay == _ZERO:
            for j in range(w.shape[0]):
                w[j] = settled(w[j] - lr * g[j])
        else:
            for j in range(w.shape[0]):
                w[j] = settled(w[j] - lr * (g[j] + decay * w[j]))
    elif nesterov == _ZERO:
        for j in range(w.shape[0]):
            s[j] = settled(momentum * s[j] + (g[j] + decay * w[j]))
            w[j] = settled(w[j] - lr * s[j])
    else:
        for j in range(w.shape[0]):
            d = g[j] + decay * w[j]
            s[j] = settled(momentum * s[j] + d)
            w[j] = settled(w[j] - lr * (d + momentum * s[j]))


@inlined
def adagrad_row(w: Floats, s: Floats, g: Floats, v: Floats, c: Floats) -> None:
    """v = [lr]; c = [eps, weight decay]."""
    lr, eps, decay = v[0], c[0], c[1]
    for j in range(w.shape[0]):
        d = g[j] + decay * w[j]
        s[j] = settled(s[j] + d * d)
        w[j] = settled(w[j] - lr * d / (np.sqrt(s[j]) + eps))


@inlined
def row_adagrad_row(w: Floats, s: Floats, g: Floats, v: Floats, c: Floats) -> None:
    """v = [lr]; c = [eps]. The sum of squares runs in eight fixed lanes, which a compiler may take side by side."""
    n = w.shape[0]
    a0 = a1 = a2 = a3 = a4 = a5 = a6 = a7 = _ZERO
    for j in range(0, n - 7, 8):
        a0 += g[j] * g[j]
        a1 += g[j + 1] * g[j + 1]
        a2 += g[j + 2] * g[j + 2]
        a3 += g[j + 3] * g[j + 3]
        a4 += g[j + 4] * g[j + 4]
        a5 += g[j + 5] * g[j + 5]
        a6 += g[j + 6] * g[j + 6]
        a7 += g[j + 7] * g[j + 7]
    for j in range(n & -8, n):
        a0 += g[j] * g[j]
    s[0] = settled(s[0] + (((a0 + a1) + (a2 + a3)) + ((a4 + a5) + (a6 + a7))) / np.float32(n))
    rate = v[0] / (np.sqrt(s[0]) + c[0])
    for j in range(n):
        w[j] = settled(w[j] - rate * g[j])


@inlined
def adam_row(w: Floats, s: Floats, g: Floats, v: Floats, c: Floats) -> None:
    """v = [lr]; c = [b1, 1 - b1, b2, 1 - b2, eps, weight decay, …], see `corrections`; s: updates, both moments."""
    n = w.shape[0]
    b1, a1, b2, a2, eps, decay = c[0], c[1], c[2], c[3], c[4], c[5]
    s[0] = t = next_update(s[0])
    correction, scale = corrections(c, t)
    rate = v[0] * correction
    first, second = s[1 : n + 1], s[n + 1 : 2 * n + 1]
    for j in range(n):
        d = g[j] + decay * w[j]
        first[j] = settled(b1 * first[j] + a1 * d)
        second[j] = settled(b2 * second[j] + a2 * d * d)
        w[j] = settled(w[j] - rate * first[j] / (np.sqrt(second[j]) * scale + eps))


@inlined
def adamw_row(w: Floats, s: Floats, g: Floats, v: Floats, c: Floats) -> None:
    """Like Adam's, but that weights decay by themselves."""
    n = w.shape[0]
    b1, a1, b2, a2, eps, shrink = c[0], c[1], c[2], c[3], c[4], _ONE - v[0] * c[5]
    s[0] = t = next_update(s[0])
    correction, scale = corrections(c, t)
    rate = v[0] * correction
    first, second = s[1 : n + 1], s[n + 1 : 2 * n + 1]
    for j in range(n):
        first[j] = settled(b1 * first[j] + a1 * g[j])
        second[j] = settled(b2 * second[j] + a2 * g[j] * g[j])
        w[j] = settled(w[j] * shrink - rate * first[j] / (np.sqrt(second[j]) * scale + eps))


@inlined
def ftrl_row(w: Floats, s: Floats, g: Floats, v: Floats, c: Floats) -> None:
    """v = [1 / alpha]; c = [beta, l1, l2]; slots z, n of McMahan et al., Algorithm 1."""
    size = w.shape[0]
    inverse, beta, l1, l2 = v[0], c[0], c[1], c[2]
    z, n = s[:size], s[size : 2 * size]
    for j in range(size):
        total = n[j] + g[j] * g[j]
        root = np.sqrt(total)
        z[j] = settled(z[j] + (g[j] - (root - np.sqrt(n[j])) * inverse * w[j]))
        n[j] = settled(total)
        slope = (beta + root) * inverse + l2
        w[j] = settled(_ZERO if abs(z[j]) <= l1 else -(z[j] - (l1 if z[j] > _ZERO else -l1)) / slope)


@inlined
def assign_row(w: Floats, s: Floats, g: Floats, v: Floats, c: Floats) -> None:
    """The gradient's place holds the new row."""
    for j in range(w.shape[0]):
        w[j] = settled(g[j])


@inlined
def accumulate_row(w: Floats, s: Floats, g: Floats, v: Floats, c: Floats) -> None:
    """The gradient's place holds what to add."""
    for j in range(w.shape[0]):
        w[j] = settled(w[j] + g[j])


@inlined
def _row(kind: int, w: Floats, s: Floats, g: Floats, v: Floats, c: Floats) -> None:
    if kind == 0:
        sgd_row(w, s, g, v, c)
    elif kind == 1:
        adagrad_row(w, s, g, v, c)
    elif kind == 2:
        row_adagrad_row(w, s, g, v, c)
    elif kind == 3:
        adam_row(w, s, g, v, c)
    elif kind == 4:
        adamw_row(w, s, g, v, c)
    elif kind == 5:
        ftrl_row(w, s, g, v, c)
    elif kind == 6:
        assign_row(w, s, g, v, c)
    else:
        accumulate_row(w, s, g, v, c)


@linked(INT, WORDS, KEYS, MATRIX, FLOATS, WORDS, INT)
def apply(kind: int, h: Header, keys: Keys, grads: Floats, v: Floats, rows: Keys, mode: int) -> int:
    """`run` with the optimizer of that number in KINDS."""
    return run(h, keys, grads, v, rows, mode, _row, kind)
