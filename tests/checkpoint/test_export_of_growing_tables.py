"""Exports of a checkpoint's rows by their usage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from typer.testing import CliRunner

from elasticps.checkpoint.storage import Storage
from elasticps.cli.app import app
from elasticps.errors import ConfigError
from elasticps.exchange import usage as exporting
from elasticps.exchange.checkpoint import export_checkpoint
from elasticps.exchange.usage import UsageFilter
from elasticps.model import policies, spec
from elasticps.model.spec import TableSpec
from tests.checkpoint.growing import NOW, Cluster
from tests.checkpoint.writer import Change, row, write

HALF_LIFE = 100.0
SCORED = TableSpec(
    "t", 3, spec.Accumulate(), spec.Zeros(), eviction=(policies.Capacity(1 << 20, "score", HALF_LIFE),)
)  # fmt: skip
PLAIN = TableSpec("plain", 3, spec.SGD(0.1))
DENSE = TableSpec.dense("dense", (2, 2), spec.SGD(0.1))
DAY = 86_400


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Keys 0..99 of which key k was pushed k + 1 times, 50 and more lastly a day later, and 98, 99 half a life after
    that."""
    cluster = Cluster(SCORED, url=tmp_path_factory.mktemp("checkpoints").as_uri())
    keys = np.arange(100)
    for times in range(100):
        if times == 50:
            cluster.advance(NOW + DAY)
        some = keys[times:]
        cluster.push(some, np.full((len(some), 4), 1.0))
    cluster.checkpoint(1, 0)
    cluster.advance(NOW + DAY + int(HALF_LIFE))
    cluster.push(keys[98:], np.full((2, 4), 1.0))
    cluster.checkpoint(2, 1)
    return cluster.storage.url


def exported(place: str, to: Path, **how: Any) -> dict[str, np.ndarray]:
    written = export_checkpoint(place, to, **how)
    files = {path.name.split(".")[1]: load_file(path) for path in to.glob("t.*.safetensors")}
    columns = {name: file[f"embedding_bags.t.{name}"] for name, file in files.items()}
    assert written == {"t": len(columns["keys"])}
    return columns


def test_rows_are_chosen_by_their_count_as_it_has_fallen(place: str, tmp_path: Path) -> None:
    every = exported(place, tmp_path / "every", with_usage=True)
    counts = dict(zip(every["keys"].tolist(), every["count"].tolist(), strict=True))
    assert counts[97] == pytest.approx(97 / 2 - 50 / 2 + 1 / 2, abs=0.1)  # what was pushed a day before has fallen to 0
    assert counts[99] == pytest.approx(50 / 2 + 1, abs=0.1)
    found = exported(place, tmp_path / "some", chosen_by=UsageFilter(min_count=10))
    assert set(found) == {"keys", "weight"}
    assert set(found["keys"].tolist()) == {key for key, count in counts.items() if count >= 10}
    assert 10 < len(found["keys"]) < 50


def test_rows_are_chosen_by_their_last_use(place: str, tmp_path: Path) -> None:
    found = exported(place, tmp_path / "some", chosen_by=UsageFilter(used_within="1h"), with_usage=True)
    assert sorted(found["keys"].tolist()) == list(range(50, 100))
    assert found["last_use"].dtype == np.int64
    last = dict(zip(found["keys"].tolist(), found["last_use"].tolist(), strict=True))
    assert (last[50], last[99]) == (NOW + DAY, NOW + DAY + 100)
    found = exported(place, tmp_path / "few", chosen_by=UsageFilter(used_within=HALF_LIFE - 1))
    assert sorted(found["keys"].tolist()) == [98, 99]


@pytest.mark.parametrize("top", [1, 2, 7, 40, 100, 1000])
def test_the_rows_with_the_largest_counts_are_exported(
    place: str, tmp_path: Path, top: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "_AT_ONCE", 3)
    every = exported(place, tmp_path / "every", with_usage=True)
    found = exported(place, tmp_path / "some", chosen_by=UsageFilter(top=top), with_usage=True)
    assert len(found["keys"]) == min(top, 100)
    left = ~np.isin(every["keys"], found["keys"])
    assert every["count"][left].max(initial=0) <= found["count"].min()
    assert set(found) == {"keys", "weight", "last_use", "count", "score"}


def test_bounds_are_taken_together(place: str, tmp_path: Path) -> None:
    by = UsageFilter(min_count=10, used_within="1h", top=5)
    found = exported(place, tmp_path / "some", chosen_by=by)
    assert len(found["keys"]) == 5
    assert exported(place, tmp_path / "none", chosen_by=UsageFilter(min_count=1e6))["keys"].shape == (0,)


def test_what_cannot_be_chosen_is_told(tmp_path: Path) -> None:
    url = (tmp_path / "place").as_uri()
    tables = {"default/plain": (7, PLAIN), "default/dense": (8, DENSE)}
    changes = {"default/plain": Change({1: row(PLAIN, 1)}), "default/dense": Change({0: row(DENSE, 1)})}
    write(Storage(url), 1, tables, changes)
    for how in ({"with_usage": True}, {"chosen_by": UsageFilter(top=1)}, {"chosen_by": UsageFilter(min_count=0)}):
        with pytest.raises(ConfigError, match="table 'plain' keeps no usage of its rows"):
            export_checkpoint(url, tmp_path / "out", **how)
    assert export_checkpoint(url, tmp_path / "out", tables=["dense"], with_usage=True) == {"dense": 2}
    for by, error in (
        (UsageFilter(min_count=-1), "min_count must be"),
        (UsageFilter(used_within="soon"), "used_within must be seconds or a text"),
        (UsageFilter(top=0), "top must be from 1"),
    ):
        with pytest.raises(ConfigError, match=error):
            export_checkpoint(url, tmp_path / "other", chosen_by=by)


def test_the_command_takes_bounds_of_a_checkpoint_alone(place: str, tmp_path: Path) -> None:
    how = ["--min-count", "10", "--used-within", "1h", "--top", "5", "--with-usage"]
    out = CliRunner().invoke(app, ["export", "--to", str(tmp_path / "out"), "--from-checkpoint", place, *how])
    assert out.exit_code == 0, out.output
    assert "1 tables, 5 rows" in out.output
    out = CliRunner().invoke(app, ["export", "--to", str(tmp_path / "live"), "--top", "5"])
    assert out.exit_code == 2
    assert "are for --from-checkpoint" in out.output
    with pytest.raises(ConfigError, match="leave --rows out"):
        export_checkpoint(place, tmp_path / "rows", rows={"t": 5}, with_usage=True)
