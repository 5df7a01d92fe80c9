"""Cleaning deletes files that no checkpoint needs, and none that may still be written."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticps.checkpoint import catalog, maintenance
from elasticps.checkpoint.manifest import NAME, Manifest
from elasticps.checkpoint.retention import left_over, mark_of
from elasticps.checkpoint.storage import Storage
from elasticps.errors import CheckpointError
from elasticps.model import spec
from elasticps.model.spec import TableSpec
from tests.checkpoint.writer import Change, row, write

TABLE = TableSpec("t", 3, spec.Adagrad(0.1))
TABLES = {"default/t": (7, TABLE)}
OWN = "own"
FILES = st.dictionaries(st.sampled_from(["t/own.a", "t/own.b", "t/other.a", "merged.a", NAME]), st.integers(0, 9))
NAMED = st.one_of(st.none(), st.sets(st.sampled_from(["t/own.a", "t/own.b", "t/other.a", "merged.a"])))


@given(
    st.dictionaries(st.integers(1, 5), FILES), st.dictionaries(st.integers(1, 5), NAMED), st.integers(0, 10),
    st.integers(0, 6),
)  # fmt: skip
def test_deleted_files_are_unnamed_and_either_old_or_our_own(
    folders: dict[int, dict[str, float]], named: dict[int, set[str] | None], before: float, below: int
) -> None:
    named = {cut: names for cut, names in named.items() if NAME in folders.get(cut, {})}
    going = left_over(folders, named, before, own=OWN, below=below)
    for cut, files in folders.items():
        expected = set()
        for path in files:
            if path == NAME or (cut in named and (named[cut] is None or path in (named[cut] or ()))):
                continue
            beside = [other for other in files if other != NAME and (cut not in named or other not in named[cut])]  # type: ignore[operator]
            if all(files[other] < before for other in beside):
                expected.add(path)
            if cut not in named and cut < below and path.startswith("t/own."):
                expected.add(path)
        assert set(going.get(cut, ())) == expected
    assert [] not in going.values()


def begin(storage: Storage, cluster: str = "c@1") -> list[Manifest]:
    """A full checkpoint, and an increment."""
    return [
        write(storage, cut, TABLES, {"default/t": Change({key: row(TABLE, key) for key in range(9 * cut)})},
              since=cut - 1, cluster=cluster) for cut in (1, 2)
    ]  # fmt: skip


def age(folder: Path, seconds: float = 7200) -> None:
    """Makes all files below a folder older by so many seconds."""
    for path in folder.rglob("*"):
        if path.is_file():
            at = path.stat().st_mtime - seconds
            os.utime(path, (at, at))


def test_a_cluster_deletes_its_own_abandoned_files_and_no_others(
    tmp_path: Path,
) -> None:
    storage = Storage(str(tmp_path))
    begin(storage)
    storage.put(f"000003/t-7/{mark_of('c@1')}.s0-1.000.safetensors", b"given up")
    storage.put(f"000004/t-7/{mark_of('d@2')}.s0-1.000.safetensors", b"being written")
    (tmp_path / "000005" / "t-7").mkdir(parents=True)  # its disk was full
    storage.put(f"000007/t-7/{mark_of('c@1')}.s0-1.000.safetensors", b"newer than what is published")
    assert catalog.clean(storage, cluster="c@1", below=6) == [3, 5]
    assert storage.folders() == ["000001", "000002", "000004", "000007"]
    age(tmp_path / "000004")
    assert catalog.clean(storage, cluster="c@1", below=6) == [4]
    assert catalog.clean(storage) == []
    assert [maintenance.verify(storage, manifest) for manifest in catalog.chain(storage, 2)] == [[], []]


def dies_while(at: Callable[[str], bool], storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Merges; the process is gone when it is about to put or delete a path at which it dies."""

    class Killed(BaseException):
        pass

    def stop(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Storage, paths: Any, *more: Any) -> Any:
            if dead or at(paths if isinstance(paths, str) else f"deleted {paths[0]}"):
                dead.append(1)
                raise Killed
            return method(self, paths, *more)

        return call

    dead: list[int] = []
    with monkeypatch.context() as patch:
        for name in ("put", "delete"):
            patch.setattr(Storage, name, stop(getattr(Storage, name)))
        with pytest.raises(Killed):
            maintenance.merge(storage, catalog.chain(storage))


@pytest.mark.parametrize("at", ["merged", NAME, "deleted"])
def test_old_files_of_a_dead_merge_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    monkeypatch.setattr(maintenance, "FILE_BYTES", 100)  # of many files
    storage = Storage(str(tmp_path))
    chain = begin(storage)
    seen: list[str] = []

    def now_or_at_the_next(path: str) -> bool:
        seen.extend([path] if at in path else [])
        return len(seen) > (at == "merged")

    dies_while(now_or_at_the_next, storage, monkeypatch)
    left = catalog.unnamed(storage, catalog.read(storage, 2))
    assert left.files > 0
    assert catalog.clean(storage) == catalog.clean(storage, cluster="c@1", below=3) == []
    age(tmp_path / "000002")
    storage.put("000002/t-7/merged-other.000.safetensors", b"another merge is at it")
    assert catalog.clean(storage) == []
    age(tmp_path / "000002")
    begun = Storage(str(tmp_path))
    assert catalog.clean(begun, still_s=3600) == [2]
    now = catalog.chain(storage)
    assert [one.since for one in now] == ([0] if at == "deleted" else [0, 1])
    assert all(maintenance.verify(storage, one) == [] for one in now)
    assert catalog.unnamed(storage, now[-1]).files == 0
    merged = maintenance.merge(storage, now)
    assert (merged.rows, maintenance.verify(storage, merged)) == (18, [])
    assert merged.cluster == chain[-1].cluster


def test_a_merge_whose_sources_are_deleted_leaves_no_files() -> None:
    storage = Storage(f"memory://{uuid.uuid4()}")
    chain = begin(storage)
    before = storage.files()

    def tell(rows: int) -> None:
        if 2 in catalog.cuts_of(storage):
            catalog.delete(storage, [2])

    with pytest.raises(CheckpointError, match=r"has no checkpoint 2|is not there"):
        maintenance.merge(storage, chain, tell)
    assert catalog.cuts_of(storage) == [1]
    begin_again = [path for path, _ in before if path.startswith("000001")]
    assert [path for path, _ in storage.files()] == begin_again


def test_two_merges_at_once_give_one_result_and_one_error(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))
    chain = begin(storage)
    done: list[Manifest] = []

    def tell(rows: int) -> None:
        if not done:
            done.append(maintenance.merge(storage, chain))

    with pytest.raises(CheckpointError, match=r"somebody else has merged checkpoint 2 meanwhile|is not there"):
        maintenance.merge(storage, chain, tell)
    assert catalog.read(storage, 2) == done[0]
    assert maintenance.verify(storage, done[0]) == []
    assert catalog.unnamed(storage, done[0]).files == 0
