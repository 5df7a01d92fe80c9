"""The leader merges long chains and deletes old checkpoints while new ones are made."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from coordinator.memory import MemoryStore
from elasticps.checkpoint import catalog, maintenance, schedule
from elasticps.checkpoint.manifest import Manifest
from elasticps.checkpoint.schedule import CheckpointSchedule, Cleaner
from elasticps.checkpoint.storage import Storage
from elasticps.model import spec
from elasticps.model.spec import TableSpec
from tests.checkpoint.writer import Change, row, write
from tests.server.conftest import until

TABLE = TableSpec("t", 3, spec.Adagrad(0.1))


def made(storage: Storage, cut: int) -> Manifest:
    change = Change({key: row(TABLE, 10 * cut + key) for key in range(cut)})
    return write(storage, cut, {"default/t": (7, TABLE)}, {"default/t": change}, since=cut - 1, time=float(cut))


def test_a_long_chain_is_merged_and_old_checkpoints_are_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule, "MERGE_AFTER", 2)
    storage = Storage(str(tmp_path))
    cleaner = Cleaner(storage.url, "last=1")

    async def take(full: bool, if_changed: bool) -> Manifest:
        taken.append(1 + len(taken))
        await until(lambda: len(listings) == taken[-1] - 1, 200)
        return made(storage, taken[-1])

    async def clean_up(manifest: Manifest) -> None:
        await cleaner.clean_up(manifest)
        listings.append([(cut, one.since) for cut, one in catalog.look(storage).manifests.items()])

    taken: list[int] = []
    listings: list[list[tuple[int, int]]] = []

    async def main() -> None:
        schedule = asyncio.create_task(CheckpointSchedule(MemoryStore(), take, 0.01, clean_up).run())
        await until(lambda: len(listings) >= 3, 200)  # processes that let others go first
        schedule.cancel()
        await asyncio.gather(schedule, return_exceptions=True)

    asyncio.run(main())
    assert listings[:3] == [[(1, 0)], [(1, 0), (2, 1)], [(3, 0)]]
    merged = catalog.read(storage, 3)
    assert maintenance.verify(storage, merged) == []
    assert merged.rows == 3
