"""`elasticps checkpoint`: what is there, whether it is whole, and what goes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from elasticps.checkpoint.manifest import WorkerEntry
from elasticps.checkpoint.manifest import _sum as checksum_of
from elasticps.checkpoint.storage import Storage
from elasticps.cli.app import app
from elasticps.cli.options import names
from elasticps.model import spec
from elasticps.model.spec import TableSpec
from tests.checkpoint.writer import Change, row, write

TABLE = TableSpec("t", 3, spec.Adagrad(0.1))
TABLES = {"default/t": (7, TABLE)}


def run(*arguments: object, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["checkpoint", *map(str, arguments)])
    assert done.exit_code == code, done.output
    return done.output


@pytest.fixture
def place(tmp_path: Path) -> Path:
    storage = Storage(str(tmp_path / "there"))
    for cut in (1, 2, 3):
        change = Change({key: row(TABLE, cut + key) for key in range(10 * cut)})
        write(storage, cut, TABLES, {"default/t": change}, since=cut - 1, time=1e9 + cut,
              workers={"w0": WorkerEntry(5, "default", 12)})  # fmt: skip
    return tmp_path / "there"


def test_checkpoints_are_listed_and_shown(place: Path, tmp_path: Path) -> None:
    assert "2001-09-09 01:46:43 UTC" in run("list", place)
    there = json.loads(run("list", place, "--json"))
    assert [(one["cut"], one["since"], one["rows"]) for one in there["checkpoints"]] == [
        (1, 0, 10),
        (2, 1, 20),
        (3, 2, 30),
    ]
    shown = run("show", place)
    for text in ("checkpoint 3 of cluster c@1", "builds on 1, 2", "default/t", "w0", "12"):
        assert text in shown
    assert json.loads(run("show", place, 2, "--json"))["cut"] == 2
    assert "has no checkpoint" in run("list", tmp_path / "nothing")
    assert "has no checkpoint 9" in run("show", place, 9, code=2)
    assert "checkpoint 9 is not there" in run("delete", place, 9, code=2)
    (place / "000003" / "manifest.json").write_text("{")
    assert "000003" in run("list", place, code=4)
    assert "cut off" in run("verify", place, code=1)


def test_damaged_checkpoints_are_found(place: Path) -> None:
    assert "checkpoint 1, 2, 3: 0 problems, 60 rows" in run("verify", place)
    (path,) = place.glob("000001/t-7/s0-*.safetensors")
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)
    found: Any = json.loads(run("verify", place, "--json", code=1))
    assert len(found["problems"]) == 1
    assert "was altered" in found["problems"][0]
    assert json.loads(run("verify", place, 1, "--json", code=1))["checkpoints"] == [1]


def test_checkpoints_are_merged_and_deleted(place: Path) -> None:
    assert "checkpoint 3 builds on 2" in run("delete", place, 2, code=1)
    assert "say which" in run("delete", place, code=2)
    assert "--keep takes" in run("delete", place, "--keep", "newest=1", code=2)
    assert "deleted: nothing" in run("delete", place, "--keep", "last=1")  # all are built on
    assert "checkpoint 3 is full: 30 rows" in run("merge", place)
    (place / "000004" / "t-7").mkdir(parents=True)
    (place / "000004" / "t-7" / "s0-1.000.safetensors").write_text("given up")
    (place / "000003" / "t-7" / "merged-x.000.safetensors").write_text("a merge that died")
    assert "checkpoint 3: 1 files, 17 B" in " ".join(run("verify", place).split())
    assert json.loads(run("verify", place, "--json"))["unnamed"] == {"3": {"files": 1, "bytes": 17}}
    assert "deleted: nothing" in run("delete", place, "--left-overs")
    assert "deleted: 3, 4" in run("delete", place, "--left-overs", "--still", 0)
    assert json.loads(run("verify", place, "--json"))["unnamed"] == {}
    assert "deleted: 2, 1" in run("delete", place, "--keep", "last=1,hourly=1,daily=2")
    assert "checkpoint 3: 0 problems, 30 rows" in run("verify", place)
    assert sorted(path.name for path in place.iterdir()) == ["000003"]


def test_names_in_brackets_are_shown_as_they_are(tmp_path: Path) -> None:
    """Brackets are no style of text."""
    table = TableSpec("emb[user]", 3, spec.SGD(0.1))
    write(
        Storage(str(tmp_path)), 1, {"default/emb[user]": (7, table)}, {}, workers={"w0": WorkerEntry(5, "default", 12)}
    )
    assert "default/emb[user]" in run("show", tmp_path)


def test_names_with_commas_stand_in_quotes() -> None:
    assert names('"user,item", b,c') == ["user,item", "b", "c"]
    assert names("") == []
    assert names("a,,b") == ["a", "b"]


def test_a_tensor_too_large_for_any_machine_is_no_table(tmp_path: Path) -> None:
    """As somebody has written it into a manifest."""
    table = TableSpec.dense("w", (3, 5), spec.SGD(0.1))
    write(Storage(str(tmp_path)), 1, {"default/w": (7, table)}, {})
    path = tmp_path / "000001" / "manifest.json"
    document = json.loads(path.read_text())
    for shape, says in (([1 << 40, 1 << 40], "has at most 2^40 floats"), ([1 << 20, 1 << 20], "memory does not hold")):
        document["tables"]["default/w"]["spec"]["shape"] = shape
        document["tables"]["default/w"]["spec"]["dim"] = 16_384
        printed = {name: value for name, value in document.items() if name not in ("version", "blake2b")}
        path.write_text(json.dumps(document | {"blake2b": checksum_of(printed)}))
        for command in (["export", "--from-checkpoint", str(tmp_path), "--to", str(tmp_path / "out")],):
            done = CliRunner().invoke(app, command)
            assert done.exit_code in (1, 2)
            assert isinstance(done.exception, SystemExit), done.exception
            assert says in " ".join(done.output.split())
