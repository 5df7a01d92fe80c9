"""A coordinator whose metrics fail."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from coordinator.losses import key_of, known_key
from coordinator.membership import NEWEST_CHECKPOINT
from coordinator.memory import MemoryStore
from coordinator.store import Entry, Put
from elasticps.checkpoint.create import newest
from elasticps.cli import processes
from elasticps.local.etcd import free_ports
from elasticps.metrics.cluster import ClusterMetrics


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


def test_the_age_of_the_newest_checkpoint_can_be_watched() -> None:
    metrics = ClusterMetrics(MemoryStore(), "c0")
    assert not [family for family in metrics.collect() if "checkpoint" in family.name]
    metrics._note(Put(Entry(NEWEST_CHECKPOINT, newest(7, 1.5e9), 3, 3)))
    found = {family.name: family.samples[0].value for family in metrics.collect()}
    assert found["elasticps_cluster_checkpoint"] == 7
    assert found["elasticps_cluster_checkpoint_time_seconds"] == 1.5e9


def test_what_was_lost_can_be_watched() -> None:
    """A worker has the last word on itself; of one whose steps nobody knows there is nothing to tell yet."""
    metrics = ClusterMetrics(MemoryStore(), "c0")

    def found() -> tuple[float, float]:
        values = {sample.name: sample.value for family in metrics.collect() for sample in family.samples}
        return values["elasticps_cluster_ranges_begun_anew_total"], values["elasticps_cluster_lost_steps"]

    def tell(key: str, document: dict[str, Any]) -> None:
        metrics._note(Put(Entry(key, json.dumps(document).encode(), 3, 3)))

    assert found() == (0, 0)
    tell(key_of(7), {"epoch": 7, "ranges": [1, 4], "workers": [{"id": 5, "have": 12, "to": 0}]})
    assert found() == (2, 0)
    tell(known_key(7, 5), {"committed": 20})
    assert found() == (2, 8)
    tell(key_of(9), {"epoch": 9, "ranges": [1], "workers": [{"id": 5, "have": 30, "to": 33}]})
    assert found() == (3, 8)
