"""Filters end to end: servers apply exactly what decoding gives of what the worker has encoded, on every replica."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from torch import nn

import elasticps as eps
import elasticps.torch
from elasticps.errors import NotFinite, SpecError
from elasticps.model.spec import Filter, TableSpec
from elasticps.store import Table
from elasticps.store.codec import Codec
from elasticps.torch import Embedding
from tests.e2e.conftest import Connect
from tests.e2e.oracle import audited
from tests.e2e.test_push_pull import cut_connection

KEYS = np.arange(500)
DIM = 7
SHAPE = (90, 201)  # two blocks


def read(table: Table, keys: np.ndarray) -> np.ndarray:
    out = np.empty((len(keys), table.spec.dim), np.float32)
    table.gather(keys, out)
    return out


@pytest.mark.parametrize(
    ("push", "pull"),
    [
        ([eps.Int8()], [eps.BFloat16()]),
        ([eps.BFloat16()], [eps.Int8()]),
        ([eps.Float16(feedback=True)], [eps.Float16()]),
        ([eps.TopK(0.1), eps.Int8()], [eps.BFloat16()]),
        ([eps.RandomK(0.2), eps.BFloat16()], [eps.Int8()]),
        ([eps.Threshold(0.5), eps.TopK(0.4)], [eps.Int8()]),
    ],
    ids=lambda filters: filters[0].kind,
)
def test_servers_store_decoded_pushes_and_encode_pulls(
    cluster: eps.LocalCluster, connect: Connect, push: Sequence[Filter], pull: Sequence[Filter]
) -> None:
    """Through lost connections, after which everything is sent again as it was."""
    ps, optimizer, random = connect(), eps.Adagrad(lr=0.1), np.random.default_rng(1)
    rows = ps.table("rows", dim=DIM, optimizer=optimizer, push=push, pull=pull)
    tensor = ps.tensor("w", init=np.ones(SHAPE, np.float32), optimizer=optimizer, push=push, pull=pull)
    twins = [Table(TableSpec("rows", DIM, optimizer), 1, 2), Table(TableSpec.dense("w", SHAPE, optimizer), 2, 2)]
    blocks = np.arange(twins[1].spec.blocks)
    first = np.zeros((len(blocks), twins[1].spec.dim), np.float32)
    first.reshape(-1)[: tensor.spec.size] = 1
    twins[1].put(blocks, first)
    codecs = [Codec(push, twin.spec.dim) for twin in twins]
    retained = [np.zeros((len(KEYS), DIM), np.float32), np.zeros_like(first)]
    for step in range(1, 13):
        keys = random.choice(KEYS, 200, replace=False)
        grads = random.normal(size=(200, DIM)).astype(np.float32)
        dense = random.normal(size=SHAPE).astype(np.float32)
        if step % 3 == 0:
            cut_connection(ps, random)
        ps.push({rows: (keys, grads), tensor: dense}, copy=step % 2 == 0)
        padded = np.zeros_like(first)
        padded.reshape(-1)[: tensor.spec.size] = dense.reshape(-1)
        for twin, codec, rest, of, given in zip(twins, codecs, retained, (keys, blocks), (grads, padded), strict=True):
            whole = given + rest[of] if codec.feedback else given
            sent = codec.decode(codec.encode(whole))
            rest[of] = whole - sent
            goes = sent.any(axis=1) if codec.sifts else np.ones(len(of), np.bool_)
            twin.apply(of[goes], sent[goes], optimizer.step_values(step))
    ps.flush()
    exact = read(twins[0], KEYS), read(twins[1], blocks).reshape(-1)[: tensor.spec.size].reshape(SHAPE)
    assert rows.pull(KEYS, exact=True).tobytes() == exact[0].tobytes()
    assert tensor.pull(exact=True).tobytes() == exact[1].tobytes()
    shown = [codec.decode(codec.encode(read(twin, of))) for codec, twin, of in zip(
        [Codec(pull, twin.spec.dim) for twin in twins], twins, (KEYS, blocks), strict=True)]  # fmt: skip
    assert rows.pull(KEYS).tobytes() == shown[0].tobytes()
    assert rows.pull(KEYS[::-1][:40]).tobytes() == shown[0][::-1][:40].tobytes()
    assert rows.pull(KEYS[:3], read="any").tobytes() == shown[0][:3].tobytes()
    assert tensor.pull().tobytes() == shown[1].reshape(-1)[: tensor.spec.size].tobytes()
    assert (rows.feedback.rows > 0) == codecs[0].feedback
    report = audited(cluster.url)
    assert report.clean, report


def test_large_tables_are_pushed_and_pulled_in_several_frames(connect: Connect) -> None:
    ps = connect()
    table = ps.table("wide", dim=64, optimizer=eps.Accumulate(), push=[eps.Int8()], pull=[eps.BFloat16()])
    keys = np.arange(60_000)
    grads = np.resize(np.array([127.0, -3.0, 5.0, 0.0], np.float32), (len(keys), 64))  # a scale of one
    ps.push({table: (keys, grads)}).result()
    assert (table.pull(keys) == grads).all()
    assert (table.pull(keys, exact=True) == grads).all()


def test_an_encoded_gradient_that_is_not_finite_is_refused(connect: Connect) -> None:
    ps = connect()
    table = ps.table("checked", dim=2, optimizer=eps.Accumulate(), finite=True, push=[eps.Int8()])
    with pytest.raises(NotFinite, match="key 5"):
        ps.push({table: (np.array([4, 5]), np.array([[1, 2], [np.nan, 1]], np.float32))}).result()
    assert (table.pull(np.array([5])) == 0).all()
    ps.push({table: (np.array([5]), np.array([[127, 1]], np.float32))}).result()
    assert table.pull(np.array([5])).tolist() == [[127, 1]]


def test_rounds_average_decoded_gradients(connect: Connect) -> None:
    ps = connect(consistency=eps.BSP())
    table = ps.table("mean", dim=2, optimizer=eps.Accumulate(), push=[eps.BFloat16()], pull=[eps.BFloat16()])
    for number in (1.0, 2.0):
        ps.push({table: (np.array([1, 2]), np.full((2, 2), number, np.float32))})
    assert (table.pull(np.array([1, 2, 3])) == [[3, 3], [3, 3], [0, 0]]).all()


def test_workers_agree_on_filters(connect: Connect) -> None:
    connect().table("agreed", dim=2, optimizer=eps.Accumulate(), push=[eps.Int8()])
    with pytest.raises(SpecError, match="push is"):
        connect("w1").table("agreed", dim=2, optimizer=eps.Accumulate())
    found = connect("w2").open("agreed")
    assert tuple(found.spec.push) == (eps.Int8(),)


def change_rows(ps: eps.Client, rows: eps.SparseTable, how: str, keys: np.ndarray) -> eps.SparseTable:
    """Loads, deletes or clears rows, or drops their table and makes it again; the table then."""
    if how == "load":
        rows.load(keys, np.zeros((len(keys), 2), np.float32))
    elif how == "delete":
        rows.delete(keys)
    elif how == "clear":
        rows.clear()
    elif how == "clear-by-name":
        ps.clear_table(rows.name)
    else:
        ps.drop_table(rows.name)
        return ps.table(rows.name, dim=2, optimizer=eps.Accumulate(), push=[eps.Threshold(10.0)])
    return rows


@pytest.mark.parametrize("how", ["load", "delete", "clear", "clear-by-name", "drop"])
def test_retained_gradients_of_changed_rows_are_forgotten(connect: Connect, how: str) -> None:
    ps = connect()
    rows = ps.table(f"changed-by-{how}", dim=2, optimizer=eps.Accumulate(), push=[eps.Threshold(10.0)])
    keys, nine = np.arange(4), np.full((4, 2), 9, np.float32)
    ps.push({rows: (keys, nine)})  # all of it is kept
    rows = change_rows(ps, rows, how, keys[:2])
    ps.push({rows: (keys, np.full((4, 2), 10, np.float32))}).result()
    others = 10.0 if how in ("clear", "clear-by-name", "drop") else 19.0
    assert rows.pull(keys)[:, 0].tolist() == [10.0, 10.0, others, others]


def test_a_refused_load_forgets_no_retained_gradients(connect: Connect) -> None:
    ps = connect()
    rows = ps.table("not-loaded", dim=2, optimizer=eps.Accumulate(), push=[eps.Threshold(10.0)])
    keys, nine = np.arange(2), np.full((2, 2), 9, np.float32)
    ps.push({rows: (keys, nine)}).result()
    with ps.step() as step:
        step.push({rows: (keys[:0], nine[:0])})
        calls: list[Callable[[], None]] = [lambda: rows.load(keys, nine), lambda: rows.delete(keys), rows.clear]
        for refused in calls:
            with pytest.raises(eps.InputError, match="still open"):
                refused()
    ps.push({rows: (keys, nine)})
    assert rows.pull(keys)[:, 0].tolist() == [18.0, 18.0]


def test_retained_gradients_of_a_loaded_tensor_are_forgotten(connect: Connect) -> None:
    ps = connect()
    tensor = ps.tensor("loaded", init=np.zeros(100, np.float32), optimizer=eps.SGD(lr=1.0), push=[eps.TopK(0.01)])
    for _ in range(5):
        ps.push({tensor: np.ones(100, np.float32)})
    tensor.load(np.zeros(100, np.float32))
    for _ in range(100):
        ps.push({tensor: np.zeros(100, np.float32)})
    ps.flush()
    assert not tensor.pull().any()


def test_retained_gradients_of_another_worker_arrive_with_its_next_push(connect: Connect) -> None:
    one, other = connect(), connect("w1")
    mine, theirs = (
        ps.table("kept-by-two", dim=2, optimizer=eps.Accumulate(), push=[eps.Threshold(10.0)]) for ps in (one, other)
    )
    keys, nine = np.arange(2), np.full((2, 2), 9, np.float32)
    other.push({theirs: (keys, nine)}).result()
    mine.load(keys, np.zeros((2, 2), np.float32))
    other.push({theirs: (keys, nine)}).result()
    assert mine.pull(keys)[:, 0].tolist() == [18.0, 18.0]
    one.drop_table(mine.name)  # what is made again has nothing of what was dropped
    mine, theirs = (
        ps.table("kept-by-two", dim=2, optimizer=eps.Accumulate(), push=[eps.Threshold(10.0)]) for ps in (one, other)
    )
    other.push({theirs: (keys, nine)}).result()
    assert not mine.pull(keys).any()


def test_a_refused_gradient_leaves_retained_gradients_alone(connect: Connect) -> None:
    ps = connect()
    filters = [eps.Threshold(10.0)]
    rows = ps.table("refused", dim=2, optimizer=eps.Accumulate(), finite=True, push=filters)
    keys = np.arange(3)
    ps.push({rows: (keys, np.full((3, 2), 9, np.float32))}).result()
    grads = np.full((3, 2), 1, np.float32)
    grads[1, 0] = np.nan
    with pytest.raises(NotFinite) as refused:
        ps.push({rows: (keys, grads)}).result()
    assert {name: keys.tolist() for name, keys in refused.value.refused.items()} == {"refused": [1]}
    assert rows.pull(keys)[:, 0].tolist() == [10.0, 0.0, 10.0]
    ps.push({rows: (keys, np.full((3, 2), 1, np.float32))}).result()
    assert rows.pull(keys)[:, 0].tolist() == [10.0, 10.0, 10.0]


@pytest.mark.parametrize("spoilt", [0, 1])
def test_a_gradient_refused_in_one_part_of_a_step_does_not_affect_the_other(connect: Connect, spoilt: int) -> None:
    ps = connect()
    rows = ps.table(f"parts-{spoilt}", dim=4, optimizer=eps.Accumulate(), finite=True, push=[eps.TopK(0.5)])
    key, grad = np.array([3]), np.array([[8, 4, 2, 1]], np.float32)
    ps.push({rows: (key, grad)}).result()
    step = ps.step()
    for part in range(2):
        step.push({rows: (key, np.full_like(grad, np.nan) if part == spoilt else grad)})
    with pytest.raises(NotFinite) as refused:
        step.commit().result()
    assert {name: keys.tolist() for name, keys in refused.value.refused.items()} == {rows.name: [3]}
    for _ in range(4):
        ps.push({rows: (key, np.zeros_like(grad))}).result()
    assert rows.pull(key).tolist() == [[16.0, 8.0, 4.0, 2.0]]


def test_a_loaded_model_has_no_retained_gradients(connect: Connect, tmp_path: Path) -> None:
    ps = connect()
    filters = [eps.Threshold(10.0)]
    layer = Embedding(ps, "items", 2, optimizer=eps.Accumulate(), init=eps.Zeros(), push=filters)
    rows = ps.table("items", dim=2, optimizer=eps.Accumulate(), init=eps.Zeros(), push=filters)
    model, keys, path = nn.Sequential(layer), np.arange(3), tmp_path / "model.pt"
    ps.push({rows: (keys, np.full((3, 2), 20, np.float32))}).result()
    elasticps.torch.save(model, path)
    ps.push({rows: (np.arange(5), np.full((5, 2), 9, np.float32))}).result()
    elasticps.torch.load(model, path)
    ps.push({rows: (np.arange(5), np.full((5, 2), 10, np.float32))}).result()
    assert rows.pull(np.arange(5))[:, 0].tolist() == [30.0, 30.0, 30.0, 10.0, 10.0]


def test_flush_raises_the_refused_rows_of_each_step(connect: Connect) -> None:
    ps = connect()
    rows = ps.table("flushed", dim=2, optimizer=eps.Accumulate(), finite=True)
    for number in range(6):
        keys = np.arange(number, number + 3)
        grads = np.full((3, 2), 1, np.float32)
        grads[number % 3 :: 3] = np.nan
        ps.push({rows: (keys, grads)})
    with pytest.raises(NotFinite) as raised:
        ps.flush()
    errors = [raised.value, *raised.value.others]
    assert [error.refused["flushed"].tolist() for error in errors if isinstance(error, NotFinite)] == [
        [number + number % 3] for number in range(6)
    ]
    ps.flush()
