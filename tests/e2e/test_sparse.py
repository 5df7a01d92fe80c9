"""Tables and tensors as vectors and matrices, beside arrays of numpy and SciPy that hold the same."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy import sparse as scipy_sparse

import elasticps as eps
from elasticps.sparse import Batch, Matrix, Vector, localize
from tests.e2e.conftest import Connect

SIZE = 40_000  # three blocks, the last one with an end
ROWS, COLUMNS = 900, 31


def close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def samples(random: np.random.Generator, n: int, columns: int) -> Any:
    return scipy_sparse.random_array((n, columns), density=20 / columns, rng=random, dtype=np.float64).tocsr()


def norms(view: Vector, twin: np.ndarray) -> None:
    wide = twin.astype(np.float64)
    assert view.norm(1) == pytest.approx(abs(wide).sum(), rel=1e-12)
    assert view.norm() == view.norm(2) == pytest.approx(np.linalg.norm(wide), rel=1e-12)
    assert view.norm(math.inf) == abs(wide).max()
    assert (view.max(), view.min(), view.nonzero()) == (wide.max(), wide.min(), int(np.count_nonzero(wide)))
    assert view.sum() == view.reduce("sum") == pytest.approx(wide.sum(), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("pull", [[], [eps.BFloat16()]], ids=["exact", "bfloat16"])
def test_a_tensor_is_a_vector(connect: Connect, pull: list[Any]) -> None:
    ps, random = connect(), np.random.default_rng(1)
    twin = random.integers(-99, 99, SIZE).astype(np.float32)  # which bfloat16 holds
    tensor = ps.tensor("w", init=twin, optimizer=eps.Accumulate(), pull=pull)
    assert tensor.spec.blocks > 2
    w = Vector(tensor)
    indices = random.integers(0, SIZE, 500)
    for at in (indices, indices.tolist(), slice(17_000, 17_100), slice(-5, None), slice(None, None, -7), slice(3, 1)):
        assert w[at].tolist() == twin[at].tolist()
    assert w[[]].tolist() == []
    assert w[-1] == twin[-1]
    assert w[np.int64(5)] == twin[5]
    assert tensor.take([5, 5, SIZE - 1]).tolist() == [twin[5], twin[5], twin[-1]]
    x = samples(random, 30, SIZE)
    close(x @ w, x @ twin)
    close(localize(x) @ w, x @ twin)
    close(np.ones((2, SIZE), np.float32) @ w, [twin.sum()] * 2)
    assert w.dot(twin) == pytest.approx(float(twin.astype(np.float64) @ twin))
    close(w.dot(x[[0]]), (x[[0]] @ twin)[0])
    assert w.dot(w) == pytest.approx(float(twin.astype(np.float64) @ twin))
    norms(w, twin)
    batch = localize(x)
    ps.push(w.step(batch, np.ones(len(batch.keys), np.float32))).result()
    twin[batch.keys] += 1
    assert tensor.pull(exact=True).tolist() == twin.tolist()
    ps.push(w.step([3, 3, -1], [1, 1, 5])).result()
    twin[3] += 2
    twin[-1] += 5
    assert tensor.pull(exact=True).tolist() == twin.tolist()


def test_a_table_is_a_vector_with_an_entry_for_each_key(connect: Connect) -> None:
    ps, random = connect(), np.random.default_rng(2)
    table, other = (ps.table(name, dim=1, optimizer=eps.Accumulate()) for name in "ab")
    v, u = Vector(table), Vector(other)
    keys = random.choice(2**40, 3_000, replace=False)
    values = random.normal(size=len(keys)).astype(np.float32)
    ps.push(v.step(keys, values)).result()
    assert v[keys].tolist() == values.tolist()
    assert v[int(keys[0])] == values[0]
    assert v[-3:4].tolist() == [0] * 7
    norms(v, values)
    x = scipy_sparse.csr_array((np.ones(4), [keys[0], keys[1], 7, keys[1]], [0, 3, 4]), shape=(2, 2**41))
    batch = localize(x)
    close(x @ v, [values[0] + values[1], values[1]])
    ps.push(v.step(batch, batch.gradient([1.0, 2.0]))).result()
    twin = dict(zip(keys.tolist(), values.tolist(), strict=True))
    for key, by in ((keys[0], 1), (keys[1], 3), (7, 1)):
        twin[int(key)] = float(np.float32(twin.get(int(key), 0)) + np.float32(by))
    assert v[list(twin)].tolist() == list(twin.values())
    some = keys[:50]
    ps.push(u.step(some, np.full(50, 2.0))).result()
    assert u.dot(v) == v.dot(u) == pytest.approx(2 * sum(twin[key] for key in some.tolist()))
    line = scipy_sparse.coo_array(([3.0], ([0], [int(keys[5])])), shape=(1, 2**41))
    assert v.dot(line) == pytest.approx(3 * twin[int(keys[5])])
    tensor = ps.tensor("t", init=np.arange(10, dtype=np.float32), optimizer=eps.Accumulate())
    assert v.dot(Vector(tensor)) == Vector(tensor).dot(v) == pytest.approx(7 * twin[7])


def test_tables_and_tensors_are_matrices(connect: Connect) -> None:
    ps, random = connect(), np.random.default_rng(3)
    twin = random.normal(size=(ROWS, COLUMNS)).astype(np.float32)
    tensor = ps.tensor("m", init=twin, optimizer=eps.Accumulate())
    table = ps.table("t", dim=COLUMNS, optimizer=eps.Accumulate())
    of_tensor, of_table = Matrix(tensor), Matrix(table)
    ps.push(of_table.step(np.arange(ROWS), twin)).result()
    x = samples(random, 12, ROWS)
    for m in (of_tensor, of_table):
        for at in ([3, 1, 3], slice(10, 20), np.arange(5)):
            assert m[at].tolist() == twin[at].tolist()
            assert m[at, 4].tolist() == twin[at, 4].tolist()
            assert m[at, 1:3].tolist() == twin[at, 1:3].tolist()
        assert m[7].tolist() == twin[7].tolist()
        assert m[7, 2] == twin[7, 2]
        close(x @ m, x @ twin)
        close(np.eye(ROWS)[:2] @ m, twin[:2])
        assert m.norm() == pytest.approx(np.linalg.norm(twin.astype(np.float64)), rel=1e-12)
        w = random.normal(size=(COLUMNS, 2)).astype(np.float32)
        close(m.dot(w, [4, 5]), twin[[4, 5]] @ w)
    close(of_tensor.dot(w[:, 0]), twin @ w[:, 0])
    batch = localize(x)
    gradient = batch.gradient(np.ones((12, COLUMNS), np.float32))
    ps.push(of_tensor.step(batch, gradient) | of_table.step(batch, gradient)).result()
    twin[batch.keys] += gradient
    close(tensor.pull(), twin)
    close(of_table[0:ROWS], twin)


def test_an_empty_batch_ticks_and_nothing_more(connect: Connect) -> None:
    ps = connect()
    v = Vector(ps.table("w", dim=1, optimizer=eps.FTRL(0.1, l1=1.0), push=[eps.KKT()]))
    batch = localize(scipy_sparse.csr_array((3, 5)))
    assert (batch @ v).tolist() == [0, 0, 0]
    ps.push(v.step(batch, batch.gradient(np.ones(3)))).result()
    assert (ps.clock, v.reduce("count"), v.norm()) == (1, 0, 0)


def test_impossible_views_are_refused(connect: Connect) -> None:
    ps = connect()
    table, wide = ps.table("w", dim=1, optimizer=eps.SGD(0.1)), ps.table("wide", dim=2, optimizer=eps.SGD(0.1))
    tensor = ps.tensor("t", init=np.zeros(6, np.float32), optimizer=eps.SGD(0.1))
    flat = ps.tensor("m", init=np.zeros((2, 3), np.float32), optimizer=eps.SGD(0.1))
    v, u, m = Vector(table), Vector(tensor), Matrix(flat)
    for make, text in [
        (lambda: Vector(wide), "'wide' has 2: use Matrix"),
        (lambda: Vector(flat), "tensor of one dimension"),
        (lambda: Matrix(tensor), "tensor of two dimensions"),
        (lambda: Vector(np.zeros(3)), "a view is one of a table or a tensor"),  # type: ignore[arg-type]
        (lambda: Vector(table, read="head"), "read must be"),
        (lambda: u[6], "rows 0 to 5"),
        (lambda: u[[-7]], "rows 0 to 5"),
        (lambda: u[np.ones(6, np.bool_)], "not by a mask"),
        (lambda: u[True], "not by a mask"),
        (lambda: u[1.5], "keys must be int64"),
        (lambda: u[0:"3"], "a slice has whole numbers"),
        (lambda: v[:5], "needs a start and a stop"),
        (lambda: v[0 : 2**40], "pull at most"),
        (lambda: v.norm(3), "order 1, 2 or inf"),
        (lambda: v.norm([1]), "order 1, 2 or inf"),  # type: ignore[arg-type]
        (lambda: v.dot(np.eye(2)), "dot takes a vector"),
        (lambda: v.dot(scipy_sparse.csr_array(np.eye(2))), "use matrix @ vector"),
        (lambda: u.dot(np.ones(5)), "'t' has 6 rows, the other vector has 5"),
        (lambda: scipy_sparse.csr_array(np.eye(5)) @ u, "'t' has 6 rows, the matrix has 5"),
        (lambda: np.eye(5) @ u, "'t' has 6 rows, the array has 5"),
        (lambda: np.array(["a"] * 6) @ u, "multiplied by matrices"),
        (lambda: v.step([1, 2], [1.0]), r"gradient of shape \(2,\)"),
        (lambda: m.step([1, 2], np.ones((2, 3))), "rows 0 to 1"),
        (lambda: m.step([1], np.ones((1, 2))), r"gradient of shape \(1, 3\)"),
        (lambda: m[0, 3], "has 3 columns"),
        (lambda: m[0, 1, 2], "two dimensions, got 3 indices"),
        (lambda: Matrix(wide).dot(np.ones(2)), "name those to multiply"),
        (lambda: m.dot(np.ones(2)), "has 3 columns"),
        (lambda: tensor.take([6]), "has 6 floats, none at 6"),
        (lambda: tensor.take([-1]), "none at -1"),
    ]:
        with pytest.raises(eps.InputError, match=text):
            make()  # type: ignore[no-untyped-call]
    with pytest.raises(TypeError):
        iter(v)
    assert isinstance(localize(scipy_sparse.csr_array(np.eye(2))), Batch)


def test_a_kkt_filter_learns_from_pulls_of_every_kind(connect: Connect) -> None:
    """Tables and tensors, plain and coded: small gradients of what was zero when pulled are left out, others arrive."""
    ps, kkt = connect(), [eps.KKT(feedback=False)]
    ftrl = eps.FTRL(0.5, l1=1.0)
    large = np.full((4, 1), 8.0, np.float32)
    for name, pull in (("plain", []), ("coded", [eps.BFloat16()]), ("keys", [eps.KeysOnce()])):
        table = ps.table(name, dim=1, optimizer=ftrl, push=kkt, pull=pull)
        keys = np.array([9, 1, 5, 1])
        ps.push({table: (keys[:1], large[:1])}).result()
        assert table.screened == (1, 0)  # not pulled yet
        assert (table.pull(keys) != 0).tolist() == [[True], [False], [False], [False]]
        ps.push({table: (keys[:3], np.full((3, 1), 0.5, np.float32))}).result()
        assert table.screened == (4, 2)
        assert table.slots([9, 1, 5])["z"][1:].tolist() == [[0], [0]]
        assert len(table) == 1
        assert table.pull_async([1, 5]).result().tolist() == [[0], [0]]
        ps.push({table: (keys[1:3], np.array([[0.75], [2.0]], np.float32))}).result()
        assert table.slots([1, 5])["z"].tolist() == [[0], [2]]
    for name, pull in (("dense", []), ("coded-dense", [eps.BFloat16()])):
        tensor = ps.tensor(name, init=np.array([0, 1, 0, 0], np.float32), optimizer=ftrl, push=kkt, pull=pull)
        tensor.pull()
        ps.push({tensor: np.array([0.5, 0.5, 3, 0.25], np.float32)}).result()
        assert tensor.screened == (4, 2)
        found = tensor.pull()
        assert found[[0, 3]].tolist() == [0, 0]
        assert found[2] != 0


def test_a_kkt_filter_learns_from_a_cache_and_from_parts_of_a_tensor(connect: Connect) -> None:
    ps, ftrl, kkt = connect(), eps.FTRL(0.5, l1=1.0), [eps.KKT(feedback=False)]
    table = ps.table("cached", dim=1, optimizer=ftrl, push=kkt, cache=eps.Cache(rows=100, staleness=9))
    keys, small = np.arange(10), np.full((10, 1), 0.5, np.float32)
    ps.push({table: (keys[:2], np.full((2, 1), 9, np.float32))}).result()
    for step in range(1, 4):
        rows = table.pull(keys) if step % 2 else table.pull_async(keys).result()
        assert np.count_nonzero(rows) == 2
        ps.push({table: (keys, small)}).result()
        assert table.screened == (2 + 10 * step, 8 * step)
    assert table.cached.hits > 0
    for name, pull in (("plain", []), ("coded", [eps.BFloat16()])):
        tensor = ps.tensor(name, init=np.zeros(4, np.float32), optimizer=ftrl, push=kkt, pull=pull)
        assert tensor.take([1, 2]).tolist() == [0, 0]
        ps.push({tensor: np.full(4, 0.5, np.float32)}).result()
        assert tensor.screened == (4, 0)
