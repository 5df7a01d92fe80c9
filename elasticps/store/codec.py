"""What filters make of rows, and back: float32 [n, dim] <-> words [n, words], which have float32's type on the way.

Every row takes the same words, so what is sent of some rows is a slice of what is sent of all. Decoding is bitwise
deterministic: replicas decode each for itself. Whatever the words are, it does not fail.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from elasticps.kernels.hashing import mix64
from elasticps.model.filters import (
    GROUP,
    KKT,
    Around,
    BFloat16,
    CustomFilter,
    Filter,
    Float16,
    Int8,
    RandomK,
    Threshold,
    TopK,
)
from elasticps.store.native import INT, carray, copy, float32_from_bits, kernel, linked, load64, pointer
from elasticps.store.sparse import RANDOM_K, THRESHOLD, TOP_K, draw_rows, largest, spread, spread_rows
from elasticps.store.user_filters import user_filter
from elasticps.store.values import bfloat16_of, float16_of, float16_value

Floats = NDArray[np.float32]

NONE, BFLOAT16, FLOAT16, INT8 = range(4)
PYTHON = -1
"""Codes of what the compiled path does itself, and of what it leaves to Python. Several filters have the address of
what says which: int64 [1 + 4 n], their number, and of each its code, the floats that come to it, those that it leaves,
and where its words begin."""
_CODES: dict[type[Filter], int] = {
    BFloat16: BFLOAT16, Float16: FLOAT16, Int8: INT8, TopK: TOP_K, RandomK: RANDOM_K, Threshold: THRESHOLD,
}  # fmt: skip

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
    """A loop for each scale over arrays of its floats alone: indices that begin at 0 need no check for negative ones,
    without which the loop takes many floats at a time."""
    groups = (dim + GROUP - 1) // GROUP
    scales = carray(pointer(source), (groups,), np.float32)
    for g in range(groups):
        first = g * GROUP
        count = min(dim - first, GROUP)
        scale = scales[g]
        whole = carray(pointer(source + 4 * groups + first), (count,), np.int8)
        x = carray(pointer(target + 4 * first), (count,), np.float32)
        for j in range(count):
            x[j] = np.float32(whole[j]) * scale


@linked(INT, INT, INT, INT, INT, INT)
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
def _decode_row(code: int, source: int, dim: int, target: int) -> None:
    if code == INT8:
        _from_int8(source, dim, target)
        return
    x = carray(pointer(target), (dim,), np.float32)
    halves = carray(pointer(source), (dim,), np.uint16)
    if code == FLOAT16:
        for j in range(dim):
            x[j] = float16_value(np.int64(halves[j]))
    else:
        for j in range(dim):
            x[j] = float32_from_bits(np.int64(halves[j]) << 16)


@linked(INT, INT, INT, INT, INT, INT)
def decode_rows(code: int, source: int, n: int, dim: int, target: int, words: int) -> None:
    """The inverse of `encode_rows`, as far as there is one; `code` may be the address of several."""
    for i in range(n):
        at, row = source + 4 * words * i, target + 4 * dim * i
        if code <= INT8:
            _decode_row(code, at, dim, row)
            continue
        count = load64(code)
        for s in range(count - 1, -1, -1):
            stage = code + 8 + 32 * s
            does, comes, left, begin = load64(stage), load64(stage + 8), load64(stage + 16), at + 4 * load64(stage + 24)
            if left == 0:
                _decode_row(does, begin, comes, row)
                continue
            if s == count - 1:
                copy(row, at + 4 * (words - left), 4 * left)
            spread(does, begin, left, comes, row)


class _Stage(NamedTuple):
    """A filter's part: rows of `dim` floats come to it, `left` go on; its words begin at `at`."""

    filter: Filter
    code: int
    dim: int
    left: int
    at: int

    def encode(self, rows: Floats, out: Floats) -> Floats:
        """Writes the words of rows [n, dim] to theirs in out [n, words]; the floats that go on."""
        (n, words), k, at = out.shape, self.left, _address(out) + 4 * self.at
        if isinstance(self.filter, CustomFilter):
            made = np.zeros((n, self.filter.words(self.dim)), np.uint32)
            user_filter(self.filter.name).encode(rows, made, _constants(self.filter))
            out.view(np.uint32)[:, self.at : self.at + made.shape[1]] = made
            return rows[:, :0]
        if isinstance(self.filter, Threshold):
            return np.where(np.abs(rows) < self.filter.value, np.float32(0), rows)
        if isinstance(self.filter, TopK):
            positions = largest(rows, k)
            out.view(np.uint16)[:, 2 * self.at : 2 * self.at + k] = positions
            return np.take_along_axis(rows, positions, axis=1)
        if isinstance(self.filter, RandomK):
            chosen = np.empty((n, k), np.float32)
            draw_rows(self.filter.seed, _address(rows), n, self.dim, k, at, words, _address(chosen))
            return chosen if self.filter.feedback else chosen * np.float32(self.dim / k)
        encode_rows(self.code, _address(rows), n, self.dim, at, words)
        return rows[:, :0]

    def decode(self, coded: Floats, left: Floats) -> Floats:
        """The rows, from coded [n, words] and what the next filter has decoded."""
        (n, words), at = coded.shape, _address(coded) + 4 * self.at
        rows = np.empty((n, self.dim), np.float32)
        if isinstance(self.filter, CustomFilter):
            made = np.ascontiguousarray(coded.view(np.uint32)[:, self.at :])
            user_filter(self.filter.name).decode(made, rows, _constants(self.filter))
            return rows
        if self.left:
            rows[:, : self.left] = left
            spread_rows(self.code, at, words, n, self.left, self.dim, _address(rows))
        else:
            decode_rows(self.code, at, n, self.dim, _address(rows), words)
        return rows


class Codec:
    """Filters one after another, for rows of `dim` floats; SpecError if one is not known here.

    Those that leave rows alone, and KKT, which only their worker knows of, do nothing here.

    words: of a row on the wire; code: of the compiled path; feedback: whether what they drop of a gradient is kept;
    sifts: whether a gradient that is zero then is not sent."""

    def __init__(self, filters: Sequence[Filter], dim: int) -> None:
        self.dim = left = dim
        filters = [each for each in filters if not isinstance(each, Around | KKT)]
        self.feedback = any(each.feedback for each in filters)
        self.sifts = any(isinstance(each, Threshold) for each in filters)
        self._stages: list[_Stage] = []
        at = 0
        for each in filters:
            if isinstance(each, CustomFilter):
                user_filter(each.name)
            self._stages.append(_Stage(each, _CODES.get(type(each), PYTHON), left, each.left(left), at))
            at += each.words(left)
            left = each.left(left)
        self.words = at + left
        self.code = NONE
        if filters:
            fields = [field for stage in self._stages for field in stage[1:]]
            self._program = np.array([len(filters), *fields], np.int64)
            alone = self._stages[0].code
            self.code = alone if len(filters) == 1 and alone <= INT8 else int(self._program.ctypes.data)
            if self._stages[-1].code == PYTHON:  # which comes last
                self.code = PYTHON

    def encode(self, rows: Floats) -> Floats:
        """Rows [n, dim] as words [n, words]; without filters, themselves."""
        if not self._stages:
            return rows
        out = np.zeros((len(rows), self.words), np.float32)
        for stage in self._stages:
            rows = stage.encode(np.ascontiguousarray(rows), out)
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


def _constants(filter_: CustomFilter) -> Floats:
    return np.array(filter_.constant_values, np.float32)


def _address(array: Floats) -> int:
    return int(array.ctypes.data)


WORDS = 2  # float32 that a digest takes in an answer
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def digests(rows: NDArray[np.float32]) -> NDArray[np.uint64]:
    """64 bits of each of rows float32 [n, dim], C-contiguous: uint64 [n]. Equal bits give equal digests; of two other
    rows equal ones come once in 2^64."""
    out = np.empty(len(rows), np.uint64)
    digest_rows(rows.view(np.uint32), out)
    return out


@kernel
def digest_rows(bits: NDArray[np.uint32], out: NDArray[np.uint64]) -> None:
    """The same of bits [n, dim] into out [n]."""
    for i in range(bits.shape[0]):
        digest = np.uint64(bits.shape[1])
        for j in range(0, bits.shape[1] - 1, 2):
            digest = mix64((digest + _GOLDEN) ^ (np.uint64(bits[i, j]) | np.uint64(bits[i, j + 1]) << np.uint64(32)))
        if bits.shape[1] & 1:
            digest = mix64((digest + _GOLDEN) ^ np.uint64(bits[i, bits.shape[1] - 1]))
        out[i] = digest
