"""Specs are values: checked once, equal by value, the same after a trip through JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elasticps.errors import SpecError
from elasticps.model import spec
from elasticps.model.spec import TableSpec

WRONG: Any = "wrong"
OPTIMIZERS: list[spec.ServerOptimizer] = [
    spec.SGD(0.1, momentum=0.9, weight_decay=1e-4, nesterov=True),
    spec.SGD(lambda clock: 1 / clock),
    spec.Adagrad(0.1, initial_accumulator=0.1),
    spec.RowAdagrad(0.05),
    spec.Adam(),
    spec.AdamW(lr=1e-4, betas=(0.8, 0.99)),
    spec.FTRL(0.1, l1=1.0),
    spec.Assign(),
    spec.Accumulate(),
    spec.Custom("mine", lr=0.1, constant_values=(1.0, -2.5), slots=2, row_slots=1),
]
INITS = [spec.Zeros(), spec.Constant(-1.5), spec.Uniform(-1, 1, seed=2**63 - 1), spec.Normal(std=0.01, seed=3)]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: o.kind)
@pytest.mark.parametrize("init", INITS, ids=lambda i: i.kind)
def test_json_keeps_a_spec(optimizer: spec.ServerOptimizer, init: spec.Init) -> None:
    one = TableSpec("users.embedding", 12, optimizer, init, "bfloat16")
    two = TableSpec.from_json(one.to_json())
    assert one == two
    assert hash(one) == hash(two)
    assert one.to_json() == two.to_json()
    assert one.difference(two) == ""


@pytest.mark.parametrize("shape", [(3, 4), (), (0,), (100_000,)])
def test_json_keeps_a_dense_spec(shape: tuple[int, ...]) -> None:
    one = TableSpec.dense("mlp.0.weight", shape, spec.Adam())
    assert TableSpec.from_json(one.to_json().encode()) == one


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: spec.SGD(-0.1), "SGD.lr must be finite and at least 0"),
        (lambda: spec.SGD(math.nan), "SGD.lr"),
        (lambda: spec.SGD(WRONG), "must be a number"),
        (lambda: spec.SGD(0.1, momentum=1.0), "SGD.momentum must be finite and at least 0 and below 1"),
        (lambda: spec.SGD(0.1, nesterov=True), "nesterov needs a momentum"),
        (lambda: spec.Adagrad(1e39), "Adagrad.lr"),
        (lambda: spec.Adagrad(10**400), "Adagrad.lr"),
        (lambda: spec.Adam(betas=(0.9, 1.0)), "Adam.betas"),
        (lambda: spec.AdamW(betas=WRONG), "AdamW.betas"),
        (lambda: spec.FTRL(0.0), "divides by it"),
        (lambda: spec.FTRL(0.1).step_values(1, lr=0.0), "divides by it"),
        (lambda: spec.Custom(""), "Custom.name"),
        (lambda: spec.Custom("x", slots=99), "Custom.slots must be from 0 to 16"),
        (lambda: spec.Uniform(1, 0), "low must not be above high"),
        (lambda: spec.Normal(std=-1), "Normal.std"),
        (lambda: spec.Normal(seed=-1), "Normal.seed"),
        (lambda: spec.Normal(seed=WRONG), "must be an integer"),
        (lambda: spec.SSP(-1), "SSP.staleness"),
        (lambda: TableSpec("a b", 1, spec.Assign()), "table name"),
        (lambda: TableSpec("", 1, spec.Assign()), "table name"),
        (lambda: TableSpec("a" * 201, 1, spec.Assign()), "1 to 200 characters"),
        (lambda: TableSpec("a", 0, spec.Assign()), "table 'a': dim must be from 1 to 65536"),
        (lambda: TableSpec("a", 8, WRONG), "optimizer must be one of"),
        (lambda: TableSpec("a", 8, spec.Assign(), init=WRONG), "init must be one of"),
        (lambda: TableSpec("a", 8, spec.Assign(), dtype="float64"), "dtype must be one of float32, float16, bfloat16"),
        (lambda: TableSpec("a", 8, spec.Assign(), shape=(-1,)), "shape"),
        (lambda: TableSpec.dense("a", (8,), spec.RowAdagrad(0.1)), "a dense tensor has no rows"),
        (lambda: TableSpec("a", 8, spec.Assign()).blocks, "is sparse"),
        (lambda: TableSpec.from_json("{"), "not JSON"),
        (lambda: TableSpec.from_json("{}"), "must be an object of"),
    ],
)
def test_an_error_names_the_wrong_argument(make: Callable[[], object], words: str) -> None:
    with pytest.raises(SpecError, match=".*".join(words.split("*"))):
        make()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optimizer": {"kind": "sophia"}}, "unknown optimizer kind 'sophia'"),
        ({"optimizer": {"kind": []}}, "object with a kind"),
        ({"optimizer": {"kind": "sgd", "lr": 0.1, "warp": 9}}, "warp"),
        ({"optimizer": {"kind": "sgd", "lr": -(10**400)}}, "SGD.lr"),
        ({"init": 3}, "object with a kind"),
        ({"init": {"kind": "normal", "std": "x"}}, "Normal.std"),
        ({"shape": 3}, "shape must be a list or null"),
        ({"dim": True}, "dim must be an integer"),
        ({"name": None}, "table name"),
        ({"name": "t\ud800"}, "surrogate"),
        ({"name": "t\N{RIGHT-TO-LEFT OVERRIDE}"}, "can be printed"),
        ({"name": "t\N{NO-BREAK SPACE}"}, "a blank"),
        ({"name": "t\n"}, "a blank"),
        ({"optimizer": {"kind": "custom", "name": "\ud800"}}, "surrogate"),
        ({"push": [{"kind": "custom", "name": "\ud800", "bits": 8}]}, "surrogate"),
        ({"shape": [1] * 33_000}, "its spec has 66... characters"),
    ],
)
def test_foreign_json_is_refused(changes: dict[str, object], words: str) -> None:
    values = json.loads(TableSpec("a", 8, spec.SGD(0.1)).to_json()) | changes
    with pytest.raises(SpecError, match=words):
        TableSpec.from_json(json.dumps(values))


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
    )
)
def test_any_json_is_a_spec_or_an_error(value: object) -> None:
    for text in (
        json.dumps(value),
        json.dumps(json.loads(TableSpec("a", 8, spec.SGD(0.1)).to_json()) | {"optimizer": value}),
    ):
        with pytest.raises(SpecError):
            TableSpec.from_json(text)


def test_a_difference_is_put_in_words() -> None:
    one, two = TableSpec("a", 32, spec.SGD(0.1)), TableSpec("a", 64, spec.SGD(0.2, momentum=0.9))
    words = one.difference(two)
    assert "dim is 32, not 64" in words
    assert "SGD(lr=0.1" in words
    assert "name" not in words


def test_learning_rates_do_not_make_specs_differ() -> None:
    one, two = TableSpec("a", 32, spec.SGD(0.1)), TableSpec("a", 32, spec.SGD(lambda clock: 1 / clock))
    assert one != two
    assert one.difference(two) == two.difference(one) == ""
    assert "optimizer is" in one.difference(TableSpec("a", 32, spec.Adagrad(0.1)))


def test_schedules_are_a_property_of_the_step() -> None:
    one, two = spec.SGD(lambda clock: 1 / clock), spec.SGD(lambda clock: 2 / clock)
    assert one == two
    assert one != spec.SGD(0.1)
    assert one.step_values(4).tolist() == [0.25]
    assert one.step_values(4, lr=3).tolist() == [3.0]
    received = TableSpec.from_json(TableSpec("a", 1, one).to_json()).optimizer
    with pytest.raises(SpecError, match="lives in the worker"):
        received.step_values(1)
    with pytest.raises(SpecError, match="lr at clock 3"):
        spec.SGD(lambda clock: -1.0).step_values(3)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: o.kind)
def test_step_values_have_the_declared_length(optimizer: spec.ServerOptimizer) -> None:
    values = optimizer.step_values(7, lr=0.1)
    assert values.dtype == np.float32
    assert values.shape == (optimizer.step_floats,)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: o.kind)
def test_only_custom_optimizers_see_the_workers_clock(optimizer: spec.ServerOptimizer) -> None:
    early, late = (optimizer.step_values(clock, lr=0.1).tolist() for clock in (1, 5_000))
    assert (early == late) == (optimizer.kind != "custom")


def test_adams_slots_have_the_names_of_torch() -> None:
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.Adam([weight])
    weight.grad = torch.ones(3)
    optimizer.step()
    assert list(spec.Adam().slot_shapes(3)) == list(optimizer.state[weight])


@given(st.integers(0, 10**9))
def test_dense_blocks_hold_the_tensor_without_waste(size: int) -> None:
    described = TableSpec.dense("w", (size,), spec.SGD(0.1))
    assert 1 <= described.dim <= spec.MAX_BLOCK
    padding = described.blocks * described.dim - size
    assert 0 <= padding <= 16 * described.blocks
    if 0 < size <= spec.MAX_BLOCK:
        assert (described.blocks, padding) == (1, 0)


def test_a_scalar_is_one_block() -> None:
    assert TableSpec.dense("bias", (), spec.SGD(0.1)).blocks == 1


def test_consistency_models_have_a_bound() -> None:
    assert (spec.ASP().bound, spec.SSP(4).bound, spec.BSP().bound) == (None, 4, None)


def test_a_spec_is_parsed_once_and_cached() -> None:
    data = TableSpec("t", 4, spec.Adagrad(0.1), push=[spec.Int8()]).to_json()
    assert TableSpec.from_json(data) is TableSpec.from_json(data.encode().decode())
    long = data + " " * spec.REMEMBERED_CHARS
    assert TableSpec.from_json(long) is not TableSpec.from_json(long)  # what is kept is bounded
    assert TableSpec.from_json(long) == TableSpec.from_json(data)
