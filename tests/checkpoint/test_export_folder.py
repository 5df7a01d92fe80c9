"""An export writes into a folder of its own and leaves its neighbours alone."""

from __future__ import annotations

import json
import logging
import os
import uuid
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from elasticps.checkpoint.storage import Storage
from elasticps.cli.app import app
from elasticps.errors import ConfigError
from elasticps.exchange.checkpoint import export_checkpoint
from elasticps.model import spec
from elasticps.model.spec import TableSpec
from elasticps.system import temporary
from tests.checkpoint.writer import Change, row, write

TABLE = TableSpec("t", 3, spec.SGD(0.1))


@pytest.fixture(scope="module")
def place() -> str:
    url = f"memory://{uuid.uuid4()}"
    write(Storage(url), 1, {"default/t": (7, TABLE)}, {"default/t": Change({1: row(TABLE, 1)})})
    return url


def test_a_link_under_the_temporary_name_of_an_earlier_version_is_not_followed(place: str, tmp_path: Path) -> None:
    home, shared = tmp_path / "home", tmp_path / "shared"
    home.mkdir()
    shared.mkdir()
    (home / "thesis").write_text("years of work")
    (shared / ".out.part").symlink_to(home)
    (shared / ".mine.part").mkdir()
    (shared / ".mine.part" / "notes").write_text("x")
    for name in ("out", "mine"):
        assert export_checkpoint(place, shared / name) == {"t": 1}
    assert [path.name for path in home.iterdir()] == ["thesis"]
    assert (shared / ".mine.part" / "notes").read_text() == "x"
    assert sorted(path.name for path in shared.iterdir()) == [".mine.part", ".out.part", "mine", "out"]


@pytest.mark.parametrize("kind", ["safetensors", "npz", "npy", "parquet"])
def test_no_link_in_the_folder_that_is_written_is_followed(
    place: str, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever may write there is quick, and puts a link where a file of the export is to be."""
    victim = tmp_path / "victim"
    victim.write_text("years of work")
    names = {
        "safetensors": "t.weight.safetensors",
        "npz": "t.npz.weight",
        "npy": "t.weight.npy",
        "parquet": "t.parquet",
    }

    real = Path.mkdir

    def mkdir(path: Path, *given: Any, **more: Any) -> None:
        real(path, *given, **more)
        if path.name.endswith(".part"):
            os.symlink(victim, path / names[kind])

    monkeypatch.setattr(Path, "mkdir", mkdir)
    if kind == "safetensors":  # takes another name
        assert export_checkpoint(place, tmp_path / "out", kind=kind) == {"t": 1}
    else:
        with pytest.raises(FileExistsError):
            export_checkpoint(place, tmp_path / "out", kind=kind)
        assert not (tmp_path / "out").exists()
    assert victim.read_text() == "years of work"


def test_the_folder_of_a_dead_export_stays_and_is_named(
    place: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def tell(rows: int) -> None:
        (left,) = tmp_path.glob(".*")
        foreign = tmp_path / f"{left.name[: -len('.part') - 1]}{'0' if left.name[-6] != '0' else '1'}.part"
        foreign.mkdir()
        (foreign / "t.weight.safetensors").write_text("left by an export that died")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_checkpoint(place, tmp_path / "out", tell=tell)
    (left,) = tmp_path.iterdir()
    with caplog.at_level(logging.WARNING):
        assert export_checkpoint(place, tmp_path / "out") == {"t": 1}
    assert "an export that died has left its folder" in caplog.text
    assert str(left) in caplog.text
    assert sorted(path.name for path in tmp_path.iterdir()) == [left.name, "out"]


def test_a_folder_that_was_replaced_while_it_was_written_is_not_published(place: str, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis").write_text("years of work")

    def tell(rows: int) -> None:
        (part,) = tmp_path.glob(".*")
        if not part.is_symlink():
            part.rename(tmp_path / "moved")
            part.symlink_to(home)

    with pytest.raises(ConfigError, match="somebody has replaced"):
        export_checkpoint(place, tmp_path / "out", tell=tell)
    assert (home / "thesis").read_text() == "years of work"
    assert not (tmp_path / "out").exists()


def test_a_target_that_appears_during_the_export_stays(place: str, tmp_path: Path) -> None:
    def tell(rows: int) -> None:
        (tmp_path / "out").mkdir(exist_ok=True)
        (tmp_path / "out" / "x").write_text("x")

    with pytest.raises(ConfigError, match="was made by somebody else meanwhile"):
        export_checkpoint(place, tmp_path / "out", tell=tell)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "x").read_text() == "x"


def test_a_link_in_place_of_the_target_is_refused(place: str, tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="is a link: name the folder itself"):
        export_checkpoint(place, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_current_folder_and_long_names_are_targets(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    export_checkpoint(place, Path("."))
    assert json.loads((tmp_path / "here" / "elasticps.json").read_text())["tables"]
    long = tmp_path / ("n" * 255)
    export_checkpoint(place, long)
    assert (long / "elasticps.json").exists()
    assert long.stat().st_mode & 0o777 == (tmp_path / "here").stat().st_mode & 0o777


def test_a_file_is_replaced_without_touching_its_neighbours(tmp_path: Path) -> None:
    victim, file = tmp_path / "victim", tmp_path / "key.pem"
    victim.write_text("x")
    (tmp_path / ".key.pem.new").symlink_to(victim)
    temporary.replace_file(file, b"secret", 0o600)
    temporary.replace_file(file, b"other", 0o600)
    assert (file.read_bytes(), file.stat().st_mode & 0o777, victim.read_text()) == (b"other", 0o600, "x")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".key.pem.new", "key.pem", "victim"]
    with pytest.raises(OSError, match="nothing") as caught:
        temporary.replace_file(tmp_path / "nothing" / "x", b"")
    assert "nothing" in str(caught.value.filename)


@pytest.mark.parametrize("kind", ["safetensors", "npz", "npy", "parquet"])
def test_a_full_disk_is_an_error_that_names_the_folder_and_nothing_is_left(
    place: str, small_disk: Path, kind: str
) -> None:
    """Rows in order wait in files that are written through memory: no signal ends the process."""
    for rows in (40_000, 15_000)[: 1 + (kind != "parquet")]:  # what waits has no room, or what is written of it
        with pytest.raises(OSError, match="No space left on device") as caught:
            export_checkpoint(place, small_disk / "out", kind=kind, rows={"t": rows})
        assert caught.value.filename == str(small_disk / "out")
        assert [*small_disk.iterdir()] == []
    arguments = ["export", "--from-checkpoint", place, "--to", str(small_disk / "out"), "--rows", "t=40000"]
    done = CliRunner().invoke(app, [*arguments, "--format", kind])
    assert (done.exit_code, f"{small_disk / 'out'}: No space left on device" in " ".join(done.output.split())) == (
        1,
        True,
    )
