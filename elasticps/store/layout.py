"""Where in a row is what."""

from __future__ import annotations

from typing import NamedTuple

from elasticps.model.spec import TableSpec


class RowLayout(NamedTuple):
    """A row in bytes: weights in the spec's dtype, float32 slots from a multiple of 4 on, zeros to a multiple of 8."""

    weight_bytes: int
    slots_at: int
    stride: int

    @classmethod
    def of(cls, spec: TableSpec) -> RowLayout:
        """That of a table's rows."""
        weight_bytes = spec.dim * (4 if spec.dtype == "float32" else 2)
        slots_at = -(-weight_bytes // 4) * 4
        end = slots_at + 4 * spec.optimizer.slot_floats(spec.dim)
        return cls(weight_bytes, slots_at, -(-end // 8) * 8)
