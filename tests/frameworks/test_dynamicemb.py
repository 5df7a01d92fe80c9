"""dynamicemb's `Storage` at the servers, against a stand-in with the signature of dynamicemb's own classes."""

from __future__ import annotations

import copy
import enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import elasticps as eps
import elasticps.dynamicemb
from elasticps.dynamicemb import ServerStorage, server_storage
from elasticps.errors import ConfigError
from tests.shared_cluster import Connect


class CopyMode(enum.Enum):
    EMBEDDING = "embedding"
    VALUE = "value"


class RowAdagrad:
    """What dynamicemb's optimizers say of themselves."""

    def get_state_dim(self, dim: int) -> int:
        return 1 if dim == 4 else dim

    def get_initial_optim_states(self) -> float:
        return 0.25

    def get_opt_args(self) -> dict[str, Any]:
        return {"opt_type": "stand-in"}


def options(*dims: int, dtype: torch.dtype = torch.float32) -> list[Any]:
    return [SimpleNamespace(dim=dim, embedding_dtype=dtype) for dim in dims]


def storage(ps: eps.Client) -> ServerStorage:
    kind = copy.deepcopy({"external_storage": server_storage(ps)})["external_storage"]  # as dynamicemb does
    return kind(options(4, 2), RowAdagrad())


KEYS = torch.tensor([7, -3, 7, 2**40])
TABLES = torch.tensor([0, 0, 1, 1])
SCORES = torch.tensor([5, 2**62 + 1, -1, 0])


def test_rows_are_found_as_they_were_inserted(connect: Connect) -> None:
    store = storage(connect())
    assert (store.max_embedding_dim(), store.value_dim(0), store.value_dim(1), store.max_value_dim()) == (4, 5, 4, 6)
    assert store.embedding_dims().tolist() == [4, 2]
    assert not store.all_dims_vec4()
    values = torch.randn(4, 6)
    store.insert(KEYS[1:], TABLES[1:], values[1:], SCORES[1:])
    expected = values.clone()
    expected[0] = 0
    expected[1, 5:] = 0  # of table 0: four floats, and a state of one
    expected[2:, 2:4] = 0  # of table 1: two floats, and behind the largest embedding a state of two
    frequencies = torch.tensor([9, 8, 7, 6])
    missing, keys, at, tables, counts, found, scores, rows = store.find(KEYS, TABLES, CopyMode.VALUE, frequencies)
    assert (missing, keys.tolist(), at.tolist(), tables.tolist()) == (1, [7], [0], [0])
    assert counts is not None
    assert counts.tolist() == [9]
    assert found.tolist() == [False, True, True, True]
    assert scores.tolist() == [0, *SCORES[1:].tolist()]
    assert torch.equal(rows, expected)
    nothing = KEYS[:0]
    store.insert(nothing, nothing, values[:0])
    assert store.find(nothing, nothing, CopyMode.VALUE)[7].shape == (0, 6)
    *_, none, _, _, short = store.find(KEYS, TABLES, CopyMode.EMBEDDING)
    assert none is None
    assert torch.equal(short, expected[:, :4])


def test_rows_that_are_given_back_keep_their_scores(connect: Connect) -> None:
    ps = connect()
    store = storage(ps)
    store.insert(KEYS, TABLES, torch.zeros(4, 6), SCORES)
    store.insert(KEYS, TABLES, torch.ones(4, 6), preserve_existing=True)
    *_, found, scores, rows = store.find(KEYS, TABLES, CopyMode.VALUE)
    assert found.all()
    assert scores.tolist() == SCORES.tolist()
    assert (rows[:, 0] == 1).all()
    ps.flush()
    assert ps.committed == 2


class RefusedStep:
    def done(self) -> bool:
        return True

    def result(self) -> None:
        raise eps.ServerError("rows were refused")


def test_rows_that_servers_refuse_are_an_error_of_a_later_call(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    ps = connect()
    store = storage(ps)
    monkeypatch.setattr(ps, "push", lambda _: RefusedStep())
    store.insert(KEYS, TABLES, torch.ones(4, 6), SCORES)
    with pytest.raises(eps.ServerError, match="rows were refused"):
        store.find(KEYS, TABLES, CopyMode.VALUE)
    assert store.find(KEYS, TABLES, CopyMode.VALUE)[0] == 4


def test_a_prefix_is_one_collection_s(connect: Connect) -> None:
    ps = connect()
    store = storage(ps)
    with pytest.raises(ConfigError, match=r"has its rows in dynamicemb\.0"):
        storage(ps)
    del store
    storage(ps)


def test_a_table_goes_to_files_and_comes_back_elsewhere(
    connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elasticps.dynamicemb, "_LOADED_BYTES", 1)  # a row at once
    ps = connect()
    store, values = storage(ps), torch.randn(4, 6)
    store.insert(KEYS, TABLES, values, SCORES)
    meta, key, embedding, score, state = (str(tmp_path / name) for name in ("meta", "key", "emb", "score", "opt"))
    store.dump(1, meta, key, embedding, score, state, include_optim=True, include_meta=True, timestamp=0)
    assert Path(meta).read_text() == '{"opt_type": "stand-in"}'
    expected = store.find(KEYS[2:], TABLES[2:], CopyMode.VALUE)
    other = server_storage(ps, prefix="other")(options(4, 2), RowAdagrad())
    other.load(1, meta, key, embedding, score, state, include_optim=True)
    again = other.find(KEYS[2:], TABLES[2:], CopyMode.VALUE)
    assert torch.equal(again[7], expected[7])
    assert torch.equal(again[6], SCORES[2:])
    other.load(1, meta, key, embedding, None, None, include_optim=False)
    *_, rows = other.find(KEYS[2:], TABLES[2:], CopyMode.VALUE)
    assert (rows[:, 4:] == 0.25).all()
    Path(score).write_bytes(bytes(24))
    with pytest.raises(ConfigError, match="3 integers, and 2 keys have 1 each"):
        other.load(1, meta, key, embedding, score, None, include_optim=False)
    with pytest.raises(ConfigError, match="4 floats, and 2 keys have 4 each"):
        other.load(0, meta, key, embedding, None, None, include_optim=False)
    with pytest.raises(ConfigError, match="as float32"):
        server_storage(ps)(options(4, dtype=torch.float16), RowAdagrad())
