"""Tables in memory: rows, hash index, compiled kernels, optimizers. Knows neither sockets nor asyncio."""

from __future__ import annotations

import elasticps.kernels  # noqa: F401  # before any module that imports numba: says how to get it
from elasticps.store.reductions import register_reduction
from elasticps.store.registry import register_optimizer, warm
from elasticps.store.store import Store, count_bounded, initial_rows
from elasticps.store.table import Table
from elasticps.store.user_filters import register_filter

__all__ = [
    "Store", "Table", "count_bounded", "initial_rows", "register_filter", "register_optimizer", "register_reduction",
    "warm",
]  # fmt: skip
