"""Rows of several tables in one pull: the same as one pull of each."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import elasticps as eps
from elasticps.client import pull as pulls
from elasticps.client.transport import Link
from elasticps.wire.frames import HEADER_BYTES, TABLES, Header, Kind, unpack_header
from tests.e2e.conftest import Connect

KINDS: list[dict[str, Any]] = [
    {"dim": 1},
    {"dim": 8, "pull": [eps.BFloat16()]},
    {"dim": 3, "dtype": "bfloat16"},
    {"dim": 33, "pull": [eps.KeysOnce()], "push": [eps.KeysOnce()]},
    {"dim": 300, "pull": [eps.Int8(feedback=False), eps.KeyDeltas()]},
    {"dim": 16},
    {"dim": 4, "cache": eps.Cache(rows=200, staleness=3)},
]


def tables_of(ps: eps.Client) -> list[eps.SparseTable]:
    return [
        ps.table(f"t{i}", optimizer=eps.SGD(lr=1.0), init=eps.Normal(std=1.0, seed=i), **kind)
        for i, kind in enumerate(KINDS)
    ]


def frames(monkeypatch: pytest.MonkeyPatch, *kinds: Kind) -> list[tuple[str, Header]]:
    """Frames of some kinds that leave from now on, with the server they leave for."""
    found: list[tuple[str, Header]] = []
    send = Link.send

    def count(link: Link, buffers: list[Any]) -> bool:
        data, at = b"".join(bytes(buffer) for buffer in buffers), 0
        while at < len(data):
            header = unpack_header(data, at)
            if header.kind in kinds:
                found.append((link.server.name, header))
            at += HEADER_BYTES + header.body
        return send(link, buffers)

    monkeypatch.setattr(Link, "send", count)
    return found


def test_a_pull_of_several_tables_equals_a_pull_of_each(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    ps, rng = connect(), np.random.default_rng(1)
    tables = tables_of(ps)
    ps.push({t: (np.arange(500), rng.standard_normal((500, t.dim)).astype(np.float32)) for t in tables}).result()
    sent = frames(monkeypatch, Kind.PULL)
    for n in (0, 1, 40, 3000):
        keys = {table: rng.integers(0, 900, int(rng.integers(0, n + 1))) for table in tables}
        keys[tables[0]] = rng.integers(0, 900, n)
        for exact in (False, True):
            sent.clear()
            rows = ps.pull(keys, exact=exact)
            requested = [name for name, header in sent if header.table != tables[-1].id]  # that asks for what it lacks
            assert len(set(requested)) == len(requested) <= 3
            assert all(header.flags & TABLES for _, header in sent if header.table != tables[-1].id)
            assert list(rows) == tables
            for table in tables:
                np.testing.assert_array_equal(rows[table], table.pull(keys[table], exact=exact))
        np.testing.assert_array_equal(ps.pull(keys, read="any", exact=True)[tables[0]], rows[tables[0]])
    assert tables[-1].cached.hits
    assert ps.pull({}) == {}


class Twin:
    """Rows of one worker's tables and tensors, with SGD of rate 1."""

    def __init__(self, ps: eps.Client) -> None:
        kinds = EXACT[:-1] if isinstance(ps.consistency, eps.BSP) else EXACT  # with rounds no rows are kept
        self.tables = [ps.table(f"t{i}", optimizer=eps.SGD(lr=1.0), **kind) for i, kind in enumerate(kinds)]
        shapes = [(3,), (5, 70), (300, 301), (1,)]  # the third is large
        self.tensors = [
            ps.tensor(f"d{i}", init=np.zeros(shape, np.float32), optimizer=eps.SGD(lr=1.0))
            for i, shape in enumerate(shapes)
        ]
        self.rows = {table: np.zeros((900, table.dim), np.float32) for table in self.tables}
        self.values = {tensor: np.zeros(tensor.shape, np.float32) for tensor in self.tensors}

    def gradients(self, rng: np.random.Generator) -> dict[Any, Any]:
        """Whole-number gradients of some of the tables."""
        found: dict[Any, Any] = {}
        for table in self.tables:
            keys = rng.integers(0, 900, int(rng.integers(0, 60)))
            found[table] = keys, rng.integers(-3, 4, (len(keys), table.dim)).astype(np.float32)
            np.subtract.at(self.rows[table], keys, found[table][1])
        for tensor in self.tensors:
            found[tensor] = rng.integers(-3, 4, tensor.shape).astype(np.float32)
            self.values[tensor] -= found[tensor]
        return found

    def check(self, requested: dict[Any, Any], found: dict[Any, Any]) -> None:
        assert list(found) == list(requested)
        for handle, keys in requested.items():
            expected = self.values[handle] if keys is None else self.rows[handle][keys]
            np.testing.assert_array_equal(found[handle], expected)


EXACT: list[dict[str, Any]] = [
    {"dim": 1},
    {"dim": 16},
    {"dim": 33, "pull": [eps.KeysOnce()], "push": [eps.KeysOnce()]},
    {"dim": 5, "pull": [eps.KeyDeltas()], "push": [eps.KeyDeltas(), eps.Zstd()]},
    {"dim": 4, "cache": eps.Cache(rows=200, staleness=0)},
]


@pytest.mark.parametrize("consistency", [eps.ASP(), eps.SSP(staleness=1), eps.BSP()])
def test_a_pull_after_a_step_shows_it(connect: Connect, consistency: Any) -> None:
    """Of tables and tensors, also as the end of a step in parts."""
    ps, rng = connect(consistency=consistency), np.random.default_rng(5)
    twin = Twin(ps)
    requested: dict[Any, Any] = {}
    for number in range(12):
        requested = {table: rng.integers(0, 900, int(rng.integers(0, 80))) for table in twin.tables}
        requested |= dict.fromkeys(twin.tensors)
        out = {twin.tables[1]: np.empty((len(requested[twin.tables[1]]), 16), np.float32)}
        values = twin.gradients(rng)
        if number % 3:
            done, pull = ps.push_pull(values, requested, out)
        else:
            step = ps.step()
            step.push({handle: values.pop(handle) for handle in list(values)[::2]})
            done, pull = ps.push_pull(values, requested, out, step=step)
        assert done.clock == ps.clock == number + 1
        found = pull.result()
        assert found[twin.tables[1]] is out[twin.tables[1]]
        assert pull.done()
        twin.check(requested, found)
        twin.check(requested, ps.pull(requested))
    assert ps.push_pull({}, {})[1].result() == {}


def test_large_pulls_are_cut_into_frames_and_fill_the_given_arrays(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    ps, rng = connect(), np.random.default_rng(2)
    tables = tables_of(ps)
    keys = {table: rng.permutation(4000)[: 3000 + i] for i, table in enumerate(tables)}
    out = {tables[0]: np.empty((3000, 1), np.float32), tables[4]: np.empty((3004, 300), np.float32)}
    rows = ps.pull_async(keys, out).result()
    assert rows[tables[4]] is out[tables[4]]
    monkeypatch.setattr(pulls, "MOST_BLOCKS", 2)
    monkeypatch.setattr(pulls, "PULL_FRAME_KEYS", 6002)
    sent = frames(monkeypatch, Kind.PULL)
    again = ps.pull(keys)
    requested = [name for name, header in sent if header.table != tables[-1].id]
    assert len(requested) == 15  # to three servers, of two tables and of one four times
    for table in tables:
        np.testing.assert_array_equal(rows[table], again[table])
        np.testing.assert_array_equal(rows[table], table.pull(keys[table]))


def test_wrong_arguments_are_refused_before_a_request_is_sent(connect: Connect) -> None:
    ps, other = connect(), connect("w1")
    table, theirs = ps.table("a", dim=2, optimizer=eps.SGD(lr=1.0)), other.table("b", dim=2, optimizer=eps.SGD(lr=1.0))
    tensor = ps.tensor("d", init=np.zeros(3, np.float32), optimizer=eps.SGD(lr=1.0))
    keys = np.arange(3)
    wrongs: list[Any] = [{theirs: keys}, {"a": keys}]
    for wrong in wrongs:
        with pytest.raises(eps.InputError, match=r"is not open on this client|takes tables and tensors as keys"):
            ps.pull(wrong)
    retained = ps.table("kept", dim=2, optimizer=eps.SGD(lr=1.0), cache=eps.Cache(rows=9, staleness=1))
    wrongs = [{tensor: keys}, {table: None}, {retained: np.ones(3)}, {theirs: keys}]
    for wrong in wrongs:
        with pytest.raises(eps.InputError):
            ps.push_pull({table: (keys, np.ones((3, 2), np.float32))}, wrong)
    with pytest.raises(eps.InputError, match=r"float32 array"):
        ps.push_pull({}, {tensor: None}, {tensor: np.empty(4, np.float32)})
    assert ps.clock == 0
    with pytest.raises(eps.InputError, match="grads"):
        ps.push_pull({table: (keys, np.ones((4, 2), np.float32))}, {table: keys})
    step = ps.step()
    step.push({table: (keys, np.ones((3, 2), np.float32))})
    step.commit()
    with pytest.raises(eps.InputError, match="committed already"):
        ps.push_pull({}, {table: keys}, step=step)
    with pytest.raises(eps.InputError, match="keys must be int64"):
        ps.pull({table: np.ones(3)})
    with pytest.raises(eps.InputError, match="out must be a float32 array"):
        ps.pull_async({table: keys}, {table: np.empty((3, 3), np.float32)})
    with pytest.raises(eps.InputError, match="'tail'"):
        ps.pull({table: keys}, read="head")


def test_pulling_a_dropped_table_is_an_error(connect: Connect) -> None:
    ps, other = connect(), connect("w1")
    tables = [ps.table(name, dim=2, optimizer=eps.SGD(lr=1.0)) for name in "abc"]
    other.drop_table("b")
    with pytest.raises(eps.UnknownTable):
        ps.pull(dict.fromkeys(tables, np.arange(30)))
    assert ps.pull(dict.fromkeys(tables[::2], np.arange(30)))[tables[0]].shape == (30, 2)
