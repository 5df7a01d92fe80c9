"""Models go out and come in."""

from __future__ import annotations

import resource
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import nn

import elasticps as eps
from elasticps.cli.app import app as command_line
from elasticps.exchange import export as exporting
from elasticps.exchange.export import export
from elasticps.exchange.load import load
from elasticps.torch import Embedding, EmbeddingBag, Optimizer, full_state_dict
from examples.demo.data import FIELDS, NO_GENRE
from examples.demo.model import ROW, DeepFM
from tests.e2e.conftest import Connect

KEYS = np.random.default_rng(3).integers(-(2**62), 2**62, 3_000)
ROWS = np.random.default_rng(4).normal(size=(3_000, 5)).astype(np.float32)


def a_model(ps: eps.Client) -> tuple[eps.SparseTable, eps.DenseTensor]:
    table = ps.table("t", dim=5, optimizer=eps.Adagrad(lr=0.1), init=eps.Normal(std=1.0, seed=2))
    tensor = ps.tensor("mlp.0.weight", init=np.ones((30, 70), np.float32), optimizer=eps.Adam(lr=0.1))
    ps.push({table: (KEYS, ROWS), tensor: np.ones((30, 70), np.float32)}).result()
    return table, tensor


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporting, "CHUNK_BYTES", 1_000)
    monkeypatch.setattr("elasticps.exchange.load.CHUNK_BYTES", 1_000)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("kind", ["safetensors", "npz", "npy", "parquet"])
def test_an_exported_model_can_be_loaded_again(connect: Connect, tmp_path: Path, kind: str) -> None:
    ps = connect()
    table, tensor = a_model(ps)
    bias = ps.tensor("bias", init=np.float32(3.0), optimizer=eps.SGD(lr=0.1))
    ps.table("empty", dim=2, optimizer=eps.SGD(lr=0.1))
    reported: list[int] = []
    written = export(ps, tmp_path / "out", kind=kind, with_slots=True, tell=reported.append)
    assert written == {"bias": 1, "empty": 0, "mlp.0.weight": 30, "t": 3_000}
    assert sum(reported) == 3_031
    other = connect("w1", app=f"{ps.app}-other")
    assert load(other, tmp_path / "out", with_slots=True) == written
    assert {name: one.spec for name, one in other.tables().items()} == {n: one.spec for n, one in ps.tables().items()}
    np.testing.assert_array_equal(other.tensor("bias", init=np.float32(0.0), optimizer=eps.SGD(lr=0.1)).pull(), 3.0)
    assert bias.pull() == 3.0
    there = other.open("t")
    assert isinstance(there, eps.SparseTable)
    assert len(there) == 3_000
    np.testing.assert_array_equal(there.pull(KEYS), table.pull(KEYS))
    assert table.slots(KEYS)["sum"].any()
    np.testing.assert_array_equal(there.slots(KEYS)["sum"], table.slots(KEYS)["sum"])
    table.load(KEYS, ROWS)
    assert (table.slots(KEYS)["sum"] == table.slots([1])["sum"]).all()
    with pytest.raises(eps.InputError, match="has slots sum, not m"):
        table.load(KEYS, ROWS, slots={"m": ROWS})
    dense = other.tensor("mlp.0.weight", init=tensor.pull() * 0, optimizer=eps.Adam(lr=0.1))
    np.testing.assert_array_equal(dense.pull(),
                                  tensor.pull())  # fmt: skip


def test_safetensors_have_the_names_that_torch_uses(connect: Connect, tmp_path: Path) -> None:
    ps = connect()
    table, tensor = a_model(ps)
    export(ps, tmp_path / "out", dtype="float16", with_slots=True)
    found = {
        name: array for path in (tmp_path / "out").glob("*.safetensors") for name, array in load_file(path).items()
    }
    slots = ["mlp.0.weight", *(f"mlp.0.weight.{slot}" for slot in ("exp_avg", "exp_avg_sq", "step"))]
    assert sorted(found) == [f"embedding_bags.t.{column}" for column in ("keys", "sum", "weight")] + slots
    assert found["mlp.0.weight.step"].tolist() == [1.0]
    np.testing.assert_array_equal(found["mlp.0.weight.exp_avg"], np.full((30, 70), 0.1, np.float32))
    keys = found["embedding_bags.t.keys"]
    np.testing.assert_array_equal(np.sort(keys), np.sort(KEYS))
    np.testing.assert_array_equal(found["embedding_bags.t.weight"], table.pull(keys).astype(np.float16))
    np.testing.assert_array_equal(found["embedding_bags.t.sum"], table.slots(keys)["sum"])
    np.testing.assert_array_equal(found["mlp.0.weight"], tensor.pull().astype(np.float16))


def test_a_torch_model_is_loaded_into_tables_and_exported(connect: Connect, tmp_path: Path) -> None:
    ps = connect()
    table = ps.table("items", dim=4, optimizer=eps.Adagrad(lr=0.1))
    torch.manual_seed(1)
    bag = nn.EmbeddingBag(100, 4)
    torch.save({"deep.weight": torch.ones(3), "embedding_bags.items.weight": bag.weight}, tmp_path / "model.pt")
    assert load(ps, tmp_path / "model.pt") == {"items": 100}
    np.testing.assert_array_equal(table.pull(np.arange(100)), bag.weight.detach().numpy())
    table.clear()
    torch.save({"old.emb": bag.weight}, tmp_path / "other.pt")
    with pytest.raises(eps.UnknownTable, match="nothing for the tables"):
        load(ps, tmp_path / "other.pt")
    assert load(ps, tmp_path / "other.pt", names={"old.emb": "items"}) == {"items": 100}
    np.testing.assert_array_equal(table.pull(np.arange(100)), bag.weight.detach().numpy())


def test_the_demos_model_is_the_same_in_plain_torch(
    connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ps = connect()
    torch.manual_seed(0)
    rows, init = eps.Adagrad(lr=0.5), eps.Normal(std=0.5, seed=1)
    genres = EmbeddingBag(ps, "genres", ROW, "mean", optimizer=rows, init=init, padding_idx=NO_GENRE)
    model = DeepFM(Embedding(ps, "features", ROW, optimizer=rows, init=init), genres)
    optimizer = Optimizer(ps, model, optimizer=eps.Adam(lr=0.01), prefix="deepfm")
    ids, some = torch.randint(0, 500, (200, len(FIELDS))), torch.randint(0, 20, (200, 3))
    for _ in range(2):
        model(ids[:50], some[:50]).sum().backward()
        optimizer.step()
    ps.flush()
    export(ps, tmp_path / "out", rows={"features": 500, "genres": 20})
    monkeypatch.setattr(sys, "argv", ["plain_torch.py", str(tmp_path / "out")])
    plain = runpy.run_path("examples/plain_torch.py")["model"].eval()
    with torch.inference_mode():
        torch.testing.assert_close(plain(ids, some), model.eval()(ids, some), rtol=0, atol=1e-6)
    torch.save(full_state_dict(model), tmp_path / "full.pt")
    ps.open("features").clear()  # type: ignore[union-attr]
    assert load(ps, tmp_path / "full.pt")["features"] > 0


def test_impossible_exports_and_loads_are_refused(connect: Connect, tmp_path: Path) -> None:
    ps = connect()
    a_model(ps)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    with pytest.raises(eps.ConfigError, match="not an empty folder"):
        export(ps, tmp_path / "full")
    for arguments in ({"kind": "csv"}, {"dtype": "int8"}, {"rows": {"mlp.0.weight": 3}}, {"tables": ["x"]}):
        with pytest.raises((eps.ConfigError, eps.UnknownTable)):
            export(ps, tmp_path / "out", **arguments)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full"]
    export(ps, tmp_path / "out")
    for name in ("out/t.weight.safetensors", "cut.pt", "cut.npz", "cut.parquet", "out/elasticps.json", "none.pt"):
        path = tmp_path / name
        if "none" not in name:
            path.write_bytes(b"\x08\0\0\0\0\0\0\0{}")
        source = path.parent if path.suffix == ".json" else path
        with pytest.raises(eps.ConfigError, match="cannot be read"):
            load(ps, source)


def test_filters_are_exported_and_loaded(connect: Connect, tmp_path: Path) -> None:
    ps = connect()
    optimizer = eps.SGD(lr=0.1)
    ps.table("t", dim=4, optimizer=optimizer, push=[eps.BFloat16()], pull=[eps.BFloat16()])
    ps.tensor("w", init=np.ones(5, np.float32), optimizer=optimizer, push=[eps.BFloat16()])
    export(ps, tmp_path / "out")
    other = connect("w1", app=f"{ps.app}-other")
    load(other, tmp_path / "out")
    assert {name: one.spec for name, one in other.tables().items()} == {n: one.spec for n, one in ps.tables().items()}


@pytest.mark.parametrize("kind", ["safetensors", "npz", "npy", "parquet"])
def test_numbers_that_float16_cannot_hold_are_refused(connect: Connect, tmp_path: Path, kind: str) -> None:
    ps = connect()
    table = ps.table("t", dim=2, optimizer=eps.SGD(lr=0.1))
    table.load(np.arange(2), np.array([[65504, 1], [np.inf, -65504]], np.float32))
    export(ps, tmp_path / "fits", kind=kind, dtype="float16")
    if kind == "safetensors":
        found = load_file(tmp_path / "fits" / "t.weight.safetensors")["embedding_bags.t.weight"]
        assert np.sort(found.ravel()).tolist() == [-65504, 1, 65504, np.inf]
    table.load(np.arange(1), np.array([[1e5, 1]], np.float32))
    with pytest.raises(eps.ConfigError, match=r"'t' has weights above 65504, which float16 cannot hold"):
        export(ps, tmp_path / "out", kind=kind, dtype="float16")
    assert [path.name for path in tmp_path.iterdir()] == ["fits"]


@pytest.mark.parametrize("kind", ["safetensors", "npz", "npy", "parquet"])
def test_an_export_to_a_full_disk_leaves_no_files(
    connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    ps = connect()
    a_model(ps)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def tell(rows: int) -> None:  # in the midst of it
        resource.setrlimit(resource.RLIMIT_FSIZE, (8_000, limits[1]))

    try:
        with pytest.raises(OSError, match="File too large"):
            export(ps, tmp_path / "out", kind=kind, tables=["t"], tell=tell)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [*tmp_path.iterdir()] == []


def test_a_second_export_to_the_same_folder_is_refused(connect: Connect, tmp_path: Path) -> None:
    ps = connect()
    a_model(ps)
    refused: list[str] = []

    def tell(rows: int) -> None:
        if not refused:
            with pytest.raises(eps.ConfigError, match="is being written by another export") as caught:
                export(ps, tmp_path / "out")
            refused.append(str(caught.value))

    assert export(ps, tmp_path / "out", tables=["t"], tell=tell) == {"t": 3_000}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    (tmp_path / "file").write_text("")
    with pytest.raises(eps.ConfigError, match="cannot be made: its parent is no folder"):
        export(ps, tmp_path / "file" / "out")
    (tmp_path / "out" / "t.weight.safetensors").unlink()
    with pytest.raises(eps.ConfigError, match="has no rows of table 't': a file of it is missing"):
        load(ps, tmp_path / "out")


def test_the_commands_export_and_load(cluster: eps.LocalCluster, connect: Connect, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    ps = connect()
    table, _ = a_model(ps)
    before = table.pull(KEYS)
    where = ["--url", cluster.url, "--app", ps.app]
    done = CliRunner().invoke(command_line, ["export", "--to", str(tmp_path / "out"), "--tables", "t", *where])
    assert (done.exit_code, "1 tables, 3,000 rows" in done.output) == (0, True), done.output
    table.clear()
    done = CliRunner().invoke(command_line, ["import", str(tmp_path / "out"), *where])
    assert (done.exit_code, "1 tables, 3,000 rows" in done.output) == (0, True), done.output
    np.testing.assert_array_equal(table.pull(KEYS), before)
