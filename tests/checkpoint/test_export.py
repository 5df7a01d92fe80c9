"""The model of a checkpoint as files, without a cluster."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load as torch_load
from typer.testing import CliRunner

from elasticps.checkpoint.storage import Storage
from elasticps.cli.app import app
from elasticps.errors import CheckpointError, ConfigError, UnknownTable
from elasticps.exchange import checkpoint as exporting
from elasticps.exchange import load
from elasticps.exchange.checkpoint import export_checkpoint
from elasticps.model import spec
from elasticps.model.spec import TableSpec
from elasticps.store.store import initial_rows
from tests.checkpoint.writer import Change, row, write

OPEN = TableSpec("open", 3, spec.Adam(0.1))
HALF = TableSpec("half", 4, spec.SGD(0.1), spec.Normal(std=1.0, seed=3), dtype="bfloat16")
DENSE = TableSpec.dense("mlp.weight", (3, 5), spec.SGD(0.1))
OTHER = TableSpec("t", 3, spec.SGD(0.1))
TABLES = {
    "default/open": (7, OPEN),
    "default/half": (9, HALF),
    "default/mlp.weight": (11, DENSE),
    "other/t": (12, OTHER),
}
ROWS = {key: row(OPEN, key + 99) for key in range(-20, 20)}
BLOCK = row(DENSE, 5)


def bfloat16(values: np.ndarray) -> bytes:
    return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()


@pytest.fixture(scope="module")
def place() -> str:
    url = f"memory://{uuid.uuid4()}"
    halves = {key: bfloat16(np.arange(4, dtype=np.float32) * key) for key in (0, 3, 50)}
    changes = {"default/open": Change(ROWS), "default/half": Change(halves), "default/mlp.weight": Change({0: BLOCK})}
    write(Storage(url), 1, TABLES, changes)
    write(Storage(url), 2, TABLES, {"default/open": Change({}, {-20})}, since=1)
    return url


def test_all_tables_of_an_application_are_exported(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporting, "CHUNK_BYTES", 100)
    reported: list[int] = []
    written = export_checkpoint(place, tmp_path / "out", with_slots=True, rows={"half": 9}, tell=reported.append)
    assert written == {"open": 39, "half": 9, "mlp.weight": 3}
    assert sum(reported) == 51
    files = {path.name: load_file(path) for path in (tmp_path / "out").glob("*.safetensors")}
    keys = files["open.keys.safetensors"]["embedding_bags.open.keys"]
    assert sorted(keys.tolist()) == sorted(ROWS.keys() - {-20})
    whole = np.stack([np.frombuffer(ROWS[key], np.float32) for key in keys.tolist()])
    assert files["open.weight.safetensors"]["embedding_bags.open.weight"].tobytes() == whole[:, :3].tobytes()
    at = 3
    for name, floats in OPEN.optimizer.slot_shapes(3).items():
        slots = files[f"open.{name}.safetensors"][f"embedding_bags.open.{name}"]
        assert slots.tobytes() == whole[:, at : at + floats].tobytes()
        at += floats
    half = files["half.weight.safetensors"]["embedding_bags.half.weight"]
    expected = initial_rows(HALF.init, np.arange(9), 4, "bfloat16")
    expected[[0, 3]] = np.outer([0, 3], np.arange(4))
    assert half.tobytes() == expected.tobytes()
    dense = files["mlp.weight.safetensors"]["mlp.weight"]
    assert dense.tobytes() == np.frombuffer(BLOCK, np.float32)[:15].tobytes()
    assert not list((tmp_path / "out").glob("tmp*"))
    manifest = json.loads((tmp_path / "out" / "elasticps.json").read_text())
    assert manifest["tables"]["half"]["keys"] is False


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_large_columns_are_parts_that_torch_puts_together(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elasticps.exchange.writers.PART_BYTES", 100)
    monkeypatch.setattr(exporting, "CHUNK_BYTES", 200)
    export_checkpoint(place, tmp_path / "out", tables=["half"], rows={"half": 40})
    assert len(list((tmp_path / "out").glob("half.weight*.safetensors"))) > 2
    expected = initial_rows(HALF.init, np.arange(40), 4, "bfloat16")
    expected[[0, 3]] = np.outer([0, 3], np.arange(4))
    state = {"embedding_bags.half.weight": torch.zeros(40, 4)}
    torch_load(state, storage_reader=HuggingFaceStorageReader(str(tmp_path / "out")))
    assert state["embedding_bags.half.weight"].numpy().tobytes() == expected.tobytes()
    column = load._columns(tmp_path / "out", "safetensors", "half", HALF, "embedding_bags.half")["weight"]
    for a, b in ((0, 40), (0, 1), (7, 29), (39, 40), (11, 12)):
        assert column(a, b).tobytes() == expected[a:b].tobytes()


@pytest.mark.parametrize("order", [1, -1])
def test_files_of_a_table_and_of_a_tensor_that_is_called_like_its_column(tmp_path: Path, order: int) -> None:
    url = f"memory://{uuid.uuid4()}"
    like = TableSpec.dense("open.weight", (3, 5), spec.SGD(0.1))
    tables = {"default/open": (7, OPEN), "default/open.weight": (8, like)}
    write(Storage(url), 1, tables, {"default/open": Change(ROWS), "default/open.weight": Change({0: BLOCK})})
    written = export_checkpoint(url, tmp_path / "out", tables=["open", "open.weight"][::order])
    assert written == {"open": 40, "open.weight": 3}
    found: dict[str, np.ndarray] = {}
    for path in (tmp_path / "out").glob("*.safetensors"):
        found |= load_file(path)
    assert found["embedding_bags.open.weight"].shape == (40, 3)
    assert found["open.weight"].tobytes() == np.frombuffer(BLOCK, np.float32)[:15].tobytes()
    columns = load._columns(tmp_path / "out", "safetensors", "open.weight", like, "open.weight")
    assert columns["weight"](0, 3).tobytes() == found["open.weight"].tobytes()


@pytest.mark.parametrize("kind", ["npz", "parquet"])
def test_older_checkpoints_are_exported_in_every_format(place: str, tmp_path: Path, kind: str) -> None:
    written = export_checkpoint(place, tmp_path / "out", cut=1, tables=["open"], kind=kind, dtype="float16")
    assert written == {"open": 40}
    assert (tmp_path / "out" / f"open.{kind}").exists()


def test_an_impossible_export_leaves_no_files(place: str, tmp_path: Path) -> None:
    with pytest.raises(UnknownTable, match="no table 't'"):
        export_checkpoint(place, tmp_path / "out", tables=["t"])
    with pytest.raises(ConfigError, match="which is no table"):
        export_checkpoint(place, tmp_path / "out", rows={"mlp.weight": 3})
    with pytest.raises(ConfigError, match="format must be one of"):
        export_checkpoint(place, tmp_path / "out", app="nobody", kind="xyz")
    storage, copied = Storage(place), Storage((tmp_path / "copied").as_uri())
    for path, _ in storage.files():
        data = bytearray(storage.get(path))
        data[-300] ^= path.startswith("000001/open")
        copied.put(path, data)
    with pytest.raises(CheckpointError, match="altered"):
        export_checkpoint(copied.url, tmp_path / "out", cut=1)
    arguments = ["export", "--from-checkpoint", copied.url, "--cut", "1", "--to", str(tmp_path / "out")]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 1
    assert "altered" in done.output
    assert CliRunner().invoke(app, [*arguments, "--tables", "nope"]).exit_code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["copied"]


def test_a_table_is_exported_in_portions(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for some of its rows is enough."""
    read, early = 0, list[int]()

    def weights(spec: TableSpec, rows: np.ndarray) -> np.ndarray:
        nonlocal read
        read += len(rows)
        return real(spec, rows)

    def tell(rows: int) -> None:
        nonlocal read
        read -= rows
        early.append(read)

    real = exporting.weights
    monkeypatch.setattr(exporting, "weights", weights)
    export_checkpoint(place, tmp_path / "out", tables=["open"], tell=tell)
    assert len(early) > 4
    assert not any(early)
