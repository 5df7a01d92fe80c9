"""Whole models in a dictionary and in files."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from elasticps.errors import ConfigError, InputError
from elasticps.model.spec import SGD, Adam, Normal
from elasticps.system import temporary
from elasticps.torch import Embedding, EmbeddingBag, Optimizer, full_state_dict, load, load_full_state_dict, save, state


def a_model(ps: Any, name: str = "", **options: Any) -> nn.ModuleDict:
    init = Normal(seed=1)
    return nn.ModuleDict(
        {
            "users": Embedding(ps, f"{name}users", 3, optimizer=SGD(lr=1.0), init=init, **options),
            "words": EmbeddingBag(ps, f"{name}words", 2, "sum", optimizer=SGD(lr=1.0), init=init),
            "deep": nn.Linear(5, 1),
        }
    )


def out(model: nn.ModuleDict, ids: torch.Tensor) -> torch.Tensor:
    both = torch.cat([model["users"](ids), model["words"](ids[:, None])], dim=1)
    result: torch.Tensor = model["deep"](both)
    return result


def train(model: nn.ModuleDict, optimizer: Optimizer, ids: torch.Tensor) -> None:
    optimizer.zero_grad()
    out(model, ids).square().sum().backward()
    optimizer.step()


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "CHUNK_BYTES", 40)


IDS = torch.tensor([7, -3, 2**40, 5, 11, 12, 13])


def test_a_saved_model_is_the_same_when_loaded(ps: Any, tmp_path: Path) -> None:
    model = a_model(ps)
    optimizer = Optimizer(ps, model, Adam(lr=0.1))
    train(model, optimizer, IDS)
    before = out(model, torch.arange(20))
    save(model, tmp_path / "model.pt")
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt"]
    saved = torch.load(tmp_path / "model.pt", weights_only=True)
    assert {name: list(value.shape) for name, value in saved.items()} == {
        "users.keys": [7], "users.weight": [7, 3], "words.keys": [7], "words.weight": [7, 2],
        "deep.weight": [1, 5], "deep.bias": [1],
    }  # fmt: skip
    for name, value in full_state_dict(model).items():
        assert torch.equal(value, saved[name])
    train(model, optimizer, torch.arange(20))
    train(model, optimizer, torch.arange(5, 30))
    load(model, tmp_path / "model.pt")
    assert torch.equal(out(model, torch.arange(20)), before)  # rows that are new since are gone
    optimizer.refresh()
    assert torch.equal(out(model, torch.arange(20)), before)  # the servers have it all
    train(model, optimizer, IDS)


def test_a_model_can_be_loaded_before_it_has_an_optimizer(ps: Any) -> None:
    model = a_model(ps)
    train(model, Optimizer(ps, model, Adam(lr=0.1)), IDS)
    weights = full_state_dict(model) | {"deep.bias": torch.tensor([5.0])}
    again = a_model(ps)
    load_full_state_dict(again, weights)
    Optimizer(ps, again, Adam(lr=0.1), overlap=False).close()
    assert ps.weight("model.deep.bias").tolist() == [5.0]
    ps.targets["model.deep.bias"].weights[0][:] = 6.0
    Optimizer(ps, again, Adam(lr=0.1))
    bias: Any = again["deep"].bias
    assert bias.tolist() == [6.0]  # once


def test_with_num_embeddings_the_state_has_the_format_of_torch(ps: Any, tmp_path: Path) -> None:
    model = a_model(ps, num_embeddings=20, padding_idx=3)
    train(model, Optimizer(ps, model, Adam(lr=0.1)), torch.arange(4, 9))
    plain = nn.Embedding(20, 3, padding_idx=3)
    whole = full_state_dict(model)
    assert whole["users.weight"][3].tolist() == [0, 0, 0]
    plain.load_state_dict({"weight": whole["users.weight"]})
    assert torch.equal(plain(torch.arange(20)), model["users"](torch.arange(20)))
    with torch.no_grad():
        plain.weight[5] = 7.0
    torch.save(whole | {"users.weight": plain.weight.half()}, tmp_path / "plain.pt")
    load(model, tmp_path / "plain.pt")
    assert model["users"](torch.tensor([5])).tolist() == [[7.0] * 3]


def test_a_table_without_rows_is_saved(ps: Any, tmp_path: Path) -> None:
    model = nn.Sequential(Embedding(ps, "users", 3, optimizer=SGD(lr=1.0)))
    save(model, tmp_path / "model.pt")
    load(model, tmp_path / "model.pt")
    assert full_state_dict(model)["0.weight"].shape == (0, 3)


def test_a_file_that_cannot_be_written_leaves_the_old_one(ps: Any, tmp_path: Path, monkeypatch: Any) -> None:
    model = a_model(ps)
    (tmp_path / "model.pt").write_text("old")
    monkeypatch.setattr(ps.tables["words"], "keys", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        save(model, tmp_path / "model.pt")
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt"]
    assert (tmp_path / "model.pt").read_text() == "old"


@pytest.mark.parametrize("rows", [30_000, 12_000])
def test_a_full_disk_is_an_error_that_names_the_file_and_nothing_is_left(
    ps: Any, small_disk: Path, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows have no room, or have it and the file that is made of them has none. No signal ends the trainer."""
    monkeypatch.setattr(state, "CHUNK_BYTES", 16 << 20)
    model = nn.Sequential(Embedding(ps, "users", 3, optimizer=SGD(lr=1.0), num_embeddings=rows))
    (small_disk / "model.pt").write_text("old")
    with pytest.raises(OSError, match="No space left on device") as caught:
        save(model, small_disk / "model.pt")
    assert caught.value.filename == str(small_disk / "model.pt")
    assert [path.name for path in small_disk.iterdir()] == ["model.pt"]
    assert (small_disk / "model.pt").read_text() == "old"


def test_zeros_are_written_if_a_file_system_cannot_reserve_space(
    ps: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "not here")

    monkeypatch.setattr(state, "CHUNK_BYTES", 16 << 20)
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    model = nn.Sequential(Embedding(ps, "users", 3, optimizer=SGD(lr=1.0), num_embeddings=100_000))
    with (tmp_path / "x").open("wb") as file:
        temporary.reserve(file.fileno(), 3_000_001)
    assert (tmp_path / "x").stat().st_size == 3_000_001
    assert (tmp_path / "x").stat().st_blocks * 512 >= 3_000_001
    save(model, tmp_path / "model.pt")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.pt", "x"]


def test_states_that_do_not_fit_are_refused_before_anything_is_written(ps: Any) -> None:
    model = a_model(ps)
    Optimizer(ps, model, Adam(lr=0.1))
    whole = full_state_dict(model)
    with pytest.raises(ConfigError, match=r"no words\.weight.*made by state_dict\(\)"):
        load_full_state_dict(model, {name: value for name, value in whole.items() if "words" not in name})
    keys, rows = torch.tensor([1, 1]), torch.ones(2, 3)
    for wrong in ({"users.keys": keys, "users.weight": rows}, {"users.keys": keys[:1], "users.weight": rows[:, 0]}):
        with pytest.raises(InputError, match=r"users\.weight must have a row of 3 floats"):
            load_full_state_dict(model, whole | wrong)
    with pytest.raises(RuntimeError, match=r"deep\.bias"):
        load_full_state_dict(model, {name: value for name, value in whole.items() if name != "deep.bias"})
    assert ps.targets["users"].weights == {}
    assert np.isfinite(ps.weight("model.deep.weight")).all()


def test_unknown_rows_are_refused_as_in_torch(ps: Any, tmp_path: Path) -> None:
    model = nn.ModuleDict({"users": Embedding(ps, "users", 3, optimizer=SGD(lr=1.0), num_embeddings=10)})
    for count in (12, 4):
        torch.save({"users.weight": torch.ones(count, 3)}, tmp_path / "x.pt")
        with pytest.raises(
            InputError, match=rf"size mismatch for users\.weight: the state has the shape \[{count}, 3\]"
        ):
            load(model, tmp_path / "x.pt")
    for keys in ([0, 10], [-1, 3]):
        state = {"users.keys": torch.tensor(keys), "users.weight": torch.ones(2, 3)}
        with pytest.raises(InputError, match=rf"keys from {keys[0]} to {keys[1]}.*num_embeddings=10"):
            load_full_state_dict(model, state)
    assert ps.targets["users"].weights == {}
    load_full_state_dict(model, {"users.keys": torch.tensor([0, 9]), "users.weight": torch.ones(2, 3)})
    load_full_state_dict(model, {"users.weight": torch.ones(10, 3)})
    assert (model["users"](torch.arange(10)) == 1).all()


def test_a_wrapped_model_has_the_names_of_the_inner_model(ps: Any) -> None:
    model = a_model(ps)
    train(model, Optimizer(ps, model, Adam(lr=0.1)), IDS)
    whole = full_state_dict(model)
    load_full_state_dict(model, {f"module.{name}": tensor * 2 for name, tensor in whole.items() if "keys" not in name}
                         | {f"module.{name}": tensor for name, tensor in whole.items() if "keys" in name})  # fmt: skip
    assert torch.equal(full_state_dict(model)["users.weight"], whole["users.weight"] * 2)
    inner = nn.ModuleDict({"module": a_model(ps, "inner")})
    load_full_state_dict(inner, {f"module.{name}": tensor for name, tensor in whole.items()})
    assert torch.equal(full_state_dict(inner)["module.users.weight"], whole["users.weight"])


def test_foreign_and_truncated_files_are_refused_with_the_reason(ps: Any, tmp_path: Path) -> None:
    model = nn.ModuleDict({"users": Embedding(ps, "users", 3, optimizer=SGD(lr=1.0))})
    state = {"users.weight": torch.ones(1000, 3)}
    for zipped in (False, True):
        torch.save(state, tmp_path / "x.pt", _use_new_zipfile_serialization=zipped)
        load(model, tmp_path / "x.pt")
        whole = (tmp_path / "x.pt").read_bytes()
        for size in (0, 1, 5, 50, len(whole) // 2, len(whole) - 1):
            (tmp_path / "cut.pt").write_bytes(whole[:size])
            with pytest.raises(ConfigError, match=r"cut\.pt cannot be read: it was cut off"):
                load(model, tmp_path / "cut.pt")
    torch.save(torch.ones(3), tmp_path / "x.pt")
    with pytest.raises(ConfigError, match="has a Tensor, not the state_dict of a model"):
        load(model, tmp_path / "x.pt")
    with pytest.raises(ConfigError, match="it is not there"):
        load(model, tmp_path / "nothing.pt")
    os.mkfifo(tmp_path / "pipe.pt")
    with pytest.raises(ConfigError, match="it is no file"):
        load(model, tmp_path / "pipe.pt")
