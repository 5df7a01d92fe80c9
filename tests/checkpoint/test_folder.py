"""Folders of checkpoints into which others may write: no link is followed, and no pipe waited for."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from elasticps.checkpoint import catalog
from elasticps.checkpoint.storage import NotThere, Storage
from elasticps.errors import CheckpointError
from elasticps.model import spec
from elasticps.model.spec import TableSpec
from tests.checkpoint.writer import Change, row, write

TABLE = TableSpec("t", 3, spec.SGD(0.1))
OLD_S = 1_000_000.0


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A foreign folder with an old file and an empty folder."""
    home = tmp_path / "home"
    (home / "empty" / "deeper").mkdir(parents=True)
    (home / "thesis").write_text("years of work")
    os.utime(home / "thesis", (OLD_S, OLD_S))
    return home


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    storage = Storage(str(tmp_path / "place"))
    write(storage, 1, {"default/t": (7, TABLE)}, {"default/t": Change({1: row(TABLE, 1)})})
    return storage


def test_files_below_a_link_are_neither_listed_nor_deleted(storage: Storage, home: Path, tmp_path: Path) -> None:
    (tmp_path / "place" / "000002").symlink_to(home)
    (tmp_path / "place" / "000001" / "more").symlink_to(home)
    (tmp_path / "place" / "000003").mkdir()
    (tmp_path / "place" / "000003" / "below").symlink_to(home)
    assert storage.folders() == ["000001", "000003"]
    assert not [path for path, _ in storage.files() if "thesis" in path]
    assert storage.files("000002") == []
    catalog.clean(storage, still_s=0.0)
    catalog.clean(storage, cluster="c@1", below=9)
    assert not storage.drop_empty("000002")
    for path in ("000002/thesis", "000001/more/thesis"):
        with pytest.raises(CheckpointError, match="link, which is not followed"):
            storage.delete([path])
        with pytest.raises(CheckpointError, match="link, which is not followed"):
            storage.get(path)
        with pytest.raises(CheckpointError, match="link, which is not followed"):
            storage.put(path, b"")
    catalog.delete(storage, [1])
    assert sorted(path.name for path in home.rglob("*")) == ["deeper", "empty", "thesis"]
    assert (home / "thesis").read_text() == "years of work"


def test_a_link_in_place_of_a_file_is_replaced_and_not_written_through(
    storage: Storage, home: Path, tmp_path: Path
) -> None:
    (tmp_path / "place" / "000001" / "x").symlink_to(home / "thesis")
    with pytest.raises(CheckpointError, match="link, which is not followed"):
        storage.get("000001/x")
    assert not storage.put_new("000001/x", b"new")
    storage.put("000001/x", b"new")
    assert storage.get("000001/x") == b"new"
    assert (home / "thesis").read_text() == "years of work"


def test_a_pipe_in_place_of_a_manifest_is_refused_at_once(storage: Storage, tmp_path: Path) -> None:
    (tmp_path / "place" / "000002").mkdir()
    os.mkfifo(tmp_path / "place" / "000002" / "manifest.json")
    for read in (lambda: catalog.read(storage, 2), lambda: storage.exists("000002/manifest.json")):
        with pytest.raises(CheckpointError, match=r"000002/manifest\.json cannot be .*it is no file"):
            read()
    assert list(catalog.look(storage).unreadable) == [2]
    assert storage.files("000002") == []


def test_paths_that_lead_out_of_the_folder_are_refused(storage: Storage) -> None:
    for path in ("../x", "000001/../../x", "/etc/passwd", "000001//x", ""):
        with pytest.raises(CheckpointError, match="no path below a folder"):
            storage.put(path, b"")
        with pytest.raises(CheckpointError, match="no path below a folder"):
            storage.get(path)


def test_a_folder_is_deleted_with_its_last_file_and_made_with_the_next(tmp_path: Path) -> None:
    """While one process deletes and another writes, no write is lost."""
    place = tmp_path / "place"
    program = """
import sys
from elasticps.checkpoint.storage import Storage
storage = Storage(sys.argv[1])
while True:
    storage.delete(["000001/t/a"])
"""
    storage = Storage(str(place))
    storage.put("000001/keep", b"")
    deleter = subprocess.Popen([sys.executable, "-c", program, str(place)])
    try:
        for i in range(60):
            storage.put("000001/t/a", b"x")
            storage.put_new(f"000001/t/b{i}", b"x")
    finally:
        deleter.kill()
        deleter.wait()
    storage.delete([f"000001/t/b{i}" for i in range(60)] + ["000001/t/a"])
    assert storage.files() == [("000001/keep", 0)]
    assert [path.name for path in (place / "000001").iterdir()] == ["keep"]


def test_files_are_dated_by_the_disk(storage: Storage) -> None:
    (file,) = [file for file in storage.listing() if file.path.endswith("manifest.json")]
    assert abs(file.time - time.time()) < 3600
    with pytest.raises(NotThere):
        storage.get("000009/x")
