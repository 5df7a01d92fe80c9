"""Models with odd shapes and names go out and come in."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from typer.testing import CliRunner

import elasticps as eps
from elasticps.cli.app import app as command_line
from elasticps.exchange.export import export
from elasticps.exchange.load import load
from tests.e2e.conftest import Connect

KINDS = pytest.mark.parametrize("kind", ["safetensors", "npz", "npy", "parquet"])
RATE = eps.SGD(lr=0.1)


@KINDS
def test_empty_and_scalar_tensors_are_exported_and_loaded(connect: Connect, tmp_path: Path, kind: str) -> None:
    ps = connect()
    shapes: list[tuple[int, ...]] = [(0, 5), (3, 0), (3, 0, 2), (0,), (), (1,), (2, 3)]
    for i, shape in enumerate(shapes):
        ps.tensor(f"w{i}", init=np.full(shape, 7.0, np.float32), optimizer=RATE)
    ps.table("empty", dim=2, optimizer=RATE)
    export(ps, tmp_path / "out", kind=kind)
    other = connect("w1", app=f"{ps.app}-other")
    load(other, tmp_path / "out")
    for i, shape in enumerate(shapes):
        there = other.tensor(f"w{i}", init=np.zeros(shape, np.float32), optimizer=RATE).pull()
        np.testing.assert_array_equal(there, np.full(shape, 7.0, np.float32))
    assert set(other.tables()) == set(ps.tables())


@KINDS
def test_tables_of_any_name_are_exported_and_loaded(connect: Connect, tmp_path: Path, kind: str) -> None:
    ps = connect()
    names = [
        ".",
        "..",
        "...",
        ".hidden",
        "emb[user]",
        "user,item",
        "a=b",
        "日" * 200,
        "🦔" * 200,
        "n" * 200,
        "x\\y",
        "%2F",
    ]
    for i, name in enumerate(names):
        ps.table(name, dim=2, optimizer=RATE).load(np.arange(3), np.full((3, 2), i, np.float32))
    export(ps, tmp_path / "out", kind=kind)
    assert [path.name for path in tmp_path.iterdir()] == ["out"], "nothing lies beside"
    other = connect("w1", app=f"{ps.app}-other")
    assert load(other, tmp_path / "out") == dict.fromkeys(sorted(names), 3)
    for i, name in enumerate(names):
        assert (other.table(name, dim=2, optimizer=RATE).pull(np.arange(3)) == i).all()


@KINDS
def test_tensors_are_called_as_in_a_model_of_plain_torch(connect: Connect, tmp_path: Path, kind: str) -> None:
    ps = connect()
    users = ps.table("users", dim=2, optimizer=RATE)
    users.load(np.arange(4), np.arange(8, dtype=np.float32).reshape(4, 2))
    ps.tensor("model.deep.weight", init=np.ones((1, 2), np.float32), optimizer=RATE)
    ps.tensor("model.deep.bias", init=np.ones(1, np.float32), optimizer=RATE)
    how: dict[str, Any] = {"strip_prefix": "model.", "modules": {"users": "towers.user"}, "rows": {"users": 4}}
    export(ps, tmp_path / "out", kind=kind, **how)
    if kind == "safetensors":
        state = {k: torch.from_numpy(v) for path in (tmp_path / "out").iterdir() if path.suffix == ".safetensors"
                 for k, v in load_file(path).items()}  # fmt: skip
        model = torch.nn.ModuleDict(
            {"towers": torch.nn.ModuleDict({"user": torch.nn.Embedding(4, 2)}), "deep": torch.nn.Linear(2, 1)}
        )
        model.load_state_dict(state)
        assert model["towers"]["user"].weight[3].tolist() == [6.0, 7.0]  # type: ignore[index]
    other = connect("w1", app=f"{ps.app}-other")
    assert load(other, tmp_path / "out") == {"users": 4, "model.deep.weight": 1, "model.deep.bias": 1}
    np.testing.assert_array_equal(
        other.table("users", dim=2, optimizer=RATE).pull(np.arange(4)), users.pull(np.arange(4))
    )
    for wrong, says in (
        ({"strip_prefix": "other."}, "no tensor that is exported has a name that begins with 'other.'"),
        ({"modules": {"x": "y"}}, "a module's path is given for 'x', which is no table"),
        ({"strip_prefix": "model.", "modules": {"users": "deep"}}, "would both be"),
        ({"modules": {"users": "../x"}}, "can be no name of 'users' in a file"),
    ):
        with pytest.raises(eps.ConfigError, match=says):
            export(ps, tmp_path / "wrong", kind=kind, **wrong)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_commands_accept_unusual_table_names(cluster: eps.LocalCluster, connect: Connect, tmp_path: Path) -> None:
    ps = connect()
    for name in ("user,item", "emb[user]", "a=b", "plain"):
        ps.table(name, dim=2, optimizer=RATE).load(np.arange(3), np.ones((3, 2), np.float32))
    where = ["--url", cluster.url, "--app", ps.app]
    chosen = ["--tables", '"user,item", emb[user],a=b', "--rows", "a=b=3", "--module", "emb[user]=user"]
    done = CliRunner().invoke(command_line, ["export", "--to", str(tmp_path / "out"), *chosen, *where])
    assert (done.exit_code, "3 tables, 9 rows" in done.output) == (0, True), done.output
    exported = json.loads((tmp_path / "out" / "elasticps.json").read_text())["tables"]
    assert {name: each["keys"] for name, each in exported.items()} == {
        "user,item": True,
        "emb[user]": True,
        "a=b": False,
    }
    assert "user.weight" in load_file(tmp_path / "out" / "emb[user].weight.safetensors")
    shown = CliRunner().invoke(command_line, ["tables", "list", "--url", cluster.url])
    assert "emb[user]" in shown.output


def test_files_that_are_no_model_are_refused_with_the_reason(connect: Connect, tmp_path: Path) -> None:
    ps = connect()
    ps.table("x", dim=2, optimizer=RATE)
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "x.pt", tmp_path / "x.npz", tmp_path / "folder" / "elasticps.json"):
        os.mkfifo(path)
        with pytest.raises(eps.ConfigError, match="cannot be read: it is no file"):
            load(ps, path if path.suffix != ".json" else path.parent)
        path.unlink()
    torch.save({"x.weight": torch.tensor(3.0)}, tmp_path / "scalar.pt")
    np.savez(tmp_path / "x.npz", weight=np.float32(3.0))
    for name in ("scalar.pt", "x.npz"):
        with pytest.raises(eps.InputError, match="is one number, and a table takes rows"):
            load(ps, tmp_path / name)
    torch.save({"x.weight": torch.ones(3, 2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert load(ps, tmp_path / "old.pt") == {"x": 3}
    torch.save({"x.weight": torch.ones(3000, 2)}, tmp_path / "new.pt")
    for name in ("old.pt", "new.pt"):
        whole = (tmp_path / name).read_bytes()
        for size in (0, 1, 50, len(whole) // 2, len(whole) - 1):
            (tmp_path / "cut.pt").write_bytes(whole[:size])
            with pytest.raises(eps.ConfigError, match="it was cut off, has other things than tensors in it, or torch"):
                load(ps, tmp_path / "cut.pt")
    export(ps, tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / "elasticps.json").read_text())
    manifest["tables"]["x"]["rows"] = 10**17
    (tmp_path / "out" / "elasticps.json").write_text(json.dumps(manifest))
    with pytest.raises(eps.ConfigError, match=r"has fewer rows of table 'x' than its elasticps\.json says"):
        load(ps, tmp_path / "out")
