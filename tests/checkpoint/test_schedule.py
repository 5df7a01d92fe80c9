"""The leader makes checkpoints on time and on request, and remembers answered requests."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from coordinator.core.keys import CHECKPOINT_REQUESTS, NEWEST_CHECKPOINT
from coordinator.core.store import VALUE_MAX
from coordinator.memory import MemoryStore
from elasticps.checkpoint import catalog
from elasticps.checkpoint.manifest import Manifest
from elasticps.checkpoint.schedule import CheckpointSchedule
from replication.progress import ERASER
from tests.checkpoint.fake_servers import ONE, Scene
from tests.coordinator.support import until_key
from tests.server.conftest import until

ANSWER = b'{"full": false, "cut": 3}'


def test_an_answer_that_was_taken_is_forgotten() -> None:
    async def main() -> None:
        store = MemoryStore()
        schedule = CheckpointSchedule(store, None, 0.0)
        for number in range(5):
            key = f"{CHECKPOINT_REQUESTS}{number}"
            await store.put(key, ANSWER)
            assert await schedule._requests() == []
            await store.delete(key)
        assert await schedule._requests() == []
        assert not schedule._answered

    asyncio.run(main())


def test_a_request_that_fills_its_key_is_answered() -> None:
    """It was not, for the answer was larger, and a checkpoint was taken for it again and again."""

    async def main() -> None:
        store, key = MemoryStore(), CHECKPOINT_REQUESTS + "1"
        schedule = CheckpointSchedule(store, None, 0.0)
        start, end = b'{"full": false, "by": "', b'"}'
        await store.put(key, start + b"x" * (VALUE_MAX - len(start + end)) + end)
        await schedule._serve(await schedule._requests())
        entry = await store.get(key)
        assert entry is not None
        assert json.loads(entry.value).keys() == {"full", "error"}
        assert await schedule._requests() == []

    asyncio.run(main())


def test_an_answer_that_is_never_taken_is_deleted_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        store = MemoryStore()
        schedule = CheckpointSchedule(store, None, 0.0)
        await store.put(CHECKPOINT_REQUESTS + "1", ANSWER)
        await schedule._requests()
        assert (await store.list(CHECKPOINT_REQUESTS)).entries
        monkeypatch.setattr("elasticps.checkpoint.schedule._ANSWER_LIFE_S", -1.0)
        await schedule._requests()
        assert not (await store.list(CHECKPOINT_REQUESTS)).entries
        assert not schedule._answered

    asyncio.run(main())


def test_the_leader_makes_checkpoints_on_time_and_on_request(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elasticps.checkpoint.schedule._LOOK_S", 0.001)

    async def main() -> None:
        await scene.begin()
        requested_full: list[bool] = []
        made: list[int] = []

        async def take(full: bool, if_changed: bool) -> Manifest:
            requested_full.append(full)
            manifest = await scene.take(full=full, if_changed=if_changed)
            made.append(manifest.cut)
            return manifest

        async def answer(key: str) -> dict[str, Any]:
            entry = await until_key(scene.store, key, lambda entry: entry and len(json.loads(entry.value)) > 1)
            assert entry is not None
            found: dict[str, Any] = json.loads(entry.value)
            return found

        async def newest() -> int:
            entry = await scene.store.get(NEWEST_CHECKPOINT)
            return -1 if entry is None else int(json.loads(entry.value)["cut"])

        assert await newest() == -1
        schedule = asyncio.create_task(CheckpointSchedule(scene.store, take, 60.0).run())
        await until_key(scene.store, NEWEST_CHECKPOINT, lambda entry: entry)  # somebody waits for the first one
        assert await newest() == 0
        schedule.cancel()
        schedule = asyncio.create_task(CheckpointSchedule(scene.store, take, 0.01).run())
        await until(lambda: len(made) >= 2)
        schedule.cancel()
        await asyncio.gather(schedule, return_exceptions=True)
        assert await newest() >= made[-1] > 0  # the next one may have been under way
        assert catalog.read(scene.storage, await newest()).cut == await newest()
        schedule = asyncio.create_task(CheckpointSchedule(scene.store, take, 0.0).run())
        await scene.store.put(CHECKPOINT_REQUESTS + "1", b"no request")
        await scene.store.put(CHECKPOINT_REQUESTS + "2", json.dumps({"full": True}).encode())
        served = await answer(CHECKPOINT_REQUESTS + "2")
        assert requested_full[-1] is True
        assert catalog.read(scene.storage, served["cut"]).since == 0
        schedule.cancel()
        schedule = asyncio.create_task(CheckpointSchedule(scene.store, None, 0.0).run())
        await scene.store.put(CHECKPOINT_REQUESTS + "3", json.dumps({"full": False}).encode())
        assert "has no --checkpoint-url" in (await answer(CHECKPOINT_REQUESTS + "3"))["error"]
        schedule.cancel()

    asyncio.run(main())


def test_an_idle_cluster_gets_no_increment(scene: Scene) -> None:
    """An idle cluster filled its folder with increments of no rows."""

    async def main() -> None:
        await scene.begin()
        first = await scene.take(if_changed=True)
        for server in scene.servers.values():
            server.rows = 0
        before = await scene.store.get(NEWEST_CHECKPOINT)
        assert await scene.take(if_changed=True) == first
        assert [*catalog.look(scene.storage).manifests] == [first.cut]
        again = await scene.store.get(NEWEST_CHECKPOINT)
        assert before is not None
        assert again is not None
        assert json.loads(again.value)["time"] > json.loads(before.value)["time"], "it is as good as a new one"
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
