"""Damaged and foreign files are refused by `load` with the reason."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from elasticps.checkpoint.storage import Storage
from elasticps.client import Client
from elasticps.errors import ConfigError, UnknownTable
from elasticps.exchange import load as loading
from elasticps.exchange.checkpoint import export_checkpoint
from elasticps.exchange.export import MANIFEST, VERSION
from elasticps.model import spec
from elasticps.model.spec import TableSpec
from tests.checkpoint.writer import Change, row, write

OPEN = TableSpec("open", 3, spec.Adam(0.1))
ROWS = {key: row(OPEN, key) for key in range(20)}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    url = f"memory://{tmp_path_factory.mktemp('x')}"
    write(Storage(url), 1, {"default/open": (7, OPEN)}, {"default/open": Change(ROWS)})
    to = tmp_path_factory.mktemp("exports") / "out"
    export_checkpoint(url, to)
    return to


class Loaded:
    """A client with a table."""

    app = "default"

    def table(self, name: str, **options: Any) -> Any:
        return self

    def tables(self) -> dict[str, Any]:
        return {"open": self}

    open = table


@pytest.mark.parametrize(
    ("file", "damaged"),
    [
        ("open.weight.safetensors", b"\xff" * 100),
        ("open.weight.safetensors", (1 << 62).to_bytes(8, "little") + b"{}"),
        ("open.weight.safetensors", (1 << 46).to_bytes(8, "little") + b"{}"),
        ("open.weight.safetensors", (2).to_bytes(8, "little") + b"[]"),
        ("open.weight.safetensors", (100_000).to_bytes(8, "little") + b"[" * 100_000),
        ("open.weight.safetensors", b""),
        ("open.weight.safetensors", (18).to_bytes(8, "little") + b'{"__metadata__":0}'),
        ("elasticps.json", b"[]"),
        ("elasticps.json", b"[" * 100_000),
        ("elasticps.json", json.dumps({"version": 1, "format": "safetensors", "tables": []}).encode()),
        ("elasticps.json", json.dumps({"version": 1, "format": "safetensors", "tables": {"open": 3}}).encode()),
    ],
    ids=["bytes", "long", "memory", "list", "nested", "empty", "metadata", "a list", "deep", "no tables", "no table"],
)
def test_a_damaged_export_is_refused(exported: Path, tmp_path: Path, file: str, damaged: bytes) -> None:
    copied = tmp_path / "out"
    shutil.copytree(exported, copied)
    (copied / file).write_bytes(damaged)
    with pytest.raises(ConfigError, match="cannot be read"):
        loading.load(cast(Client, Loaded()), copied)


@pytest.mark.parametrize(("name", "kind"), [("../other", "npz"), ("open", "d/../../other.npz")])
def test_an_export_reads_no_file_beside_its_folder(tmp_path: Path, name: str, kind: str) -> None:
    folder = tmp_path / "out"
    (folder / "open.d").mkdir(parents=True)
    np.savez(tmp_path / "other.npz", keys=np.arange(2), weight=np.ones((2, 3), np.float32))
    described = {"spec": json.loads(OPEN.to_json()), "rows": 2}
    (folder / MANIFEST).write_text(json.dumps({"version": VERSION, "format": kind, "tables": {name: described}}))
    with pytest.raises(ConfigError, match=r"its elasticps\.json (has table 'open' as '\.\./other'|says 'd/)"):
        loading.load(cast(Client, Loaded()), folder)


def test_bfloat16_weights_of_a_safetensors_file(tmp_path: Path) -> None:
    given = {"open.weight": torch.randn(9, 3).bfloat16(), "one": torch.randn(()).bfloat16(), "f": torch.randn(5)}
    save_file(given, tmp_path / "m.safetensors")
    named = loading._named(tmp_path / "m.safetensors")
    for name, tensor in given.items():
        np.testing.assert_array_equal(named[name](), tensor.float().numpy(), strict=True)
    for a, b in ((0, 9), (2, 5), (8, 20), (9, 12)):
        part = loading._safetensors(tmp_path / "m.safetensors")["open.weight"](a, b)
        np.testing.assert_array_equal(part, given["open.weight"][a:b].float().numpy(), strict=True)


@pytest.mark.parametrize("saved", [torch.ones(3), [torch.ones(3)], {1: torch.ones(3)}, 7])
def test_a_torch_file_without_a_state_dict_is_refused(tmp_path: Path, saved: object) -> None:
    torch.save(saved, tmp_path / "m.pt")
    with pytest.raises((ConfigError, UnknownTable), match=r"m\.pt"):
        loading.load(cast(Client, Loaded()), tmp_path / "m.pt")
