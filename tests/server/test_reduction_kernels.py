"""Reductions over ranges beside numpy; they depend on the rows, not on their layout in memory."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticps.errors import SpecError
from elasticps.model.optimizers import SGD
from elasticps.model.spec import TableSpec
from elasticps.server.core import partial
from elasticps.server.core.partial import Partial
from elasticps.store import Table, reductions, register_reduction
from elasticps.store.reductions import reduction

DIM, RANGES = 3, 4


def in_order(keys: Any, w: Any, s: Any, c: Any) -> None:
    """Differs with the order of rows, and with where slices end."""
    for i in range(w.shape[0]):
        s[0] = s[0] * 0.75 + w[i, 0] + c[0]
        s[1] = keys[i]


def one_after_the_other(s: Any, later: Any) -> None:
    s[0] = s[0] * 0.5 + later[0]
    s[1] = later[1]


@pytest.fixture(autouse=True)
def _small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    register_reduction("in-order", in_order, one_after_the_other, size=2, constants=1)
    monkeypatch.setattr(partial, "SLICE_ROWS", 20)


def reduced(table: Table, name: str, *constants: float) -> tuple[Any, bytes]:
    """As a client puts it together; and all bits of it."""
    how, total, bits = reduction(name, constants), None, b""
    for r in range(table.ranges):
        one = Partial(table, r, how, constants)
        for _ in one.slices():
            pass
        assert one.rows == table.count_range(r)
        assert (one.state is None) == (one.rows == 0)
        if one.state is not None:
            bits += one.state.tobytes()
            if total is None:
                total = one.state
            else:
                how.merge(total, one.state)
    return how.result(total), bits


NAMES = ("sum", "l1", "l2", "linf", "max", "min", "nonzero")


@given(st.integers(0, 2**32 - 1), st.sampled_from([0, 1, 7, 300]), st.sampled_from(["float32", "bfloat16", "float16"]))
@settings(max_examples=25)
def test_reductions_agree_with_numpy_and_between_replicas(seed: int, n: int, dtype: str) -> None:
    random = np.random.default_rng(seed)
    spec = TableSpec("t", DIM, SGD(0.1), dtype=dtype)
    keys = random.choice(100_000, n, replace=False).astype(np.int64) - 50_000
    rows = np.where(random.random((n, DIM)) < 0.3, 0, random.normal(size=(n, DIM))).astype(np.float32)
    one, other = Table(spec, 3, RANGES), Table(spec, 3, RANGES)
    one.put(keys, rows)
    more = np.arange(60_000, 60_400)
    other.put(more, np.ones((400, DIM), np.float32))  # another history: grown, and with holes
    for i in random.permutation(n):
        other.put(keys[i : i + 1], rows[i : i + 1])
    other.delete(more)
    held = np.empty((n, DIM), np.float32)
    one.gather(keys, held)
    twin = held.astype(np.float64)
    for name in NAMES:
        (found, bits), (there, same) = reduced(one, name), reduced(other, name)
        assert bits == same
        assert found == there
        expected = {
            "sum": twin.sum(), "l1": abs(twin).sum(), "l2": math.sqrt((twin**2).sum()), "nonzero": (twin != 0).sum(),
            "linf": abs(twin).max(initial=0), "max": twin.max(initial=-math.inf), "min": twin.min(initial=math.inf),
        }[name]  # fmt: skip
        if name in ("linf", "max", "min", "nonzero"):
            assert found == expected
        else:
            assert found == pytest.approx(expected, rel=1e-12, abs=1e-12)
    assert reduced(one, "in-order", 0.25)[1] == reduced(other, "in-order", 0.25)[1]


def test_a_tensor_is_reduced_without_the_padding_of_its_last_block() -> None:
    spec = TableSpec.dense("w", (401, 101), SGD(0.1))
    assert spec.blocks > 2
    assert spec.size % spec.dim
    values = np.full(spec.blocks * spec.dim, 7, np.float32)  # the filling too, so that it would be noticed
    values[: spec.size] = -1 - np.arange(spec.size)
    table = Table(spec, 4, RANGES)
    table.put(np.arange(spec.blocks), values.reshape(spec.blocks, spec.dim))
    assert reduced(table, "max")[0] == -1
    assert reduced(table, "min")[0] == -spec.size
    assert reduced(table, "nonzero")[0] == spec.size
    assert reduced(table, "sum")[0] == -spec.size * (spec.size + 1) / 2


def test_nan_and_infinity_survive_reductions() -> None:
    for place in range(3):
        table = Table(TableSpec("t", 1, SGD(0.1)), 3, 2)
        rows = np.array([[1], [2], [3]], np.float32)
        rows[place] = np.nan
        table.put(np.arange(3), rows)
        for name in ("sum", "l1", "l2", "max", "min", "linf"):
            assert math.isnan(reduced(table, name)[0])
        assert reduced(table, "nonzero")[0] == 3
    table.put(np.arange(3), np.array([[np.inf], [-np.inf], [1]], np.float32))
    assert [reduced(table, name)[0] for name in ("max", "min", "linf", "l2")] == [np.inf, -np.inf, np.inf, np.inf]
    table.put(np.arange(4), np.array([[np.inf], [-np.inf]] * 2, np.float32))
    assert reduced(table, "sum")[1] in [
        np.array(bits).tobytes() for bits in ([np.nan], [np.nan] * 2, [np.inf, -np.inf])
    ]


def test_impossible_reductions_cannot_be_registered() -> None:
    register_reduction("in-order", in_order, one_after_the_other, size=2, constants=1)  # again
    with pytest.raises(SpecError, match="another reduction is already registered as 'in-order'"):
        register_reduction("in-order", in_order, one_after_the_other, size=3, constants=1)
    with pytest.raises(SpecError, match="another reduction is already registered as 'l2'"):
        register_reduction("l2", in_order, one_after_the_other)
    for wrong in (0, 4097, True, 1.5):
        with pytest.raises(SpecError, match="size must be"):
            register_reduction("new", in_order, one_after_the_other, size=wrong)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="constants must be"):
        register_reduction("new", in_order, one_after_the_other, constants=-1)
    for name in ("count", "x" * 201):
        with pytest.raises(SpecError, match="name has 1 to 200"):
            register_reduction(name, in_order, one_after_the_other)
    for unusable in ("", 7):
        with pytest.raises(SpecError, match="name must be a string that is not empty"):
            register_reduction(unusable, in_order, one_after_the_other)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="'new' does not compile"):
        register_reduction("new", lambda keys, w, s, c: w.nothing, one_after_the_other)
    with pytest.raises(
        SpecError, match=r"no reduction is registered as 'new' \(registered: count, .*in-order, l1.*plugin"
    ):
        reduction("new", ())
    with pytest.raises(SpecError, match="'l2' takes 0 constants, not 1"):
        reduction("l2", (1.0,))
    assert "new" not in vars(reductions)["_known"]
