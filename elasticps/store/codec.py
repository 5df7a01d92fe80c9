"""What filters make of rows, and back: float32 [n, dim] <-> words [n, words], which have float32's type on the way.

Every row takes the same words, so what is sent of some rows is a slice of what is sent of all. Decoding is bitwise
deterministic: replicas decode each for itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from elasticps.filters import GROUP, BFloat16, Filter, Float16, Int8
from elasticps.store.native import carray, float32_from_bits, kernel, pointer
from elasticps.store.values import bfloat16_of, float16_of, float16_value

Floats = NDArray[np.float32]

NONE, BFLOAT16, FLOAT16, INT8 = range(4)
PYTHON = -1
"""Codes of what the compiled path does itself, and of what it leaves to Python."""
_CODES: dict[type[Filter], int] = {BFloat16: BFLOAT16, Float16: FLOAT16, Int8: INT8}

_MOST_BFLOAT16, _MOST_FLOAT16 = np.float32(3.3895313892515355e38), np.float32(65504)
_INFINITY, _NAN = np.float32(np.inf), np.float32(np.nan)
_STEPS = np.float32(127)


@kernel
def _within(x: np.float32, most: np.float32) -> np.float32:
    """x, or the nearest that is no larger than `most`; infinity stays, so that it is noticed where it arrives."""
    if most < abs(x) < _INFINITY:
        return most if x > 0 else -most
    return x


@kernel
def _to_int8(source: int, dim: int, target: int) -> None:
    """Scales, then the numbers, filled up to whole words."""
    numbers = target + 4 * ((dim + GROUP - 1) // GROUP)
    scales = carray(pointer(target), ((dim + GROUP - 1) // GROUP,), np.float32)
    whole = carray(pointer(numbers), ((dim + 3) & ~3,), np.int8)
    x = carray(pointer(source), (dim,), np.float32)
    for g in range(scales.shape[0]):
        first, end = g * GROUP, min((g + 1) * GROUP, dim)
        most, finite = np.float32(0), True
        for j in range(first, end):
            finite = finite and abs(x[j]) < _INFINITY
            most = max(most, abs(x[j]))
        scale = most / _STEPS
        scales[g] = scale if finite else _NAN
        for j in range(first, end):
            whole[j] = 0
        if finite and scale > 0:
            for j in range(first, end):
                whole[j] = np.int8(min(max(np.rint(x[j] / scale), -_STEPS), _STEPS))
    for j in range(dim, whole.shape[0]):
        whole[j] = 0


@kernel
def _from_int8(source: int, dim: int, target: int) -> None:
    numbers = source + 4 * ((dim + GROUP - 1) // GROUP)
    scales = carray(pointer(source), ((dim + GROUP - 1) // GROUP,), np.float32)
    whole = carray(pointer(numbers), (dim,), np.int8)
    x = carray(pointer(target), (dim,), np.float32)
    for g in range(scales.shape[0]):
        scale = scales[g]
        for j in range(g * GROUP, min((g + 1) * GROUP, dim)):
            x[j] = np.float32(whole[j]) * scale


@kernel
def encode_rows(code: int, source: int, n: int, dim: int, target: int, words: int) -> None:
    """n rows of `dim` floats at an address, to another one, `words` words from one row to the next."""
    for i in range(n):
        at = target + 4 * words * i
        if code == INT8:
            _to_int8(source + 4 * dim * i, dim, at)
            continue
        x = carray(pointer(source + 4 * dim * i), (dim,), np.float32)
        halves = carray(pointer(at), ((dim + 1) & ~1,), np.uint16)
        halves[halves.shape[0] - 1] = 0
        if code == FLOAT16:
            for j in range(dim):
                halves[j] = np.uint16(float16_of(_within(x[j], _MOST_FLOAT16)))
        else:
            for j in range(dim):
                halves[j] = np.uint16(bfloat16_of(_within(x[j], _MOST_BFLOAT16)))


@kernel
def decode_rows(code: int, source: int, n: int, dim: int, target: int, words: int) -> None:
    """The inverse of `encode_rows`, as far as there is one."""
    for i in range(n):
        at = source + 4 * words * i
        if code == INT8:
            _from_int8(at, dim, target + 4 * dim * i)
            continue
        x = carray(pointer(target + 4 * dim * i), (dim,), np.float32)
        halves = carray(pointer(at), (dim,), np.uint16)
        if code == FLOAT16:
            for j in range(dim):
                x[j] = float16_value(np.int64(halves[j]))
        else:
            for j in range(dim):
                x[j] = float32_from_bits(np.int64(halves[j]) << 16)


class _Stage(NamedTuple):
    """A filter's part: rows of `dim` floats come to it, `left` go on; its words begin at `at`."""

    filter: Filter
    dim: int
    left: int
    at: int

    def encode(self, rows: Floats, out: Floats) -> Floats:
        """Writes the words of rows [n, dim] to theirs in out [n, words]; the floats that go on."""
        n, words = out.shape
        encode_rows(_CODES[type(self.filter)], _address(rows), n, self.dim, _address(out) + 4 * self.at, words)
        return rows[:, :0]

    def decode(self, coded: Floats, left: Floats) -> Floats:
        """The rows, from coded [n, words] and what the next filter has decoded."""
        n, words = coded.shape
        rows = np.empty((n, self.dim), np.float32)
        decode_rows(_CODES[type(self.filter)], _address(coded) + 4 * self.at, n, self.dim, _address(rows), words)
        return rows


class Codec:
    """Filters one after another, for rows of `dim` floats. words: of a row on the wire; code: of the compiled path;
    feedback: whether what they drop of a gradient is kept."""

    def __init__(self, filters: Sequence[Filter], dim: int) -> None:
        self.dim = left = dim
        self.feedback = any(each.feedback for each in filters)
        self._stages: list[_Stage] = []
        at = 0
        for each in filters:
            self._stages.append(_Stage(each, left, each.left(left), at))
            at += each.words(left)
            left = each.left(left)
        self.words = at + left
        self.code = NONE
        if filters:
            self.code = _CODES.get(type(filters[0]), PYTHON) if len(filters) == 1 else PYTHON

    def encode(self, rows: Floats) -> Floats:
        """Rows [n, dim] as words [n, words]; without filters, themselves."""
        if not self._stages:
            return rows
        out, rows = np.empty((len(rows), self.words), np.float32), np.ascontiguousarray(rows)
        for stage in self._stages:
            rows = stage.encode(rows, out)
        if rows.shape[1]:
            out[:, -rows.shape[1] :] = rows
        return out

    def decode(self, coded: Floats) -> Floats:
        """What `encode` was given, but for what is lost by that."""
        if not self._stages:
            return coded
        coded = np.ascontiguousarray(coded)
        rows = coded[:, self.words - self._stages[-1].left :]
        for stage in reversed(self._stages):
            rows = stage.decode(coded, rows)
        return rows


def _address(array: Floats) -> int:
    return int(array.ctypes.data)
