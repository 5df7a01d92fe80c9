"""The bytes of a row in memory, and kernels that split a row into the columns of a file, or write one."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from elasticps.model.spec import TableSpec
from elasticps.store.index import PREFETCH_LINES, ROW_PREFETCH, find
from elasticps.store.native import (
    ADDRESS,
    H_DIM,
    H_SLOTS_AT,
    H_STALE,
    H_STRIDE,
    KEYS,
    MATRIX,
    STAMP_BIT,
    WORDS,
    carray,
    copy,
    kernel,
    linked,
    pointer,
    prefetch,
    prefetch_write,
)
from elasticps.store.values import blank_row, write_weights


class RowLayout(NamedTuple):
    """A row in bytes: weights in the spec's dtype, float32 slots from a multiple of 4 on, usage (words of 4 bytes, see
    `elasticps.store.usage`) where the table keeps it, zeros to a multiple of 8. usage_at: 0 if there is none."""

    weight_bytes: int
    slots_at: int
    stride: int
    usage_at: int = 0

    @classmethod
    def of(cls, spec: TableSpec) -> RowLayout:
        """The layout of a table's rows."""
        weight_bytes = spec.dim * (4 if spec.dtype == "float32" else 2)
        slots_at = -(-weight_bytes // 4) * 4
        usage_at = slots_at + 4 * spec.optimizer.slot_floats(spec.dim)
        end = usage_at + 4 * spec.usage_floats
        return cls(weight_bytes, slots_at, -(-end // 8) * 8, usage_at if spec.usage_floats else 0)


@kernel
def split(words: NDArray[np.int64], columns: NDArray[np.int64], base: int, stamps: NDArray[np.int32]) -> None:
    """Copies each column of the rows to its target, and writes the rows' stamps. words: of the rows; columns: for each
    its target's address, its first byte in a row, its bytes."""
    for i in range(words.shape[0]):
        if i + ROW_PREFETCH < words.shape[0]:
            for line in range(PREFETCH_LINES):
                prefetch((words[i + ROW_PREFETCH] & ADDRESS) + 64 * line)
        row = words[i] & ADDRESS
        for c in range(0, columns.shape[0], 3):
            copy(columns[c] + i * columns[c + 2], row + columns[c + 1], columns[c + 2])
        stamps[i] = np.int32(base + (words[i] >> STAMP_BIT))


@kernel
def write_slots(h: NDArray[np.int64], slots: NDArray[np.float32], rows: NDArray[np.int64]) -> None:
    """Writes the slots of rows, float32 [n, slot_floats]."""
    size = 4 * slots.shape[1]
    for i in range(slots.shape[0]):
        copy(rows[i] + h[H_SLOTS_AT], slots.ctypes.data + i * size, size)


@linked(WORDS, KEYS, MATRIX, WORDS)
def overwrite_found(
    h: NDArray[np.int64], keys: NDArray[np.int64], values: NDArray[np.float32], rows: NDArray[np.int64]
) -> bool:
    """Gives the rows of keys [n] these weights [n, dim], if all have a row with the newest stamp; else changes nothing,
    and returns False. Of equal keys the last counts. Of a table whose rows are float32 alone. rows: scratch."""
    n, size, source = keys.shape[0], 4 * h[H_DIM], np.int64(values.ctypes.data)
    if find(h, carray(pointer(keys.ctypes.data), (n,), np.int64), rows) != 0 or h[H_STALE] != 0:
        return False
    for i in range(n + ROW_PREFETCH):
        if i < n:
            for line in range((size + 63) // 64):
                prefetch_write(rows[i] + 64 * line)
        if i >= ROW_PREFETCH:
            copy(rows[i - ROW_PREFETCH], source + size * (i - ROW_PREFETCH), size)
    return True


@kernel
def overwrite(h: NDArray[np.int64], values: NDArray[np.float32], rows: NDArray[np.int64]) -> None:
    """Gives rows these weights, and slots as new rows have them."""
    n, lines = values.shape[0], min((h[H_STRIDE] + 63) // 64, PREFETCH_LINES)
    for i in range(n):
        if i + ROW_PREFETCH < n:
            for line in range(lines):
                prefetch_write(rows[i + ROW_PREFETCH] + 64 * line)
        blank_row(h, rows[i])
        write_weights(h, rows[i], values[i])
