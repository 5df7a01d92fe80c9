"""Filters end to end: servers apply exactly what decoding gives of what the worker has encoded, on every replica."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

import elasticps as eps
from elasticps.errors import NotFinite, SpecError
from elasticps.spec import Filter, TableSpec
from elasticps.store import Table
from elasticps.store.codec import Codec
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
def test_servers_hold_what_was_sent_and_show_it_as_asked(
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
    kept = [np.zeros((len(KEYS), DIM), np.float32), np.zeros_like(first)]
    for step in range(1, 13):
        keys = random.choice(KEYS, 200, replace=False)
        grads = random.normal(size=(200, DIM)).astype(np.float32)
        dense = random.normal(size=SHAPE).astype(np.float32)
        if step % 3 == 0:
            cut_connection(ps, random)
        ps.push({rows: (keys, grads), tensor: dense}, copy=step % 2 == 0)
        padded = np.zeros_like(first)
        padded.reshape(-1)[: tensor.spec.size] = dense.reshape(-1)
        for twin, codec, rest, of, given in zip(twins, codecs, kept, (keys, blocks), (grads, padded), strict=True):
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


def test_large_tables_go_in_several_frames_both_ways(connect: Connect) -> None:
    ps = connect()
    table = ps.table("wide", dim=64, optimizer=eps.Accumulate(), push=[eps.Int8()], pull=[eps.BFloat16()])
    keys = np.arange(60_000)
    grads = np.resize(np.array([127.0, -3.0, 5.0, 0.0], np.float32), (len(keys), 64))  # a scale of one
    ps.push({table: (keys, grads)}).result()
    assert (table.pull(keys) == grads).all()
    assert (table.pull(keys, exact=True) == grads).all()


def test_a_gradient_that_is_not_finite_is_refused_though_it_came_encoded(connect: Connect) -> None:
    ps = connect()
    table = ps.table("checked", dim=2, optimizer=eps.Accumulate(), finite=True, push=[eps.Int8()])
    with pytest.raises(NotFinite, match="key 5"):
        ps.push({table: (np.array([4, 5]), np.array([[1, 2], [np.nan, 1]], np.float32))}).result()
    assert (table.pull(np.array([5])) == 0).all()
    ps.push({table: (np.array([5]), np.array([[127, 1]], np.float32))}).result()
    assert table.pull(np.array([5])).tolist() == [[127, 1]]


def test_rounds_average_what_was_decoded(connect: Connect) -> None:
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
