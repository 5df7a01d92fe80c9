"""The example of L1 logistic regression finds what was planted, as a reference does that sees all data at once."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import elasticps as eps
from tests.e2e.conftest import Connect
from tests.e2e.test_push_pull import cut_connection

EXAMPLE = Path(__file__).parents[2] / "examples" / "l1_logreg.py"
FEATURES, EPOCHS, L1 = 1_000, 4, 16.0


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("l1_logreg", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def proximal(samples: Any, labels: np.ndarray, l1: float) -> np.ndarray:
    """FISTA (Beck and Teboulle 2009) on the sum of the losses and l1 |w|."""
    w = v = np.zeros(samples.shape[1])
    t, rate = 1.0, 4 / float((samples.T @ samples).sum(axis=1).max())  # the Hessian is at most a quarter of that
    for _ in range(400):
        step = v - rate * (samples.T @ (1 / (1 + np.exp(-(samples @ v))) - labels))
        after = np.sign(step) * np.maximum(abs(step) - rate * l1, 0)
        grown = (1 + np.sqrt(1 + 4 * t * t)) / 2
        v, w, t = after + (t - 1) / grown * (after - w), after, grown
    return w


def test_ftrl_with_a_kkt_filter_agrees_with_a_proximal_method(connect: Connect, example: Any) -> None:
    ps, data = connect(), example.plant(4_000, FEATURES, seed=3)
    seen = example.Data(data.samples[:3_000], data.labels[:3_000], data.weights)
    unseen = example.Data(data.samples[3_000:], data.labels[3_000:], data.weights)
    reference = proximal(seen.samples, seen.labels, L1 / EPOCHS)
    if (theirs := example.compare(seen, L1, EPOCHS)) is not None:
        np.testing.assert_allclose(theirs, reference, atol=0.01)
    plain = ps.table("plain", dim=1, optimizer=eps.FTRL(lr=0.3, l1=L1))
    tables = {plain: 0.95, ps.table("kkt", dim=1, optimizer=eps.FTRL(lr=0.3, l1=L1), push=[eps.KKT()]): 0.92}
    best = example.log_loss(unseen, reference)
    for table, like in tables.items():
        example.train(ps, table, seen, EPOCHS, 100)
        weights = table.pull(np.arange(FEATURES))[:, 0]
        assert np.corrcoef(weights, reference)[0, 1] > like
        assert example.log_loss(unseen, weights) < 1.05 * best < 0.95 * np.log(2)
        assert weights[data.weights != 0].all()
        assert (np.sign(weights) == np.sign(data.weights))[data.weights != 0].all()
        assert table.reduce("nonzero") == np.count_nonzero(weights) < FEATURES // 2
        assert table.reduce("l1") == pytest.approx(abs(weights.astype(np.float64)).sum(), rel=1e-12)
    floats, dropped = table.screened
    assert plain.screened == (0, 0)
    assert dropped > 0.7 * floats


def test_weights_equal_those_of_a_numpy_twin_bit_for_bit(connect: Connect) -> None:
    """FTRL (McMahan et al., Algorithm 1) and the filter in numpy, one worker, through lost connections."""
    n, l1, slack, beta, inverse = 300, np.float32(1), 0.25, np.float32(1), np.float32(2)
    ps, random = connect(), np.random.default_rng(5)
    table = ps.table("t", dim=1, optimizer=eps.FTRL(lr=0.5, l1=1.0), push=[eps.KKT(slack)])
    w, z, squares, retained = (np.zeros(n, np.float32) for _ in range(4))
    zero = np.zeros(n, np.bool_)  # when it was pulled last, and nothing was sent since
    for step in range(1, 121):
        keys = random.choice(n, 60, replace=False)
        if step % 17 == 0:
            cut_connection(ps, random)
        found = table.pull(keys)[:, 0]
        assert (found == w[keys]).all()
        zero[keys] = found == 0
        grads = random.normal(scale=0.3, size=60).astype(np.float32)
        ps.push({table: (keys, grads[:, None])})
        total = grads + retained[keys]
        small = zero[keys] & (abs(total) <= np.float32(1 - slack))
        retained[keys] = np.where(small, total, np.float32(0))
        sent, g = keys[~small & (total != 0)], total[~small & (total != 0)]
        zero[sent] = False
        root = np.sqrt(squares[sent] + g * g)
        z[sent] += g - (root - np.sqrt(squares[sent])) * inverse * w[sent]
        squares[sent] += g * g
        beyond = z[sent] - np.where(z[sent] > 0, l1, -l1)
        w[sent] = np.where(abs(z[sent]) <= l1, np.float32(0), -beyond / ((beta + root) * inverse))
    assert 20 < table.reduce("nonzero") == np.count_nonzero(w) < n
    assert table.screened.dropped > 2_000
    assert table.feedback.rows == n
    slots = table.slots(np.arange(n))
    assert (slots["z"][:, 0] == z).all()
    assert (slots["n"][:, 0] == squares).all()
