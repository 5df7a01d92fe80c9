"""Applies sweeps to whole rows that lie in no table: those of a checkpoint older than the sweeps."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from elasticps.kernels import hashing
from elasticps.model.spec import DTYPES, TableSpec
from elasticps.store import intervals, usage
from elasticps.store import native as field
from elasticps.store.eviction import Measure, Sweep
from elasticps.store.layout import RowLayout


class RowUsage:
    """Measures whole rows of a table that keeps their usage, with the kernels that servers measure theirs with."""

    def __init__(self, spec: TableSpec, table_id: int) -> None:
        row = RowLayout.of(spec)
        self._stride = row.stride
        self._scratch = np.empty(spec.dim, np.float32)
        h = self._header = np.zeros(field.HEADER_SIZE, np.int64)
        h[field.H_SALT] = hashing.table_salt(table_id).astype(np.int64)
        h[field.H_DIM], h[field.H_DTYPE] = spec.dim, DTYPES.index(spec.dtype)
        h[field.H_SCRATCH] = self._scratch.ctypes.data
        h[field.H_USAGE_AT], h[field.H_USAGE_FLOATS] = row.usage_at, spec.usage_floats

    def measure(self, rows: NDArray[np.uint8], what: Measure, now: int = 0, decay: float = 0.0) -> NDArray[np.int64]:
        """Ranks of rows, uint8 [n, stride], as `usage.measure` gives them: int64 [n]."""
        rows = np.ascontiguousarray(rows)
        ranks = np.empty(len(rows), np.int64)
        usage.measure(self._header, self._addresses(rows), int(what), now, decay, ranks)
        return ranks

    def read(self, rows: NDArray[np.uint8]) -> NDArray[np.uint32]:
        """The usage of rows, uint8 [n, stride]: uint32 [n, 3], see `usage.read_usage`."""
        rows = np.ascontiguousarray(rows)
        out = np.empty((len(rows), usage.USAGE), np.uint32)
        usage.read_usage(self._header, self._addresses(rows), out)
        return out

    def swept(
        self, keys: NDArray[np.int64], rows: NDArray[np.uint8], sweeps: Iterable[Sweep]
    ) -> NDArray[np.bool_]:  # fmt: skip
        """Which of rows, uint8 [n, stride], of keys, int64 [n], go by one of the sweeps: bool [n]."""
        rows, gone = np.ascontiguousarray(rows), np.zeros(len(keys), np.bool_)
        if not len(keys):
            return gone
        hashes = np.empty(len(keys), np.int64)
        intervals.hashes_of(self._header, np.ascontiguousarray(keys), hashes)
        ranks: dict[tuple[Measure, int, float], NDArray[np.int64]] = {}
        for _, by, low, high in sweeps:
            how = by.measure, by.now, by.decay
            if how not in ranks:
                ranks.clear()  # sweeps in order mostly compare the same: more would be memory for nothing
                ranks[how] = self.measure(rows, *how)
            gone |= by.chosen(keys, ranks[how]) & (low <= hashes) & (hashes < high)
        return gone

    def _addresses(self, rows: NDArray[np.uint8]) -> NDArray[np.int64]:
        return rows.ctypes.data + self._stride * np.arange(len(rows), dtype=np.int64)
