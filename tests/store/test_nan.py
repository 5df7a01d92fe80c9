"""NaN has the same bits in every replica, whatever CPU produced or passed it on."""

from __future__ import annotations

import numpy as np
import pytest

from elasticps.model.optimizers import (
    FTRL,
    SGD,
    Accumulate,
    Adagrad,
    Adam,
    AdamW,
    Assign,
    Custom,
    RowAdagrad,
    ServerOptimizer,
)  # fmt: skip
from elasticps.model.spec import TableSpec
from elasticps.store import Table, register_optimizer
from elasticps.store.updates import Floats
from elasticps.store.values import all_finite

DIM = 19  # vector loops and what is left over
CANONICAL = 0x7FC00000
STRANGE = np.array([0x7FC00001, 0xFFC12345, 0x7F800001, 0xFFFFFFFF, 0xFFC00000], np.uint32).view(np.float32)
OPTIMIZERS = [
    SGD(lr=0.1), SGD(lr=0.1, weight_decay=0.1), SGD(lr=0.1, momentum=0.9), SGD(lr=0.1, momentum=0.9, nesterov=True),
    Adagrad(lr=0.1), RowAdagrad(lr=0.1), Adam(lr=0.1), AdamW(lr=0.1), FTRL(lr=0.1), Assign(), Accumulate(),
    Custom("mine", lr=0.1, slots=1),
]  # fmt: skip


def mine(w: Floats, s: Floats, g: Floats, v: Floats, c: Floats) -> None:
    for j in range(len(w)):
        s[j] = g[j]
        w[j] -= v[0] * g[j]


def pushed(optimizer: ServerOptimizer, dtype: str, strange: np.ndarray) -> Table:
    if isinstance(optimizer, Custom):
        register_optimizer(optimizer.name, mine, slots=optimizer.slots)
    table = Table(TableSpec("t", DIM, optimizer, dtype=dtype), 3, 2)
    values = np.full(optimizer.step_floats, 0.1, np.float32)
    keys = np.arange(10)
    grads = np.linspace(-1, 1, 10 * DIM, dtype=np.float32).reshape(10, DIM)
    grads.view(np.uint32)[::2, ::3] = strange
    for _ in range(2):  # the second step hands on what the first has made
        table.apply(keys, grads, values)
    return table


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: f"{optimizer.kind}")
def test_every_nan_has_the_same_bits(optimizer: ServerOptimizer, dtype: str) -> None:
    digests = set()
    for strange in STRANGE.view(np.uint32):
        table = pushed(optimizer, dtype, strange)
        digests.add((table.digest_range(0), table.digest_range(1)))
        if dtype == "float32":
            words = np.concatenate([table.dump_range(r)[1].view(np.uint32).ravel() for r in (0, 1)])
            strangers = words[(words & 0x7FFFFFFF) > 0x7F800000]
            assert len(strangers)
            assert set(strangers.tolist()) == {CANONICAL}
    assert len(digests) == 1


def test_infinities_and_numbers_are_unchanged() -> None:
    table = Table(TableSpec("t", DIM, Assign()), 3, 2)
    row = np.array([np.inf, -np.inf, 0.0, -0.0, 1e-45, 3.4e38, *range(DIM - 6)], np.float32)
    table.apply(np.array([5]), row[None], np.empty(0, np.float32))
    out = np.empty((1, DIM), np.float32)
    table.gather(np.array([5]), out)
    assert out[0].tobytes() == row.tobytes()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, STRANGE[2]])
def test_finite_rows_are_told_from_others(bad: float) -> None:
    values = np.array([0.0, -0.0, 3.4e38, -1e-45] * 9, np.float32)
    assert all_finite(values.ctypes.data, len(values))
    assert all_finite(values.ctypes.data, 0)
    for at in (0, 17, len(values) - 1):
        other = values.copy()
        other[at] = bad
        assert not all_finite(other.ctypes.data, len(other))
