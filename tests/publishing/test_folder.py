"""A folder of increments: it has what was published, wherever its publisher dies, and stays bounded."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from elasticps.errors import ConfigError, InputError, Timeout, UnknownTable
from elasticps.publishing import Publisher, folder_target, read_increments
from elasticps.publishing.core.batches import PendingChanges
from elasticps.publishing.core.increments import manifest_name, numbers, parse_manifest
from elasticps.publishing.folder import PublishedFolder
from elasticps.publishing.folder_target import FolderTarget
from elasticps.publishing.opening import target_of
from elasticps.publishing.targets import PublishedSource
from elasticps.system import temporary
from tests.publishing.fake_reader import DIM, FakeReader, row
from tests.waiting import eventually

SOURCE = PublishedSource("fake", "default", None)


def content(folder: PublishedFolder) -> dict[str, dict[int, list[float]]]:
    return {
        name: dict(zip(table.keys.tolist(), table.pull(table.keys).tolist(), strict=True))
        for name, table in folder.tables.items()
    }


def read_if_there(folder: Path) -> PublishedFolder | None:
    try:
        return read_increments(folder)
    except InputError as error:
        if "no rows yet" not in str(error) and "is no folder" not in str(error):
            raise
        return None


def test_a_folder_follows_changes_deletions_and_drops(tmp_path: Path) -> None:
    reader = FakeReader()
    reader.push("users", {1: 1, 2: 2})
    reader.push("items", {})
    with Publisher(reader, FolderTarget(str(tmp_path / "rows"), SOURCE, "float32", 0.01), "folder") as publisher:
        publisher.wait()
        found = read_increments(tmp_path / "rows")
        assert content(found) == reader.expected()
        for step in range(20):
            reader.push("users", {step: step, 2: 50 + step}, (1,) if step == 5 else ())
            reader.push("items", {step: 1})
        reader.drop("items")
        reader.push("items", {7: 7})
        reader.push("more", {1: 1})

        def same() -> bool:
            found.refresh()
            return content(found) == reader.expected()

        eventually(same)
        assert content(read_increments(tmp_path / "rows")) == reader.expected()
        assert found.as_of["steps"]["1"] > 0
        pulled = found.pull({"users": np.array([2, 999])})["users"]
        assert pulled.tolist() == [row(69), [0] * DIM]
        with pytest.raises(UnknownTable, match="nothing"):
            found.pull({"nothing": np.array([1])})
        with pytest.raises(InputError, match="keys must be int64, got float64"):
            found.pull({"users": np.array([2.5])})
        eventually(lambda: publisher.stats().deletions >= 1)
        assert publisher.stats().lag_s < 60
        assert publisher.stats().listings == 1
    assert reader.closed


def test_many_increments_become_a_new_base_and_old_files_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = FakeReader()
    reader.push("users", {1: 1})
    target = FolderTarget(str(tmp_path), SOURCE, "float16", 0.001)
    target.most_increments = 3
    with Publisher(reader, target, "folder") as publisher:
        publisher.wait()
        follower = read_increments(tmp_path)
        for step in range(40):
            reader.push("users", {step: step})
            expected = publisher.stats().batches + 1
            eventually(lambda expected=expected: publisher.stats().batches >= expected)  # type: ignore[misc]
            follower.refresh()
        eventually(lambda: content(read_increments(tmp_path)) == reader.expected())
        follower.refresh()
        assert content(follower) == reader.expected()
        assert publisher.stats().listings >= 4
        assert len(os.listdir(tmp_path)) <= 2 * (2 + 2 * 4) + 1


def test_the_next_publisher_goes_on_with_a_base_and_forgets_what_is_gone(tmp_path: Path) -> None:
    reader = FakeReader()
    reader.push("users", {1: 1})
    reader.push("old", {1: 1})
    for _ in range(3):
        with Publisher(reader, FolderTarget(str(tmp_path), SOURCE, "float32", 0.01), "folder") as publisher:
            publisher.wait()
        assert content(read_increments(tmp_path)) == reader.expected()
        reader.tables.pop("old", None)
        reader.tables["users"] = {2: 9}


def test_a_folder_is_readable_wherever_its_publisher_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends a publisher before each of its calls that change the folder; what is there then is a state that was
    published, the newest or the one before, and the next publisher goes on."""
    states: list[dict[str, dict[int, list[float]]]] = []

    class Died(BaseException):
        pass

    def run(folder: Path, dies_at: int) -> bool:
        """Publishes what a reader has, and three changes; whether it came to its end."""
        calls = 0

        def counted(function: Callable[..., object]) -> Callable[..., object]:
            def called(*args: object, **kwargs: object) -> object:
                nonlocal calls
                calls += 1
                if calls == dies_at:
                    raise Died
                return function(*args, **kwargs)

            return called

        with monkeypatch.context() as patch:
            patch.setattr(folder_target, "replace_file", counted(temporary.replace_file))
            patch.setattr(folder_target, "_sync", counted(folder_target._sync))
            patch.setattr(Path, "unlink", counted(Path.unlink))
            reader, pending = FakeReader(), PendingChanges()
            target = FolderTarget(str(folder), SOURCE, "float32", 0)
            target.most_increments = 2
            states.clear()
            states.append(reader.expected())
            try:
                for turn in range(4):
                    if turn in (0, 2):
                        target.open()
                        reader.push("users", {turn: 1 + turn, 7: turn})
                        reader.subscribe(pending.add)
                    reader.push("users", {10 + turn: turn}, (7,) if turn == 3 else ())
                    states.append(reader.expected())
                    batch = pending.take()
                    assert batch is not None
                    target.write(batch)
                return True
            except Died:
                return False
            finally:
                reader.unsubscribe(pending.add)
                target.close()

    for dies_at in range(1, 200):
        folder = tmp_path / str(dies_at)
        if dies_at % 2:
            run(folder, 10**9)  # a complete one before
        before = read_if_there(folder)
        ended = run(folder, dies_at)
        found = read_if_there(folder)
        if found is None:
            assert before is None
        else:
            possible = states + ([content(before)] if before else [])
            assert content(found) in possible
        assert run(folder, 10**9)
        assert content(read_increments(folder)) == states[-1]
        shutil.rmtree(folder)
        if ended:
            assert dies_at > 20
            return
    pytest.fail("it never came to its end")


def test_a_disk_that_refuses_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = FakeReader()
    reader.push("users", {1: 1})
    failing = iter([True, True])

    def replace_file(path: Path, data: bytes) -> None:
        if next(failing, False):
            raise OSError(28, "No space left on device", str(path))
        original(path, data)

    original = temporary.replace_file
    monkeypatch.setattr(folder_target, "replace_file", replace_file)
    with Publisher(reader, FolderTarget(str(tmp_path), SOURCE, "float32", 0.01), "folder") as publisher:
        publisher.wait()
        assert publisher.stats().retries == 2
    assert content(read_increments(tmp_path)) == reader.expected()


def test_whoever_waits_hears_why_a_disk_takes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = FakeReader()
    reader.push("users", {1: 1})

    def refuse(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(folder_target, "replace_file", refuse)
    with Publisher(reader, FolderTarget(str(tmp_path), SOURCE, "float32", 0.01), "folder") as publisher:
        for limits in ({"refused": 0.2}, {"timeout": 0.2}):
            with pytest.raises(Timeout, match=r"folder has not got all rows after .*: No space left on device; see"):
                publisher.wait(**limits)


def test_two_publishers_do_not_share_a_folder(tmp_path: Path) -> None:
    first, second = (FolderTarget(str(tmp_path), SOURCE, "float32", 0.01) for _ in range(2))
    first.open()
    with Publisher(FakeReader(), second, "folder") as publisher, pytest.raises(ConfigError, match="another process"):
        publisher.wait()
    first.close()


@pytest.fixture
def published(tmp_path: Path) -> Path:
    reader = FakeReader()
    reader.push("users", {1: 1})
    with Publisher(reader, FolderTarget(str(tmp_path), SOURCE, "float32", 0.01), "folder") as publisher:
        publisher.wait()
    return tmp_path


def test_damage_is_named(published: Path) -> None:
    (number,) = numbers(os.listdir(published))
    data = next(published.glob("data-*.npz"))
    whole = data.read_bytes()
    for damaged, text in (
        (whole[:-5], "bytes, and its manifest says"),
        (whole[:100] + b"?" * 20 + whole[120:], "damaged"),
        (b"?" * len(whole), "damaged"),
    ):
        data.write_bytes(damaged)
        with pytest.raises(InputError, match=text):
            read_increments(published)
    data.write_bytes(whole)
    manifest = published / manifest_name(number)
    described = json.loads(manifest.read_bytes())
    for name, value in (("version", 2), ("number", -1), ("tables", {"users": {}}), ("files", 7), ("number", True)):
        with pytest.raises(InputError, match=r"manifest-|version 2"):
            parse_manifest(json.dumps(described | {name: value}).encode(), str(manifest))
    evil = described | {"files": [{"name": "../../etc/passwd", "bytes": 1, "parts": []}]}
    with pytest.raises(InputError, match="passwd"):
        parse_manifest(json.dumps(evil).encode(), "manifest")


def test_targets_that_cannot_be_are_refused() -> None:
    for to in ("s3://bucket/x", "file://host/x", "file:///", "rows", "http://[", "file:rows"):
        with pytest.raises(ConfigError, match=r"redis://host|cannot be published"):
            target_of(to, SOURCE, "float32", "p:", 1)
    with pytest.raises(ConfigError, match="float32, float16"):
        target_of("file:///rows", SOURCE, "int8", "p:", 1)


def test_a_folder_where_nothing_can_be_written_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    for place, reason in (("file", "a file of this name"), ("file/below", "Not a directory")):
        with pytest.raises(ConfigError, match=rf"{tmp_path}/{place}: .*{reason}.*name a folder"):
            target_of(f"file://{tmp_path}/{place}", SOURCE, "float32", "p:", 1)
    target_of(f"file://{tmp_path}/made", SOURCE, "float32", "p:", 1)
    assert (tmp_path / "made").is_dir()
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    with pytest.raises(ConfigError, match="no permission"):
        target_of(f"file://{tmp_path}/made", SOURCE, "float32", "p:", 1)
