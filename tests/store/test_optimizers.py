"""Kernels against torch's optimizers and the papers' formulas, to float tolerance."""

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
from elasticps.store import Store, Table, initial_rows, register_optimizer

DIM, ROWS, STEPS = 21, 16, 12
KEYS = np.arange(ROWS, dtype=np.int64) * 7919 - 40_000
INIT = spec.Normal(std=0.5, seed=11)
Floats = NDArray[np.float32]


def run(
    optimizer: spec.ServerOptimizer, batches: list[tuple[NDArray[np.int64], Floats]], dtype: str = "float32"
) -> Floats:
    """Weights of all rows after a step for each batch (indices into KEYS, gradients)."""
    table = Table(TableSpec("t", DIM, optimizer, INIT, dtype), 3, 8)
    for clock, (touched, grads) in enumerate(batches, start=1):
        table.apply(KEYS[touched], grads, optimizer.step_values(clock))
    out = np.empty((ROWS, DIM), np.float32)
    table.gather(KEYS, out)
    return out


def batches(touch_all: bool, seed: int = 0) -> list[tuple[NDArray[np.int64], Floats]]:
    random = np.random.default_rng(seed)
    made = []
    for _ in range(STEPS):
        touched = np.arange(ROWS) if touch_all else random.permutation(ROWS)[: random.integers(1, ROWS)]
        made.append((touched, random.standard_normal((len(touched), DIM)).astype(np.float32)))
    return made


TORCH: list[tuple[spec.ServerOptimizer, Callable[[Any], torch.optim.Optimizer]]] = [
    (spec.SGD(0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    (spec.SGD(0.1, weight_decay=0.1), lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1)),
    (spec.SGD(0.1, momentum=0.9), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    (
        spec.SGD(0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
    ),
    (spec.Adagrad(0.1), lambda p: torch.optim.Adagrad(p, lr=0.1)),
    (
        spec.Adagrad(0.1, initial_accumulator=0.3, weight_decay=0.1),
        lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.3, weight_decay=0.1),
    ),
    (spec.Adam(0.01), lambda p: torch.optim.Adam(p, lr=0.01)),
    (
        spec.Adam(0.01, betas=(0.8, 0.95), weight_decay=0.1),
        lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.8, 0.95), weight_decay=0.1),
    ),
    (spec.AdamW(0.01, weight_decay=0.1), lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1)),
]


@pytest.mark.parametrize(("ours", "theirs"), TORCH, ids=lambda o: getattr(o, "kind", ""))
def test_agrees_with_torch_when_every_row_is_touched(
    ours: spec.ServerOptimizer, theirs: Callable[[Any], torch.optim.Optimizer]
) -> None:
    weights = torch.nn.Parameter(torch.from_numpy(initial_rows(INIT, KEYS, DIM)))
    optimizer = theirs([weights])
    steps = batches(touch_all=True)
    for _, grads in steps:
        weights.grad = torch.from_numpy(grads)
        optimizer.step()
    np.testing.assert_allclose(run(ours, steps), weights.detach().numpy(), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(("ours", "theirs"), TORCH, ids=lambda o: getattr(o, "kind", ""))
def test_a_row_that_is_not_touched_takes_no_step(
    ours: spec.ServerOptimizer, theirs: Callable[[Any], torch.optim.Optimizer]
) -> None:
    start = initial_rows(INIT, KEYS, DIM)
    rows = [torch.nn.Parameter(torch.from_numpy(row)) for row in start]
    optimizers = [theirs([row]) for row in rows]
    steps = batches(touch_all=False)
    for touched, grads in steps:
        for i, grad in zip(touched, grads, strict=True):
            rows[i].grad = torch.from_numpy(grad)
            optimizers[i].step()
    expected = torch.stack([*rows]).detach().numpy()
    np.testing.assert_allclose(run(ours, steps), expected, rtol=2e-5, atol=2e-6)


def test_adam_on_all_rows_is_torchs_sparse_adam() -> None:
    weights = torch.nn.Parameter(torch.from_numpy(initial_rows(INIT, KEYS, DIM)))
    optimizer = torch.optim.SparseAdam([weights], lr=0.01)
    steps = batches(touch_all=True)
    for touched, grads in steps:
        with torch.sparse.check_sparse_tensor_invariants(enable=True):
            indices = torch.from_numpy(touched)[None]
            weights.grad = torch.sparse_coo_tensor(indices, torch.from_numpy(grads), (ROWS, DIM))
        optimizer.step()
    # SparseAdam adds eps before the second correction is applied, hence the absolute tolerance.
    np.testing.assert_allclose(run(spec.Adam(0.01), steps), weights.detach().numpy(), rtol=2e-5, atol=2e-6)


def test_row_adagrad_keeps_the_mean_square_of_a_row() -> None:
    steps = batches(touch_all=False)
    w, total = initial_rows(INIT, KEYS, DIM).astype(np.float64), np.zeros(ROWS)
    for touched, grads in steps:
        total[touched] += (grads.astype(np.float64) ** 2).mean(axis=1)
        w[touched] -= 0.1 * grads / (np.sqrt(total[touched]) + 1e-10)[:, None]
    np.testing.assert_allclose(run(spec.RowAdagrad(0.1), steps), w, rtol=2e-5, atol=2e-6)


def test_ftrl_is_the_papers_algorithm() -> None:
    alpha, beta, l1, l2 = 0.1, 1.0, 0.5, 0.01
    steps = batches(touch_all=False)
    w = initial_rows(INIT, KEYS, DIM).astype(np.float64)
    z, n = np.zeros_like(w), np.zeros_like(w)
    for touched, grads in steps:
        g = grads.astype(np.float64)
        sigma = (np.sqrt(n[touched] + g * g) - np.sqrt(n[touched])) / alpha
        z[touched] += g - sigma * w[touched]
        n[touched] += g * g
        slope = (beta + np.sqrt(n[touched])) / alpha + l2
        w[touched] = np.where(np.abs(z[touched]) <= l1, 0, -(z[touched] - np.sign(z[touched]) * l1) / slope)
    got = run(spec.FTRL(alpha, beta=beta, l1=l1, l2=l2), steps)
    np.testing.assert_allclose(got, w, rtol=1e-4, atol=1e-5)
    assert (got == 0).any(), "l1 makes weights exactly zero"


def test_assign_replaces_and_accumulate_adds() -> None:
    steps = batches(touch_all=True)
    np.testing.assert_array_equal(run(spec.Assign(), steps), steps[-1][1])
    total = initial_rows(INIT, KEYS, DIM)
    for _, grads in steps:
        total = total + grads
    np.testing.assert_array_equal(run(spec.Accumulate(), steps), total)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rows_of_two_bytes_follow_rows_of_four(dtype: str) -> None:
    steps = batches(touch_all=False)
    digits = {"float16": 11, "bfloat16": 8}[dtype]
    exact, rounded = run(spec.Adagrad(0.1), steps), run(spec.Adagrad(0.1), steps, dtype)
    np.testing.assert_allclose(rounded, exact, atol=STEPS * 2.0**-digits, rtol=0)


def sign_momentum(w: Floats, s: Floats, g: Floats, v: Floats, c: Floats) -> None:
    """Lion without interpolation: a moving average, and its sign as the step. s[dim] counts the row's steps."""
    n = w.shape[0]
    s[n] += np.float32(1)
    for j in range(n):
        s[j] = c[0] * s[j] + (np.float32(1) - c[0]) * g[j]
        if s[j] > 0:
            w[j] -= v[0]
        elif s[j] < 0:
            w[j] += v[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_users_register_their_own(dtype: str) -> None:
    register_optimizer("sign-momentum", sign_momentum, slots=1, row_slots=1)
    register_optimizer("sign-momentum", sign_momentum, slots=1, row_slots=1)  # a plugin loaded twice is fine
    optimizer = spec.Custom("sign-momentum", lr=0.125, constant_values=(0.5,), slots=1, row_slots=1)
    table = Table(TableSpec("t", DIM, optimizer, spec.Zeros(), dtype), 0, 2)
    grads = batches(touch_all=True)[0][1]
    for clock in (1, 2, 3):
        table.apply(KEYS, grads, optimizer.step_values(clock))
    out = np.empty((ROWS, DIM), np.float32)
    table.gather(KEYS, out)
    np.testing.assert_array_equal(out, np.sign(grads) * np.float32(-0.375))


def test_a_custom_optimizer_that_is_missing_or_different_is_reported() -> None:
    store = Store(2)
    with pytest.raises(SpecError, match=r"no optimizer is registered as 'nobody'.*start every server with the plugin"):
        store.create(TableSpec("t", 4, spec.Custom("nobody")), 0)
    assert not store.tables
    register_optimizer("sign-momentum", sign_momentum, slots=1, row_slots=1)
    with pytest.raises(SpecError, match=r"registered with slots=1, row_slots=1; the table's spec says slots=2"):
        store.create(TableSpec("t", 4, spec.Custom("sign-momentum", slots=2)), 0)
    with pytest.raises(SpecError, match="another optimizer is already registered"):
        register_optimizer("sign-momentum", sign_momentum, slots=2)


def test_an_optimizer_that_does_not_compile_is_reported() -> None:
    def wrong(w: Floats, s: Floats, g: Floats, v: Floats, c: Floats) -> None:
        w.no_such_method()  # type: ignore[attr-defined]

    with pytest.raises(SpecError, match="'wrong' does not compile"):
        register_optimizer("wrong", wrong)
