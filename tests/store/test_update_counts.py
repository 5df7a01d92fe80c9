"""Adam corrects a row's bias by the row's own updates, whatever the clock of the worker that pushes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from elasticps.errors import SpecError
from elasticps.model import spec
from elasticps.model.spec import TableSpec
from elasticps.store import Table, register_optimizer
from elasticps.store.layout import RowLayout

DIM = 7
KEYS = np.arange(12, dtype=np.int64) * 31 - 100
LATE = 5_000  # the clock of a worker that makes a table
Floats = NDArray[np.float32]
Torch = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]

PAIRS: list[tuple[spec.ServerOptimizer, Torch]] = [
    (spec.Adam(0.01), lambda p: torch.optim.Adam(p, lr=0.01)),
    (spec.Adam(0.01, weight_decay=0.1), lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1)),
    (spec.AdamW(0.01, weight_decay=0.1), lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1)),
    (
        spec.Adam(0.01, betas=(0.5, 0.99999)),  # nowhere near 1 where the table of corrections ends
        lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.5, 0.99999)),
    ),
    (spec.Adam(0.01, betas=(0.0, 0.9)), lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.0, 0.9))),
]
each_pair = pytest.mark.parametrize(("ours", "theirs"), PAIRS, ids=lambda o: getattr(o, "kind", ""))


def gradient(step: int, n: int = len(KEYS)) -> Floats:
    return np.random.default_rng(step).standard_normal((n, DIM)).astype(np.float32)


def a_table(optimizer: spec.ServerOptimizer, number: int = 3) -> Table:
    return Table(TableSpec("t", DIM, optimizer, spec.Normal(std=0.5, seed=2)), number, 8)


def weights(table: Table, keys: NDArray[np.int64] = KEYS) -> Floats:
    rows = np.empty((len(keys), DIM), np.float32)
    table.gather(keys, rows)
    return rows


def slots(table: Table, keys: NDArray[np.int64] = KEYS) -> Floats:
    found = np.empty((len(keys), table.slot_floats), np.float32)
    table.read_slots(keys, found)
    return found


class Reference:
    """Each row as a parameter of torch's, with an optimizer of its own."""

    def __init__(self, theirs: Torch, rows: Floats) -> None:
        self.rows = [torch.nn.Parameter(torch.from_numpy(row.copy())) for row in rows]
        self.optimizers = [theirs([row]) for row in self.rows]

    def step(self, touched: Any, grads: Floats) -> None:
        for i, grad in zip(touched, grads, strict=True):
            self.rows[i].grad = torch.from_numpy(grad)
            self.optimizers[i].step()

    @property
    def weights(self) -> Floats:
        found: Floats = torch.stack(list(self.rows)).detach().numpy()
        return found


@each_pair
def test_a_table_made_late_trains_as_in_torch(ours: spec.ServerOptimizer, theirs: Torch) -> None:
    table = a_table(ours)
    reference = Reference(theirs, weights(table))
    for step in range(1, 31):
        table.apply(KEYS, gradient(step), ours.step_values(LATE + step))
        reference.step(range(len(KEYS)), gradient(step))
        np.testing.assert_allclose(weights(table), reference.weights, rtol=1e-4, atol=2e-6)


@each_pair
def test_a_row_touched_late_or_seldom_trains_as_in_torch(ours: spec.ServerOptimizer, theirs: Torch) -> None:
    table = a_table(ours)
    reference = Reference(theirs, weights(table))
    for step in range(1, 61):
        touched = [i for i in range(len(KEYS)) if step % (i + 1) == 0 and step > 3 * i]
        table.apply(KEYS[touched], gradient(step, len(touched)), ours.step_values(step))
        reference.step(touched, gradient(step, len(touched)))
    np.testing.assert_allclose(weights(table), reference.weights, rtol=1e-4, atol=5e-6)
    for i, optimizer in enumerate(reference.optimizers):
        assert slots(table)[i, 0] == float(optimizer.state[reference.rows[i]]["step"])


def test_the_first_steps_of_a_late_table_equal_those_of_an_early_one() -> None:
    """A constant gradient moves each weight by the rate in each step: torch's 0.01, where clocks gave 0.0315."""
    table, optimizer = a_table(spec.Adam(0.01)), spec.Adam(0.01)
    before = weights(table)
    for step in range(1, 11):
        table.apply(KEYS, np.ones((len(KEYS), DIM), np.float32), optimizer.step_values(LATE + step))
        np.testing.assert_allclose(weights(table) - before, -0.01 * step, rtol=1e-5, atol=1e-7)


def test_a_loaded_row_starts_its_count_again_unless_loaded_with_slots() -> None:
    optimizer = spec.Adam(0.01)
    table, other = a_table(optimizer), a_table(optimizer, 9)
    for step in range(1, 21):
        table.apply(KEYS, gradient(step), optimizer.step_values(step))
    other.put(KEYS, np.concatenate([weights(table), slots(table)], axis=1))
    reference = Reference(lambda p: torch.optim.Adam(p, lr=0.01), weights(table))
    table.apply(KEYS, gradient(21), optimizer.step_values(900))
    other.apply(KEYS, gradient(21), optimizer.step_values(1))
    assert weights(other).tobytes() == weights(table).tobytes()
    table.put(KEYS, reference.weights)
    for step in range(1, 6):
        table.apply(KEYS, gradient(step), optimizer.step_values(900 + step))
        reference.step(range(len(KEYS)), gradient(step))
    np.testing.assert_allclose(weights(table), reference.weights, rtol=1e-4, atol=2e-6)


def test_a_range_that_moves_takes_its_counts_along() -> None:
    optimizer = spec.Adam(0.01)
    here, there = a_table(optimizer), a_table(optimizer)
    for step in range(1, 4):
        here.apply(KEYS, gradient(step), optimizer.step_values(step))
    for r in range(8):
        there.load_range(r, *here.dump_range(r))
    for table in (here, there):
        table.apply(KEYS, gradient(4), optimizer.step_values(77))
    assert [here.digest_range(r) for r in range(8)] == [there.digest_range(r) for r in range(8)]
    assert (slots(there)[:, 0] == 4).all()


@pytest.mark.parametrize("count", [1, 100, 16_383, 16_384, 16_385, 100_000, (1 << 24) - 1, 1 << 24, np.inf])
def test_the_correction_of_any_count_follows_its_powers(count: float) -> None:
    beta1, beta2, rate = 0.5, 0.99999, 0.01
    optimizer = spec.Adam(rate, betas=(beta1, beta2))
    table = a_table(optimizer)
    averages = np.full((len(KEYS), 2 * DIM), 0.25, np.float32)
    begin = np.zeros((len(KEYS), DIM), np.float32)
    table.put(KEYS, np.concatenate([begin, np.full((len(KEYS), 1), count, np.float32), averages], axis=1))
    table.apply(KEYS, np.zeros_like(begin), optimizer.step_values(1))
    t = min(count + 1, 1 << 24)
    first, second = 0.25 * beta1 / (1 - beta1**t), 0.25 * beta2 / (1 - beta2**t)
    np.testing.assert_allclose(weights(table), -rate * first / (np.sqrt(second) + 1e-8), rtol=1e-6)
    assert (slots(table)[:, 0] == min(np.float32(count) + np.float32(1), np.inf)).all()


@pytest.mark.parametrize("count", [np.nan, -np.inf, -3.0, -1.0, 0.0, 1e-30])
def test_an_impossible_loaded_count_counts_as_zero(count: float) -> None:
    optimizer = spec.Adam(0.01)
    table = a_table(optimizer)
    row = np.zeros((len(KEYS), DIM + table.slot_floats), np.float32)
    row[:, DIM] = count
    table.put(KEYS, row)
    table.apply(KEYS, np.ones((len(KEYS), DIM), np.float32), optimizer.step_values(1))
    np.testing.assert_allclose(weights(table), -0.01, rtol=1e-6)
    assert (slots(table)[:, 0] == 1).all()


def test_a_count_takes_four_bytes_of_a_row_and_nothing_of_other_optimizers_rows() -> None:
    for dim in (1, 8, 15, 64):
        adam, ftrl = (RowLayout.of(TableSpec("t", dim, of)) for of in (spec.Adam(), spec.FTRL(0.1)))
        assert adam.stride == -(-(12 * dim + 4) // 8) * 8
        assert ftrl.stride == -(-12 * dim // 8) * 8
    same = [a_table(spec.Adam(rate), number)._constants for number, rate in enumerate((0.1, 0.2, 0.3))]
    assert same[0] is same[1] is same[2], "tables share what their kernels look up"
    assert len(a_table(spec.FTRL(0.1))._constants) == 4


def amsgrad(w: Floats, s: Floats, g: Floats, v: Floats, c: Floats) -> None:
    """torch.optim.Adam(amsgrad=True), which elasticps has not: powers of both betas are kept in two row slots."""
    n, one = w.shape[0], np.float32(1)
    lr, beta1, beta2, eps = v[0], c[0], c[1], c[2]
    s[3 * n] = beta1 * (s[3 * n] if s[3 * n] > 0 else one)
    s[3 * n + 1] = beta2 * (s[3 * n + 1] if s[3 * n + 1] > 0 else one)
    rate, scale = lr / (one - s[3 * n]), one / np.sqrt(one - s[3 * n + 1])
    for j in range(n):
        s[j] = beta1 * s[j] + (one - beta1) * g[j]
        s[n + j] = beta2 * s[n + j] + (one - beta2) * g[j] * g[j]
        s[2 * n + j] = max(s[2 * n + j], s[n + j])
        w[j] -= rate * s[j] / (np.sqrt(s[2 * n + j]) * scale + eps)


def test_a_custom_optimizer_counts_in_its_row_slots() -> None:
    register_optimizer("amsgrad", amsgrad, slots=3, row_slots=2)
    ours = spec.Custom("amsgrad", lr=0.01, constant_values=(0.9, 0.99, 1e-8), slots=3, row_slots=2)
    table = a_table(ours)
    reference = Reference(
        lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.9, 0.99), amsgrad=True), weights(table)
    )  # fmt: skip
    for step in range(1, 41):
        touched = [i for i in range(len(KEYS)) if step > 3 * i]
        table.apply(KEYS[touched], gradient(step, len(touched)), ours.step_values(LATE + step))
        reference.step(touched, gradient(step, len(touched)))
    np.testing.assert_allclose(weights(table), reference.weights, rtol=1e-3, atol=1e-5)
    with pytest.raises(SpecError, match="registered with slots=3, row_slots=2"):
        a_table(spec.Custom("amsgrad", slots=3))
