"""The dumb twin of `elasticps.store.Table`: a dict of rows and the formulas written out in numpy, in float32."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from elasticps.kernels import hashing
from elasticps.model.spec import TableSpec
from elasticps.store import initial_rows

Floats = NDArray[np.float32]
f32 = np.float32


def rounded(w: Floats, dtype: str) -> Floats:
    """w rounded to the dtype and back."""
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return w.astype(np.float16).astype(np.float32)
    if dtype == "bfloat16":
        bits = w.view(np.uint32).astype(np.int64)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)
    return w


def _sgd(w: Floats, s: Floats, g: Floats, v: Floats, c: Floats) -> tuple[Floats, Floats]:
    momentum, decay, nesterov = c
    d = g + decay * w
    if not momentum:
        return w - v[0] * d, s
    s = momentum * s + d
    return w - v[0] * (d + momentum * s if nesterov else s), s


def _adagrad(w: Floats, s: Floats, g: Floats, v: Floats, c: Floats) -> tuple[Floats, Floats]:
    d = g + c[1] * w
    s = s + d * d
    return w - v[0] * d / (np.sqrt(s) + c[0]), s


def _row_adagrad(w: Floats, s: Floats, g: Floats, v: Floats, c: Floats) -> tuple[Floats, Floats]:
    sums = np.zeros(8, np.float32)
    whole = len(g) // 8 * 8
    for j in range(whole):
        sums[j % 8] += g[j] * g[j]
    for j in range(whole, len(g)):
        sums[0] += g[j] * g[j]
    a = sums
    s = s + (((a[0] + a[1]) + (a[2] + a[3])) + ((a[4] + a[5]) + (a[6] + a[7]))) / f32(len(g))
    return w - (v[0] / (np.sqrt(s) + c[0])) * g, s


def _adam(w: Floats, s: Floats, g: Floats, v: Floats, c: Floats) -> tuple[Floats, Floats]:
    first, second = np.split(s[1:], 2)
    t, beta1, beta2 = int(s[0]) + 1, float(c[0]) + float(c[6]), float(c[2]) + float(c[7])
    rate, scale = v[0] * f32(1 / (1 - beta1**t)), f32(1 / np.sqrt(1 - beta2**t))
    d = g + c[5] * w
    first = c[0] * first + c[1] * d
    second = c[2] * second + c[3] * d * d
    return w - rate * first / (np.sqrt(second) * scale + c[4]), np.concatenate(([f32(t)], first, second))


def _adamw(w: Floats, s: Floats, g: Floats, v: Floats, c: Floats) -> tuple[Floats, Floats]:
    still = c.copy()
    still[5] = 0
    moved, s = _adam(np.zeros_like(w), s, g, v, still)
    return w * (f32(1) - v[0] * c[5]) + moved, s


def _ftrl(w: Floats, s: Floats, g: Floats, v: Floats, c: Floats) -> tuple[Floats, Floats]:
    z, n = s[: len(w)], s[len(w) :]
    beta, l1, l2 = c
    total = n + g * g
    root = np.sqrt(total)
    z = z + (g - (root - np.sqrt(n)) * v[0] * w)
    slope = (beta + root) * v[0] + l2
    w = np.where(np.abs(z) <= l1, f32(0), -(z - np.where(z > 0, l1, -l1)) / slope)
    return w, np.concatenate((z, total))


UPDATES: dict[str, Callable[[Floats, Floats, Floats, Floats, Floats], tuple[Floats, Floats]]] = {
    "sgd": _sgd,
    "adagrad": _adagrad,
    "row_adagrad": _row_adagrad,
    "adam": _adam,
    "adamw": _adamw,
    "ftrl": _ftrl,
    "assign": lambda w, s, g, v, c: (g, s),
    "accumulate": lambda w, s, g, v, c: (w + g, s),
}


class TwinTable:
    """Same operations, same bits."""

    def __init__(self, spec: TableSpec, table_id: int, ranges: int) -> None:
        self.spec = spec
        self.salt, self.shift = hashing.table_salt(table_id), hashing.range_shift(ranges)
        self.content: dict[int, tuple[Floats, Floats]] = {}

    def range_of(self, key: int) -> int:
        out = np.empty(1, np.int32)
        hashing.key_ranges(np.array([key]), self.salt, self.shift, out)
        return int(out[0])

    def absent(self, key: int) -> tuple[Floats, Floats]:
        w = initial_rows(self.spec.init, np.array([key]), self.spec.dim, self.spec.dtype)[0]
        fill = self.spec.optimizer.slot_fill
        return w, np.full(self.spec.optimizer.slot_floats(self.spec.dim), fill, np.float32)

    def gather(self, keys: list[int]) -> Floats:
        rows = [self.content.get(key, self.absent(key))[0] for key in keys]
        return np.array(rows, np.float32).reshape(len(keys), self.spec.dim)

    def apply(self, keys: list[int], grads: Floats, step_values: Floats) -> None:
        constants = np.array(self.spec.optimizer.constants(), np.float32)
        for key, g in zip(keys, grads, strict=True):
            w, s = self.content.get(key, self.absent(key))
            w, s = UPDATES[self.spec.optimizer.kind](w, s, g, step_values, constants)
            assert w.dtype == s.dtype == np.float32
            self.content[key] = rounded(w, self.spec.dtype), s

    def put_if_absent(self, keys: list[int], values: Floats) -> int:
        before = len(self.content)
        for key, value in zip(keys, values, strict=True):
            self.content.setdefault(key, (rounded(value, self.spec.dtype), self.absent(key)[1]))
        return len(self.content) - before

    def slots(self, keys: list[int]) -> Floats:
        rows = [self.content.get(key, self.absent(key))[1] for key in keys]
        return np.array(rows, np.float32).reshape(len(keys), self.spec.optimizer.slot_floats(self.spec.dim))

    def delete(self, keys: list[int]) -> int:
        return sum(self.content.pop(key, None) is not None for key in keys)

    def range_keys(self, r: int) -> set[int]:
        return {key for key in self.content if self.range_of(key) == r}

    def drop_range(self, r: int) -> None:
        for key in self.range_keys(r):
            del self.content[key]
