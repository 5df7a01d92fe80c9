"""A coordinator whose metrics fail."""

from __future__ import annotations

import asyncio

import pytest

from coordinator.membership import NEWEST_CHECKPOINT
from coordinator.memory import MemoryStore
from coordinator.store import Entry, Put
from elasticps.checkpoint.create import newest
from elasticps.cli import processes
from elasticps.metrics.cluster import ClusterMetrics
from tests.coordinator.support import free_port


def test_metrics_that_fail_end_the_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would show for ever what was true once."""

    async def open_store(url: str, timeout_s: float) -> MemoryStore:
        return MemoryStore()

    async def fail(metrics: ClusterMetrics) -> None:
        raise RuntimeError("nobody has thought of this")

    async def run() -> None:
        at = "127.0.0.1", free_port()
        await asyncio.wait_for(processes._coordinate("etcd://127.0.0.1:1/test", "c0", {}, 5.0, at), 10)

    monkeypatch.setattr(processes, "open_store", open_store)
    monkeypatch.setattr(ClusterMetrics, "_probe", fail)
    with pytest.raises(RuntimeError, match="nobody has thought of this"):
        asyncio.run(run())


def test_the_age_of_the_newest_checkpoint_can_be_watched() -> None:
    metrics = ClusterMetrics(MemoryStore(), "c0")
    assert not [family for family in metrics.collect() if "checkpoint" in family.name]
    metrics._note(Put(Entry(NEWEST_CHECKPOINT, newest(7, 1.5e9), 3, 3)))
    found = {family.name: family.samples[0].value for family in metrics.collect()}
    assert found["elasticps_cluster_checkpoint"] == 7
    assert found["elasticps_cluster_checkpoint_time_seconds"] == 1.5e9
