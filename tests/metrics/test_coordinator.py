"""A coordinator whose metrics fail."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from typing import Any

import pytest

from coordinator.adoption import reset
from coordinator.core.errors import WritesRefused
from coordinator.core.keys import LOSSES, NEWEST_CHECKPOINT, ROSTER, VIEW, known_key, loss_key
from coordinator.core.store import Entry, Listing, Put, Reset
from coordinator.core.view import ClusterConfig, Roster, WorkerInfo
from coordinator.membership import create_cluster
from coordinator.memory import MemoryStore
from elasticps.checkpoint.create import newest
from elasticps.cli import processes
from elasticps.local.etcd import free_ports
from elasticps.metrics.cluster import ClusterMetrics
from tests.chaos.scenes import view_of
from tests.coordinator.support import FaultyStore, until


def test_metrics_that_fail_end_the_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would show for ever what was true once."""

    async def open_store(url: str, timeout_s: float) -> MemoryStore:
        return MemoryStore()

    async def fail(metrics: ClusterMetrics) -> None:
        raise RuntimeError("nobody has thought of this")

    async def run() -> None:
        at = "127.0.0.1", free_ports(1)[0]
        await asyncio.wait_for(processes._coordinate("etcd://127.0.0.1:1/test", "c0", {}, 5.0, at), 30)

    monkeypatch.setattr(processes, "open_store", open_store)
    monkeypatch.setattr(ClusterMetrics, "_probe", fail)
    with pytest.raises(RuntimeError, match="nobody has thought of this"):
        asyncio.run(run())


def test_the_age_of_the_newest_checkpoint_is_shown() -> None:
    metrics = ClusterMetrics(MemoryStore(), "c0")
    assert not [family for family in metrics.collect() if "checkpoint" in family.name]
    metrics._note(Put(Entry(NEWEST_CHECKPOINT, newest(7, 1.5e9), 3, 3)))
    found = {family.name: family.samples[0].value for family in metrics.collect()}
    assert found["elasticps_cluster_checkpoint"] == 7
    assert found["elasticps_cluster_checkpoint_time_seconds"] == 1.5e9


def test_lost_ranges_and_steps_are_shown() -> None:
    """A worker has the last word on itself; of one whose steps nobody knows there is nothing to tell yet."""
    metrics = ClusterMetrics(MemoryStore(), "c0")

    def found() -> tuple[float, float]:
        values = {sample.name: sample.value for family in metrics.collect() for sample in family.samples}
        return values["elasticps_cluster_ranges_begun_anew_total"], values["elasticps_cluster_lost_steps"]

    def tell(key: str, document: dict[str, Any]) -> None:
        rest = {"cut": 1, "url": "u", "rows": 0, "lacking": []} if key.startswith(LOSSES) else {}
        metrics._note(Put(Entry(key, json.dumps(rest | document).encode(), 3, 3)))

    assert found() == (0, 0)
    tell(loss_key(7), {"epoch": 7, "ranges": [1, 4], "workers": [{"id": 5, "name": "w", "have": 12, "to": 0}]})
    assert found() == (2, 0)
    tell(known_key(7, 5, "w"), {"committed": 20})
    assert found() == (2, 8)
    tell(loss_key(9), {"epoch": 9, "ranges": [1], "workers": [{"id": 5, "name": "w", "have": 30, "to": 33}]})
    assert found() == (3, 8)


async def as_reset(metrics: ClusterMetrics, store: MemoryStore, *, missed: bool) -> None:
    """Resets the cluster, and tells of it. missed: the watch was broken meanwhile, and begins with what there is."""
    before = (await store.list("")).revision
    await reset(store, "anew")
    now = await store.list("")
    if missed:
        metrics._note(Reset(now))
        return
    async with aclosing(store.watch("", after=before)) as changes:
        async for change in changes:
            metrics._note(change)
            if change.revision >= now.revision:
                break


@pytest.mark.parametrize("missed", [False, True])
def test_after_a_reset_nothing_of_the_old_cluster_is_shown(missed: bool) -> None:
    async def main() -> None:
        store = MemoryStore()
        metrics = ClusterMetrics(store, "c0")
        await create_cluster(store, ClusterConfig(ranges=2, replicas=1, min_servers=1))
        await store.put(VIEW, view_of([["s0"], ["s0"]], epoch=7).encode())
        await store.put(ROSTER, Roster(1, (WorkerInfo(3, "w0", 3, "app"),), "c").encode())
        await store.put(loss_key(7), json.dumps({"epoch": 7, "ranges": [1, 4], "workers": []}).encode())
        metrics._note(Reset(await store.list("")))
        assert shown(metrics)["elasticps_cluster_epoch"] == 7
        assert shown(metrics)["elasticps_cluster_workers"] == 1
        await as_reset(metrics, store, missed=missed)
        found = shown(metrics)
        assert "elasticps_cluster_epoch" not in found
        assert found["elasticps_cluster_workers"] == 0
        assert found["elasticps_cluster_ranges_begun_anew_total"] == 0

    asyncio.run(main())


def test_views_missed_during_an_outage_count_as_one() -> None:
    metrics = ClusterMetrics(MemoryStore(), "c0")
    for epoch, revision in ((1, 3), (4, 9)):
        view = view_of([["s0"], ["s0"]], epoch=epoch)
        metrics._note(Reset(Listing((Entry(VIEW, view.encode(), revision, 3),), revision)))
    assert shown(metrics)["elasticps_cluster_views_total"] == 1


def shown(metrics: ClusterMetrics) -> dict[str, float]:
    return {sample.name: sample.value for family in metrics.collect() for sample in family.samples}


class Full(FaultyStore):
    """An etcd whose quota of space is used up: it answers reads."""

    full = False

    async def compare_and_set(self, key: str, value: bytes, **options: Any) -> int | None:
        if self.full:
            raise WritesRefused("etcd takes no writes")
        return await super().compare_and_set(key, value, **options)


def test_an_etcd_that_takes_no_writes_is_not_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe was a read, which such an etcd answers: its alarm could not fire."""
    monkeypatch.setattr("elasticps.metrics.cluster.PROBE_S", 0.01)

    async def story() -> None:
        store = Full(MemoryStore())
        metrics = ClusterMetrics(store, "c0")
        following = asyncio.create_task(metrics.follow())
        for full in (True, False):
            store.full = full
            await until(lambda: shown(metrics)["elasticps_coordinator_store_up"] == (not store.full))
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)

    asyncio.run(story())
