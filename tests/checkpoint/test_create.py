"""Checkpoints are made of what servers say that they have written, or given up; the servers are fakes."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.core.keys import CHECKPOINT_REQUESTS, NEWEST_CHECKPOINT
from coordinator.core.view import Roster, ServerInfo, View, WorkerInfo
from coordinator.memory import MemoryStore
from elasticps.admin.interface import CutState, CutTaken, CutWritten, Writing, WrittenFile
from elasticps.checkpoint import catalog, create, cuts, row_writer
from elasticps.checkpoint.create import checkpoint
from elasticps.checkpoint.cuts import GivenUp
from elasticps.checkpoint.loss_policy import policies_of
from elasticps.checkpoint.manifest import Manifest
from elasticps.checkpoint.rows import RowFile
from elasticps.checkpoint.schedule import CheckpointSchedule
from elasticps.checkpoint.storage import Storage
from elasticps.errors import CheckpointError, ClusterUnreachable, SpecError
from elasticps.model.optimizers import Accumulate
from elasticps.model.spec import TableSpec
from elasticps.store.layout import RowLayout
from elasticps.wire.headers import MAX_CUT
from replication.messages import ERASER
from tests.server.conftest import until

P = 4
SERVERS = [ServerInfo(name, 1, f"{name}:1", f"{name}:2") for name in ("s0", "s1")]
GONE, ONE, NEW = 3, 5, 6


class Fake:
    """A server that heads every other range. polls: how often it is asked until all is written."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.ranges = tuple(range(index, P, 2))
        self.clocks: dict[int, int] = {ONE: 7 << 16, ONE | ERASER: 2 << 16, GONE: (4 + index) << 16}
        self.failed = ""
        self.silent = self.lost = False
        self.polls = self.rows = 3
        self.taken: list[tuple[int, int]] = []
        self.files: list[WrittenFile] = []
        self.happened: list[str] = []

    async def hold(self, cut: int, hold_s: float) -> bool:
        self.happened.append("hold")
        return True

    async def held(self, cut: int) -> Mapping[int, int]:
        return {ONE: 7} if self.index else {NEW: 0}

    async def release(self, cut: int) -> None:
        self.happened.append("release")

    async def take(self, cut: int, since: int, url: str) -> bool:
        self.happened.append("take")
        self.files = [self.write(url, cut, self.rows, "t", 4), self.write(url, cut, 0, "late", 8)]
        self.polls = 3
        self.taken.append((cut, since))
        return True

    def write(self, url: str, cut: int, rows: int, table: str, number: int) -> WrittenFile:
        """A file with so many rows in the first of its ranges."""
        spec = TableSpec(table, 2, Accumulate())
        file, stride = RowFile(spec), RowLayout.of(spec).stride
        for r in self.ranges:
            n = rows * (r == self.ranges[0])
            keys, words, stamps = np.arange(n), np.zeros((n, stride), np.uint8), np.zeros(n, np.int32)
            file.add(r, keys, words, stamps, full=True)
        path = f"{table}-{number}/s{self.index}-1.000.safetensors"
        entry = row_writer.write(Storage(url), f"{cut:06d}", path, number, file)
        return WrittenFile(path, entry.bytes, entry.header, entry.rows, entry.blake2b, number, entry.ranges)

    async def state(self, cut: int) -> CutState:
        if self.silent and self.taken:
            raise ClusterUnreachable("it does not answer")
        if cut not in [number for number, _ in self.taken]:
            return CutState(1, 1, self.taken[-1][0] if self.taken else 0, (), {})
        home = {"groups": [{"app": "a"}], "shards": []}
        return CutState(1, 1, cut, [CutTaken(self.ranges, self.clocks, {})], {self.index: home})

    async def written(self, cut: int, wait_s: float) -> CutWritten:
        if self.silent:
            raise ClusterUnreachable("it does not answer")
        self.polls -= self.polls > 0
        files = self.files[: 1 + self.index]  # the second was made as the cut passed: some ranges had it, and no rows
        writing = Writing(0 if self.polls else 2, () if self.polls else files, self.failed)
        return CutWritten(1, 1 if self.lost and self.polls < 2 else 2, writing)


class Scene:
    def __init__(self) -> None:
        self.store = MemoryStore()
        self.servers = {info.name: Fake(i) for i, info in enumerate(SERVERS)}
        self.storage = Storage("memory://create")

    async def begin(self) -> None:
        chains = np.array([[r % 2, 1 - r % 2] for r in range(P)], np.int32)
        nobody, since = np.full(P, -1, np.int32), np.ones(P, np.int64)
        view = View("c@1", 1, P, 2, tuple(SERVERS), chains, nobody, since, "")
        roster = Roster(1, (WorkerInfo(ONE, "w", 1, "default"), WorkerInfo(NEW, "a/n", 1, "a")), "c@1")
        await self.store.put("view", view.encode())
        await self.store.put("roster", roster.encode())
        for name, said in (("t", {"id": 4}), ("u", {"id": 9, "dropping": True}), ("late", {"id": 8})):
            spec = TableSpec(name, 2, Accumulate()).to_json()
            table = {"spec": spec, "creator": 1, "ready": True} | said
            await self.store.put(f"tables/default/{name}", json.dumps(table).encode())
        for name, id_ in (("w", ONE), ("gone", GONE), ("late", 99)):
            past = {"id": id_, "base": 1, "trained": 2, "steps": 3}
            await self.store.put(f"last-worker/default/{name}", json.dumps(past).encode())

    async def take(self, **options: Any) -> Manifest:
        return await checkpoint(self.store, self.storage.url, lambda info: self.servers[info.name], **options)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    monkeypatch.setattr("elasticps.checkpoint.storage._memory", {})
    monkeypatch.setattr(create, "_PAUSE_S", 0.001)
    monkeypatch.setattr(create, "_SILENT_S", 0.05)
    monkeypatch.setattr(cuts, "_POLL_S", 0.001)
    return Scene()


def test_what_servers_have_written_is_published_with_the_clocks_of_the_cut(scene: Scene) -> None:
    async def main() -> None:
        await scene.begin()
        told: list[int] = []
        manifest = await scene.take(tell=told.append)
        assert sum(told) == P
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
def test_what_workers_may_have_written_stops_no_checkpoint(scene: Scene, value: bytes) -> None:
    """Found in a review: it could not be made, or was published and could not be read."""

    async def main() -> None:
        await scene.begin()
        for key in ("last-worker/hostile", "tables/a/hostile", "rates/a/hostile", "on-loss/a/hostile"):
            await scene.store.put(key, value)
        manifest = await scene.take()
        assert sorted(manifest.workers) == ["gone", "w"]
        assert list(manifest.tables) == ["default/t"]
        assert all(said == {"table": 3} for said in manifest.settings.values())  # a restore looks that up
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
def test_a_table_that_a_worker_registers_beside_another_one_s_stops_no_checkpoint(
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


def test_a_table_s_entry_that_has_become_nonsense_is_left_out_or_told(scene: Scene) -> None:
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


def test_the_next_one_adds_to_it_unless_all_is_asked_for(scene: Scene) -> None:
    async def main() -> None:
        await scene.begin()
        await scene.take()
        assert [(m.cut, m.since) for m in [await scene.take(), await scene.take(full=True), await scene.take()]] == [
            (2, 1), (3, 0), (4, 3)
        ]  # fmt: skip

    asyncio.run(main())


def test_a_chain_does_not_become_too_long_and_another_cluster_s_is_not_added_to(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
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
def test_nothing_is_published_when_a_server_does_not_come_to_the_end(
    scene: Scene, fault: dict[str, Any], says: str
) -> None:
    async def main() -> None:
        await scene.begin()
        vars(scene.servers["s1"]).update(fault)
        with pytest.raises(GivenUp, match=says):
            await scene.take()
        assert catalog.look(scene.storage).manifests == {}
        assert scene.servers["s0"].happened[-1] == "release"

    asyncio.run(main())


def test_what_was_deleted_or_replaced_meanwhile_is_not_published(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_what_cannot_be_tidied_away_is_no_reason_to_fail(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **more: Any) -> list[int]:
        raise CheckpointError("may not delete")

    async def main() -> None:
        await scene.begin()
        monkeypatch.setattr(catalog, "clean", refuse)
        assert (await scene.take()).cut == catalog.newest(scene.storage) == 1

    asyncio.run(main())


def test_somebody_else_s_checkpoint_of_that_number_stays(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_the_leader_makes_one_so_often_and_answers_those_who_ask(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elasticps.checkpoint.schedule._LOOK_S", 0.001)

    async def main() -> None:
        await scene.begin()
        asked: list[bool] = []
        made: list[int] = []

        async def take(full: bool, if_changed: bool) -> Manifest:
            asked.append(full)
            manifest = await scene.take(full=full, if_changed=if_changed)
            made.append(manifest.cut)
            return manifest

        async def answer(key: str) -> dict[str, Any]:
            found: dict[str, Any] = {}

            async def look() -> None:
                entry = await scene.store.get(key)
                found.update(json.loads(entry.value) if entry is not None else {})

            for _ in range(10_000):
                await look()
                if len(found) > 1:
                    break
                await asyncio.sleep(0.001)
            return found

        async def newest() -> int:
            entry = await scene.store.get(NEWEST_CHECKPOINT)
            return -1 if entry is None else int(json.loads(entry.value)["cut"])

        assert await newest() == -1
        duty = asyncio.create_task(CheckpointSchedule(scene.store, take, 60.0).run())
        for _ in range(10_000):  # from when on somebody waits for the first one
            if await newest() >= 0:
                break
            await asyncio.sleep(0.001)
        assert await newest() == 0
        duty.cancel()
        duty = asyncio.create_task(CheckpointSchedule(scene.store, take, 0.01).run())
        await until(lambda: len(made) >= 2)
        duty.cancel()
        await asyncio.gather(duty, return_exceptions=True)
        assert await newest() >= made[-1] > 0  # the next one may have been under way
        assert catalog.read(scene.storage, await newest()).cut == await newest()
        duty = asyncio.create_task(CheckpointSchedule(scene.store, take, 0.0).run())
        await scene.store.put(CHECKPOINT_REQUESTS + "1", b"no request")
        await scene.store.put(CHECKPOINT_REQUESTS + "2", json.dumps({"full": True}).encode())
        said = await answer(CHECKPOINT_REQUESTS + "2")
        assert asked[-1] is True
        assert catalog.read(scene.storage, said["cut"]).since == 0
        duty.cancel()
        duty = asyncio.create_task(CheckpointSchedule(scene.store, None, 0.0).run())
        await scene.store.put(CHECKPOINT_REQUESTS + "3", json.dumps({"full": False}).encode())
        assert "has no --checkpoint-url" in (await answer(CHECKPOINT_REQUESTS + "3"))["error"]
        duty.cancel()

    asyncio.run(main())


def test_where_nothing_has_changed_no_increment_is_made(scene: Scene) -> None:
    """An idle cluster filled its folder with increments of no rows."""

    async def main() -> None:
        await scene.begin()
        first = await scene.take(if_changed=True)
        for server in scene.servers.values():
            server.rows = 0
        told = await scene.store.get(NEWEST_CHECKPOINT)
        assert await scene.take(if_changed=True) == first
        assert [*catalog.look(scene.storage).manifests] == [first.cut]
        again = await scene.store.get(NEWEST_CHECKPOINT)
        assert told is not None
        assert again is not None
        assert json.loads(again.value)["time"] > json.loads(told.value)["time"], "it is as good as a new one"
        for server in scene.servers.values():  # a deletion has no rows
            server.clocks[ONE | ERASER] += 1 << 16
        second = await scene.take(if_changed=True)
        assert (second.since, second.rows) == (first.cut, 0)
        assert second.cut > first.cut
        third = await scene.take()  # somebody has asked for it
        assert third.cut > second.cut
        for server in scene.servers.values():
            server.rows = 1
        assert (await scene.take(if_changed=True)).since == third.cut

    asyncio.run(main())


def test_a_table_that_is_being_restored_is_in_no_checkpoint_in_part(scene: Scene) -> None:
    """It is registered before the last file is there; and had rows before the cut, which no increment would have."""

    async def story() -> None:
        await scene.begin()
        spec = TableSpec("back", 2, Accumulate()).to_json()
        table = {"id": 12, "spec": spec, "creator": 0, "by": "", "ready": True}
        for server in scene.servers.values():

            async def written(cut: int, wait_s: float, of: Fake = server) -> CutWritten:
                said = await Fake.written(of, cut, wait_s)
                await scene.store.put("tables/default/back", json.dumps(table).encode())
                if said.writing is None or not said.writing.files:
                    return said
                file = of.write(scene.storage.url, cut, 3, "back", 12)
                return said._replace(writing=said.writing._replace(files=[*said.writing.files, file]))

            server.written = written  # type: ignore[method-assign]
        first = await scene.take()
        assert "default/back" not in first.tables
        second = await scene.take()
        assert "default/back" in second.tables
        assert second.since == 0
        assert (await scene.take()).since == second.cut

    asyncio.run(story())


def test_what_it_adds_to_is_deleted_meanwhile(scene: Scene) -> None:
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


def test_a_number_that_something_else_has_is_left_out(
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
def test_the_end_of_the_numbers_is_said_before_anything_is_written(scene: Scene, where: str) -> None:
    async def main() -> None:
        await scene.begin()
        if where == "folder":
            scene.storage.put(f"{MAX_CUT}/manifest.json", b"{}")
        elif where == "server":
            scene.servers["s1"].taken.append((MAX_CUT, 0))
        else:
            await scene.store.put(cuts.LAST, b"%d" % MAX_CUT)
        said = {"folder": "memory://create", "server": "server s1", "etcd": "the key 'checkpoints/last' in etcd"}[where]
        with pytest.raises(CheckpointError, match=f"no number is left for a checkpoint: {said} has {MAX_CUT}"):
            await scene.take()
        assert [server.happened for server in scene.servers.values()] == [[], []]

    asyncio.run(main())


@pytest.mark.parametrize("value", [b"", b"[]", b"-1", b"9" * 5000, b"1e9"])
def test_a_last_number_that_is_none_ends_no_checkpoint(scene: Scene, value: bytes) -> None:
    async def main() -> None:
        await scene.begin()
        await scene.store.put(cuts.LAST, value)
        assert [(await scene.take()).cut for _ in range(2)] == [1, 2]

    asyncio.run(main())


def test_what_cannot_be_read_back_is_not_said_to_be_there(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
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
