"""Checkpoints are made of the files that servers report; the servers are fakes."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest

from coordinator.core.keys import NEWEST_CHECKPOINT
from coordinator.core.view import View
from elasticps.admin.interface import CutWritten
from elasticps.checkpoint import catalog, create, cuts
from elasticps.checkpoint.cuts import GivenUp
from elasticps.checkpoint.loss_policy import policies_of
from elasticps.checkpoint.manifest import Manifest
from elasticps.checkpoint.storage import Storage
from elasticps.errors import CheckpointError, SpecError
from elasticps.model.optimizers import Accumulate
from elasticps.model.spec import TableSpec
from elasticps.wire.headers import MAX_CUT
from replication.progress import ERASER
from tests.checkpoint.fake_servers import GONE, NEW, ONE, Fake, P, Scene


def test_files_of_all_servers_are_published_with_the_clocks_of_the_cut(scene: Scene) -> None:
    async def main() -> None:
        await scene.begin()
        reported: list[int] = []
        manifest = await scene.take(tell=reported.append)
        assert sum(reported) == P
        assert (manifest.cut, manifest.since, manifest.cluster, manifest.ranges) == (1, 0, "c@1", P)
        assert list(manifest.tables) == ["default/t"]
        assert sorted(file.ranges for file in manifest.files) == [(0, 2), (1, 3)]
        workers = {name: (one.id, one.app, one.clock, one.base) for name, one in manifest.workers.items()}
        assert workers == {"w": (ONE, "default", 7, 1), "gone": (GONE, "default", 5, 1)}
        assert manifest.former == {ONE | ERASER: 2, NEW: 0}
        assert manifest.left_out == {GONE: (4 << 16, 5 << 16, 4 << 16, 5 << 16)}
        assert manifest.groups == ({"app": "a"}, {"app": "a"})
        assert catalog.read(scene.storage, 1) == manifest
        for server in scene.servers.values():
            assert server.happened == ["hold", "take", "release"]

    asyncio.run(main())


@pytest.mark.parametrize(
    "value",
    [
        b"[" * 100_000,
        b"[]",
        b"",
        b'{"id": 1e999, "table": 1e999}',
        b'{"id": 3, "base": -1, "trained": 2, "steps": 3, "spec": 7, "table": -1}',
        b'{"id": 3, "base": 4611686018427387904, "trained": 2, "steps": 3, "table": "x"}',
        b'{"x": 1}',
        b'{"table": 3, "x": ' + b"[" * 500 + b"]" * 500 + b"}",
    ],
)
def test_damaged_entries_of_workers_stop_no_checkpoint(scene: Scene, value: bytes) -> None:
    """Found in a review: it could not be made, or was published and could not be read."""

    async def main() -> None:
        await scene.begin()
        for key in ("last-worker/hostile", "tables/a/hostile", "rates/a/hostile", "on-loss/a/hostile"):
            await scene.store.put(key, value)
        manifest = await scene.take()
        assert sorted(manifest.workers) == ["gone", "w"]
        assert list(manifest.tables) == ["default/t"]
        assert all(setting == {"table": 3} for setting in manifest.settings.values())  # a restore looks that up
        assert catalog.read(scene.storage, 1) == manifest
        assert await policies_of(scene.store) == {
            f"default/{name}": {"on_loss": "wait", "max_lost_steps": None} for name in ("late", "t")
        }

    asyncio.run(main())


@pytest.mark.parametrize(
    ("key", "entry"),
    [
        ("a/t", {}),
        ("a/other", {}),
        ("a/plug-in", {"id": 40, "spec": json.dumps({"name": "plug-in"})}),
        ("a/nothing", {"id": 4, "spec": "{}"}),
    ],
)
def test_a_table_that_conflicts_with_a_registered_one_stops_no_checkpoint(
    scene: Scene, key: str, entry: dict[str, object]
) -> None:
    """It could not be made, or was published with two tables of one number and could not be read."""

    async def main() -> None:
        await scene.begin()
        spec = TableSpec("t", 2, Accumulate()).to_json()
        await scene.store.put(f"tables/{key}", json.dumps({"id": 4, "spec": spec, "creator": 1} | entry).encode())
        manifest = await scene.take()
        assert list(manifest.tables) == ["default/t"]
        assert catalog.read(scene.storage, 1) == manifest
        assert (await scene.take()).since == 1

    asyncio.run(main())


def test_a_damaged_table_entry_is_left_out_or_reported(scene: Scene) -> None:
    async def main() -> None:
        await scene.begin()
        table = {"id": 4, "spec": TableSpec("other", 2, Accumulate()).to_json(), "creator": 1}
        await scene.store.put("tables/default/t", json.dumps(table).encode())
        manifest = await scene.take()
        assert catalog.read(scene.storage, 1) == manifest
        assert not manifest.tables
        await scene.store.delete("tables/default/t")
        spec = TableSpec("t", 2, Accumulate()).to_json()
        await scene.store.put("tables/default/../t", json.dumps(table | {"spec": spec}).encode())
        manifest = await scene.take()
        assert catalog.read(scene.storage, 2) == manifest
        assert not manifest.tables
        await scene.store.put("tables/default/t", json.dumps(table | {"spec": "{}"}).encode())
        await scene.store.delete("tables/default/../t")
        with pytest.raises(SpecError):  # a plug-in may be missing: without its table it would be no checkpoint
            await scene.take()

    asyncio.run(main())


def test_the_next_checkpoint_is_an_increment_unless_a_full_one_is_requested(scene: Scene) -> None:
    async def main() -> None:
        await scene.begin()
        await scene.take()
        assert [(m.cut, m.since) for m in [await scene.take(), await scene.take(full=True), await scene.take()]] == [
            (2, 1), (3, 0), (4, 3)
        ]  # fmt: skip

    asyncio.run(main())


def test_a_chain_stays_short_and_never_adds_to_another_clusters(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(create, "MOST_INCREMENTS", 2)

    async def main() -> None:
        await scene.begin()
        assert [(await scene.take()).since for _ in range(5)] == [0, 1, 2, 0, 4]
        other = Scene()
        other.storage = scene.storage
        await other.begin()
        view = View.decode((await other.store.get("view")).value)  # type: ignore[union-attr]
        await other.store.put("view", dataclasses.replace(view, cluster="c@2").encode())
        found = await other.take()
        assert (found.cut, found.since) == (6, 0)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ({"failed": "the disk is full"}, "server s1, which writes 2 ranges, has given up: the disk is full"),
        ({"silent": True}, "is lost in part: 2 ranges have no server that writes them, such as 1"),
        ({"lost": True}, "server s1, which writes 2 ranges, has lost ranges that it was to write"),
    ],
)
def test_nothing_is_published_when_a_server_does_not_finish(scene: Scene, fault: dict[str, Any], says: str) -> None:
    async def main() -> None:
        await scene.begin()
        vars(scene.servers["s1"]).update(fault)
        with pytest.raises(GivenUp, match=says):
            await scene.take()
        assert catalog.look(scene.storage).manifests == {}
        assert scene.servers["s0"].happened[-1] == "release"

    asyncio.run(main())


def test_a_checkpoint_whose_files_were_deleted_or_replaced_is_not_published(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by another cluster that writes to the same place, and takes this one for given up."""

    async def written(*arguments: Any) -> Any:
        files = await all_written(*arguments)
        done.append(len(files))
        if len(done) == 1:
            number = max(catalog.cuts_of(scene.storage))
            scene.storage.delete([f"{number:06d}/t-4/s1-1.000.safetensors"])
        elif len(done) == 2:
            scene.storage.put("000002/t-4/s0-1.000.safetensors", b"another's")
        return files

    async def main() -> None:
        await scene.begin()
        assert (await scene.take()).cut == 3
        monkeypatch.setattr(create, "ATTEMPTS", 1)
        done.clear()
        with pytest.raises(GivenUp, match=r"000004/t-4/s1.* is missing: somebody has deleted"):
            await scene.take()
        assert sorted(catalog.look(scene.storage).manifests) == [3]

    done: list[int] = []
    all_written = create._written
    monkeypatch.setattr(create, "_written", written)
    asyncio.run(main())


def test_a_failed_cleanup_is_no_reason_to_fail(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **more: Any) -> list[int]:
        raise CheckpointError("may not delete")

    async def main() -> None:
        await scene.begin()
        monkeypatch.setattr(catalog, "clean", refuse)
        assert (await scene.take()).cut == catalog.newest(scene.storage) == 1

    asyncio.run(main())


def test_another_clusters_checkpoint_of_the_same_number_stays(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of another cluster; what servers have written beside it goes, and the next number is taken."""
    publish, files = catalog.publish, ("000001/manifest.json", "000001/t-4/theirs.000.safetensors")

    def come_second(storage: Storage, manifest: Manifest) -> bool:
        if manifest.cut == 1:
            for path in files:
                storage.put(path, b"theirs")
        return publish(storage, manifest)

    async def main() -> None:
        await scene.begin()
        monkeypatch.setattr(catalog, "publish", come_second)
        assert (await scene.take()).cut == 2
        left = [path for path, _ in scene.storage.files("000001") if "/late-8/" not in path]
        assert tuple(left) == files
        monkeypatch.setattr(catalog, "publish", lambda storage, manifest: False)
        with pytest.raises(GivenUp, match="somebody else has made meanwhile"):
            await scene.take()

    asyncio.run(main())


def test_a_table_that_is_being_restored_is_in_no_checkpoint_in_part(scene: Scene) -> None:
    """It is registered before the last file is there; and had rows before the cut, which no increment would have."""

    async def story() -> None:
        await scene.begin()
        spec = TableSpec("back", 2, Accumulate()).to_json()
        table = {"id": 12, "spec": spec, "creator": 0, "by": "", "ready": True}
        for server in scene.servers.values():

            async def written(cut: int, wait_s: float, of: Fake = server) -> CutWritten:
                state = await Fake.written(of, cut, wait_s)
                await scene.store.put("tables/default/back", json.dumps(table).encode())
                if state.writing is None or not state.writing.files:
                    return state
                file = of.write(scene.storage.url, cut, 3, "back", 12)
                return state._replace(writing=state.writing._replace(files=[*state.writing.files, file]))

            server.written = written  # type: ignore[method-assign]
        first = await scene.take()
        assert "default/back" not in first.tables
        second = await scene.take()
        assert "default/back" in second.tables
        assert second.since == 0
        assert (await scene.take()).since == second.cut

    asyncio.run(story())


def test_an_increment_whose_base_is_deleted_is_begun_again_in_full(scene: Scene) -> None:
    """Nobody could ever read it: it is begun again, as a full one."""

    async def story() -> None:
        await scene.begin()
        first = await scene.take()
        server = scene.servers["s0"]
        take = server.take

        async def deleted(cut: int, since: int, url: str) -> bool:
            if since:
                catalog.delete(scene.storage, [first.cut])
            return await take(cut, since, url)

        server.take = deleted  # type: ignore[method-assign]
        second = await scene.take()
        assert [manifest.cut for manifest in catalog.chain(scene.storage)] == [second.cut]

    asyncio.run(story())


def test_a_number_that_is_already_taken_is_skipped(
    scene: Scene, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder of somebody's, called as a checkpoint could be: no checkpoint counts from there, or is written there."""
    scene.storage = Storage(str(tmp_path))
    foreign = [tmp_path / name for name in (f"{MAX_CUT}", f"{MAX_CUT + 1}", "000002", "notes", "9" * 200)]
    for folder in foreign:
        folder.mkdir()
        (folder / "x").touch()

    async def main() -> None:
        await scene.begin()
        with caplog.at_level("WARNING"):
            assert (await scene.take()).cut == 1
        for folder in foreign[:2]:
            assert f"a folder is left out folder={folder.as_uri()} " in caplog.text
        assert [(await scene.take()).cut for _ in range(2)] == [3, 4]

    asyncio.run(main())
    assert catalog.look(scene.storage).unpublished == ()
    for path in tmp_path.rglob("*"):
        os.utime(path, (0, 0))
    assert catalog.clean(scene.storage) == [1, 3, 4]  # of the table that is in none
    assert [chain.cut for chain in catalog.chain(scene.storage)] == [1, 3, 4]
    assert all((folder / "x").exists() for folder in foreign)


@pytest.mark.parametrize("where", ["folder", "server", "etcd"])
def test_the_end_of_the_numbers_is_reported_before_anything_is_written(scene: Scene, where: str) -> None:
    async def main() -> None:
        await scene.begin()
        if where == "folder":
            scene.storage.put(f"{MAX_CUT}/manifest.json", b"{}")
        elif where == "server":
            scene.servers["s1"].taken.append((MAX_CUT, 0))
        else:
            await scene.store.put(cuts.LAST, b"%d" % MAX_CUT)
        place = {"folder": "memory://create", "server": "server s1", "etcd": "the key 'checkpoints/last' in etcd"}[
            where
        ]
        with pytest.raises(CheckpointError, match=f"no number is left for a checkpoint: {place} has {MAX_CUT}"):
            await scene.take()
        assert [server.happened for server in scene.servers.values()] == [[], []]

    asyncio.run(main())


@pytest.mark.parametrize("value", [b"", b"[]", b"-1", b"9" * 5000, b"1e9"])
def test_a_damaged_last_number_ends_no_checkpoint(scene: Scene, value: bytes) -> None:
    async def main() -> None:
        await scene.begin()
        await scene.store.put(cuts.LAST, value)
        assert [(await scene.take()).cut for _ in range(2)] == [1, 2]

    asyncio.run(main())


def test_a_checkpoint_that_cannot_be_read_back_is_not_reported_as_made(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = catalog.publish

    def alter(storage: Storage, manifest: Manifest) -> bool:
        assert publish(storage, manifest)
        storage.put(f"{manifest.folder}/manifest.json", b"{}")
        return True

    async def main() -> None:
        await scene.begin()
        written = create._written

        async def damaged(*arguments: Any) -> Any:
            files = await written(*arguments)
            for path, _ in scene.storage.files():
                data = bytearray(scene.storage.get(path))
                data[-1] ^= 1
                scene.storage.put(path, data)
            return files

        with monkeypatch.context() as patch:
            patch.setattr(create, "_written", damaged)
            with pytest.raises(GivenUp, match=r"checkpoint 3 cannot be read back: .* was altered"):
                await scene.take()
        assert catalog.look(scene.storage).manifests == {}
        monkeypatch.setattr(catalog, "publish", alter)
        with pytest.raises(CheckpointError, match=r"checkpoint 4 was written, but cannot be read back: .* no manifest"):
            await scene.take()
        assert await scene.store.get(NEWEST_CHECKPOINT) is None

    asyncio.run(main())
