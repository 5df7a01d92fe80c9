"""Rows of several tables in one pull: the same as one pull of each."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import elasticps as eps
from elasticps.client import pull_tables
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


def test_it_gives_what_pulls_of_each_give(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
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
            asked = [name for name, header in sent if header.table != tables[-1].id]  # that asks for what it lacks
            assert len(set(asked)) == len(asked) <= 3
            assert all(header.flags & TABLES for _, header in sent if header.table != tables[-1].id)
            assert list(rows) == tables
            for table in tables:
                np.testing.assert_array_equal(rows[table], table.pull(keys[table], exact=exact))
        np.testing.assert_array_equal(ps.pull(keys, read="any", exact=True)[tables[0]], rows[tables[0]])
    assert tables[-1].cached.hits
    assert ps.pull({}) == {}


def test_large_ones_are_cut_and_land_where_the_caller_wants_them(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    ps, rng = connect(), np.random.default_rng(2)
    tables = tables_of(ps)
    keys = {table: rng.permutation(4000)[: 3000 + i] for i, table in enumerate(tables)}
    out = {tables[0]: np.empty((3000, 1), np.float32), tables[4]: np.empty((3004, 300), np.float32)}
    rows = ps.pull_async(keys, out).result()
    assert rows[tables[4]] is out[tables[4]]
    monkeypatch.setattr(pull_tables, "MOST_BLOCKS", 2)
    monkeypatch.setattr(pull_tables, "PULL_FRAME_KEYS", 6002)
    sent = frames(monkeypatch, Kind.PULL)
    again = ps.pull(keys)
    asked = [name for name, header in sent if header.table != tables[-1].id]
    assert len(asked) == 15  # to three servers, of two tables and of one four times
    for table in tables:
        np.testing.assert_array_equal(rows[table], again[table])
        np.testing.assert_array_equal(rows[table], table.pull(keys[table]))


def test_what_is_wrong_is_told_before_anything_is_sent(connect: Connect) -> None:
    ps, other = connect(), connect("w1")
    table, theirs = ps.table("a", dim=2, optimizer=eps.SGD(lr=1.0)), other.table("b", dim=2, optimizer=eps.SGD(lr=1.0))
    tensor = ps.tensor("d", init=np.zeros(3, np.float32), optimizer=eps.SGD(lr=1.0))
    keys = np.arange(3)
    wrongs: list[Any] = [{theirs: keys}, {tensor: keys}, {"a": keys}]
    for wrong in wrongs:
        with pytest.raises(eps.InputError, match="the tables of this client"):
            ps.pull(wrong)
    with pytest.raises(eps.InputError, match="keys must be int64"):
        ps.pull({table: np.ones(3)})
    with pytest.raises(eps.InputError, match="out must be a float32 array"):
        ps.pull_async({table: keys}, {table: np.empty((3, 3), np.float32)})
    with pytest.raises(eps.InputError, match="'tail'"):
        ps.pull({table: keys}, read="head")


def test_a_dropped_table_is_told(connect: Connect) -> None:
    ps, other = connect(), connect("w1")
    tables = [ps.table(name, dim=2, optimizer=eps.SGD(lr=1.0)) for name in "abc"]
    other.drop_table("b")
    with pytest.raises(eps.UnknownTable):
        ps.pull(dict.fromkeys(tables, np.arange(30)))
    assert ps.pull(dict.fromkeys(tables[::2], np.arange(30)))[tables[0]].shape == (30, 2)
