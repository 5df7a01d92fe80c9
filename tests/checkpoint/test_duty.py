"""What the leader remembers of answers."""

from __future__ import annotations

import asyncio
import json

import pytest

from coordinator.core.keys import CHECKPOINT_REQUESTS
from coordinator.core.store import VALUE_MAX
from coordinator.memory import MemoryStore
from elasticps.checkpoint.schedule import CheckpointSchedule

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


def test_an_answer_that_nobody_takes_goes_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
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
