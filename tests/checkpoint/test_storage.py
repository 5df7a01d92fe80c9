"""Folders and memory keep the same promises as storage of checkpoints."""

from __future__ import annotations

import subprocess
import sys
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from typer.testing import CliRunner

from elasticps.checkpoint.storage import NotThere, Storage
from elasticps.cli.app import app
from elasticps.errors import CheckpointError


@pytest.fixture(params=["file", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return Storage(str(tmp_path / "there" / "deep") if request.param == "file" else f"memory://{uuid.uuid4()}")


def test_a_file_that_was_put_can_be_read_and_listed(storage: Storage) -> None:
    assert storage.files() == []
    assert storage.folders() == []
    storage.put("000001/a b%2Fc/x", b"first")
    storage.put("000001/a b%2Fc/x", memoryview(b"second"))
    storage.put("000002/y", bytes(3 << 20))
    assert storage.get("000001/a b%2Fc/x") == b"second"
    assert storage.get_range("000001/a b%2Fc/x", 1, 3) == b"eco"
    assert [bytes(part) for part in storage.get_ranges("000001/a b%2Fc/x", [(4, 2), (0, 0), (0, 1)])] == [
        b"nd",
        b"",
        b"s",
    ]
    assert storage.files() == [("000001/a b%2Fc/x", 6), ("000002/y", 3 << 20)]
    assert storage.files("000002") == [("000002/y", 3 << 20)]
    assert storage.files("nothing") == []
    assert storage.folders() == ["000001", "000002"]
    storage.delete(["000002/nothing", "000002/y"])
    assert storage.folders() == ["000001"]


def test_only_one_of_several_writers_creates_a_file(storage: Storage) -> None:
    contents = [str(i).encode() * 1000 for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(lambda content: storage.put_new("x/manifest", content), contents))
    assert won.count(True) == 1
    assert storage.get("x/manifest") == contents[won.index(True)]
    assert not storage.put_new("x/manifest", b"late")
    assert [path for path, _ in storage.files()] == ["x/manifest"]


def test_a_missing_file_is_reported(storage: Storage) -> None:
    with pytest.raises(NotThere, match="000001/x cannot be read: it is not there"):
        storage.get("000001/x")
    storage.put("000001/x", b"123")
    with pytest.raises(NotThere):
        storage.get_range("000001/y", 0, 1)
    for start, length in ((0, 4), (2, 2), (3, 1), (9, 1)):
        with pytest.raises(CheckpointError, match="000001/x"):
            storage.get_range("000001/x", start, length)


def test_looking_makes_no_folder(tmp_path: Path) -> None:
    storage = Storage((tmp_path / "nothing").as_uri())
    assert storage.files() == []
    assert storage.folders() == []
    with pytest.raises(NotThere):
        storage.get("x")
    storage.delete(["x"])
    assert not (tmp_path / "nothing").exists()


def test_an_unusable_url_is_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be"):
        Storage(str(tmp_path / "file" / "below")).put("x", b"")
    with pytest.raises(CheckpointError, match="ftp://x/y cannot be opened"):
        Storage("ftp://x/y")
    with pytest.raises(CheckpointError, match="three slashes"):
        Storage("file://data/checkpoints")
    for nowhere in ("", "  "):
        with pytest.raises(CheckpointError, match="place of checkpoints is empty: name a folder, or a URL"):
            Storage(nowhere)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("file:///data/run#1", "no part behind '#'; if it belongs to a name, write %23 for it"),
        ("file:///data/run?1", "no part behind '[?]'; .* write %3F for it, or give a folder as a path without file://"),
        ("file:///data/run#", "no part behind '#'"),
        ("s3://bucket/run#1", "no part behind '#'"),
        ("gs://bucket/run?x=1", "no part behind"),
        ("az://container/run#1", "no part behind '#'"),
        ("memory://a#b", "no part behind '#'"),
        ("s3://user:secret@bucket/run", "behind s3:// comes a bucket's name"),
        ("s3://bucket:9000/run", "behind s3:// comes a bucket's name"),
        ("file:data/run", "has three slashes: file:///folder; a folder of that name is ./file:data/run"),
        ("FILE:/data/run", "has three slashes"),
        ("s3:bucket/run", "has two slashes: s3://"),
        ("file:///", "names no folder"),
        ("s3://", "names no bucket"),
        ("s3:///run", "names no bucket"),
        ("s3://bucket/a/../b", "would be taken for s3://bucket/b: write it as that"),
        ("s3://bucket/%2e%2e/b", "would be taken for s3://bucket/b: write it as that"),
        ("file://[x/run", "is no URL of checkpoints"),
    ],
)
def test_url_parts_without_meaning_are_refused(url: str, says: str) -> None:
    """Else two places are one: checkpoints of one cluster would be taken for those of another."""
    with pytest.raises(CheckpointError, match=says):
        Storage(url)
    done = CliRunner().invoke(app, ["checkpoint", "list", url])
    assert done.exit_code == 2, done.output


def test_names_with_marks_of_urls_are_folders_of_their_own(tmp_path: Path) -> None:
    names = ["run", "run#1", "run?1", "run%231", "a b", "run;x"]
    for name in names:
        Storage(str(tmp_path / name)).put("x", name.encode())
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    for name in names:
        assert Storage(Storage(str(tmp_path / name)).url).get("x") == name.encode()
    assert Storage(f"file://localhost{tmp_path}/run%231").get("x") == b"run#1"


@pytest.mark.parametrize(
    "url", ["s3://b/run%231", "s3://b/p/q", "s3://b", "gs://b/p/q", "az://c/p", "az://c/p/q", "az://c", "abfs://c/p"]
)
def test_a_bucket_s_prefix_is_all_that_follows_its_name(url: str) -> None:
    options = {"account_name": "x"} if url.startswith("a") else {}
    store = Storage(url, **options)._objects
    assert (getattr(store, "prefix", None) or "") == url.partition("://")[2].partition("/")[2].replace("%23", "#")


def test_a_full_disk_is_reported_and_leaves_no_half_file(tmp_path: Path) -> None:
    program = """
import resource, sys
from elasticps.cli.app import app
from elasticps.checkpoint.storage import Storage
from elasticps.errors import CheckpointError
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
storage = Storage(sys.argv[1])
for put in (storage.put, storage.put_new):
    try:
        put("000001/x", bytes(200_000))
    except CheckpointError as error:
        assert "000001/x cannot be written" in str(error) and "File too large" in str(error), error
    else:
        raise SystemExit("written")
assert [path for path, _ in storage.files()] == [], storage.files()
"""
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "disk")], check=True, timeout=60)
