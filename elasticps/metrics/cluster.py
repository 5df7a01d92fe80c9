"""The metrics of a coordinator, leading or standing by: what the coordination store says of its cluster.

Read from the store and not from the leader's planning, so that every coordinator shows the same picture and a standby
that cannot see etcd is noticed before it is needed.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Set
from contextlib import aclosing, suppress

import numpy as np
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from coordinator.core import fields
from coordinator.core.cluster_state import ClusterState
from coordinator.core.errors import CoordinationError, StoreUnavailable
from coordinator.core.keys import (
    merge_losses,
)
from coordinator.core.store import Change, Reset, Store
from coordinator.core.view import View
from coordinator.leadership import first_of
from coordinator.trouble import check_writes
from elasticps.metrics.exposition import Scrape
from replication.chain import Member

log = fields.logger(__name__)

PROBE_S = 5.0
RETRY_S = 0.5
STATES = ("serving", "spare", "draining", "silent")


class ClusterMetrics(Collector):
    """Shows a cluster's keys from `start` to `close`, as `follow` has them; `name` is this coordinator's."""

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._name = name
        self._state = ClusterState(store.cluster)
        self._counts = Counter[str]()
        self._store_up = True
        self._ill = False
        self._store_s = 0.0
        self._scrape: Scrape | None = None

    async def start(self, host: str, port: int) -> None:
        """Serves /metrics. Raises ConfigError when the port cannot be had."""
        self._scrape = await Scrape.start(host, port, [self])

    async def follow(self) -> None:
        """Follows the keys until cancelled. Unexpected errors are raised: figures that stand still would mislead."""
        await first_of(self._follow(), self._probe())

    async def close(self) -> None:
        """Closes the port."""
        if self._scrape is not None:
            await self._scrape.close()

    def on_ill(self, ill: bool) -> None:
        """Notes whether this coordinator hears so few servers that the trouble must be its own."""
        self._ill = ill

    # --- the store --------------------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        while True:
            with suppress(StoreUnavailable):
                listing = await self._store.list("")
                self._note(Reset(listing))
                async with aclosing(self._store.watch("", after=listing.revision)) as changes:
                    async for change in changes:
                        self._note(change)
            await asyncio.sleep(RETRY_S)

    async def _probe(self) -> None:
        while True:
            began = time.monotonic()
            try:
                await check_writes(self._store)
            except CoordinationError:
                self._store_up = False
                self._counts["store_failures"] += 1
            else:
                self._store_up = True
                self._store_s = time.monotonic() - began
            await asyncio.sleep(PROBE_S)

    def _note(self, change: Change) -> None:
        before, self._state = self._state, self._state.apply(change)
        for key, why in self._state.nonsense.items():
            if before.nonsense.get(key) != why:
                log.warning("an entry makes no sense and is left out of the metrics", key=key, why=why)
        if (view := self._state.view) is not None and before.view is not None and view.epoch > before.view.epoch:
            self._counts["views"] += 1
            self._counts["failovers"] += len(lost(before.view, view) - self._state.draining)
            self._counts["moves"] += moved(before.view, view)

    # --- what is shown ----------------------------------------------------------------------------------------------

    def collect(self) -> Iterator[Metric]:
        """The families; those of the view once there is one."""
        leads = self._state.leader == self._name
        yield GaugeMetricFamily("elasticps_coordinator_leader", "1 on the one that leads.", value=leads)
        yield GaugeMetricFamily(
            "elasticps_coordinator_ill",
            "1 while most servers are silent since one moment: this coordinator must be cut off, they count as alive.",
            value=self._ill,
        )
        yield GaugeMetricFamily(
            "elasticps_coordinator_store_up", "Whether etcd answers, and takes writes.", value=self._store_up
        )
        yield GaugeMetricFamily(
            "elasticps_coordinator_store_seconds", "How long its last answer took.", value=self._store_s
        )
        yield _counter("elasticps_coordinator_store_failures", "Calls to etcd in vain.", self._counts["store_failures"])
        yield _counter("elasticps_cluster_views", "Views seen.", self._counts["views"])
        yield _counter(
            "elasticps_cluster_failovers", "Servers that a view left out while they held ranges, unasked.",
            self._counts["failovers"],
        )  # fmt: skip
        yield _counter("elasticps_cluster_moves", "Replicas filled and made full members.", self._counts["moves"])
        workers = () if self._state.roster is None else self._state.roster.workers
        yield GaugeMetricFamily("elasticps_cluster_workers", "Workers in the roster.", value=len(workers))
        if self._state.checkpoint is not None:
            cut, made = self._state.checkpoint
            yield GaugeMetricFamily("elasticps_cluster_checkpoint", "The newest one's number, 0: none yet.", value=cut)
            yield GaugeMetricFamily(
                "elasticps_cluster_checkpoint_time_seconds",
                "When it was made, since 1970; if there is none yet, when they were first to be made.",
                value=made,
            )
        yield from self._of_losses()
        yield from self._of_servers()
        if self._state.view is not None:
            yield from _of_view(self._state.view)
            registered = {server.member for server in self._state.registered}
            yield GaugeMetricFamily(
                "elasticps_cluster_waiting_ranges",
                "Ranges whose every replica has lost its lease: the last one stays in the view, and they wait for it.",
                value=waiting(self._state.view, registered),
            )

    def _of_losses(self) -> Iterator[Metric]:
        losses = merge_losses(self._state.losses)
        yield _counter(
            "elasticps_cluster_ranges_begun_anew",
            "Ranges of which nobody was left, and that came back from a checkpoint.",
            sum(len(loss["ranges"]) for loss in losses),
        )
        yield GaugeMetricFamily(
            "elasticps_cluster_lost_steps",
            "The most steps of one worker that are missing in such ranges, of all times that it happened.",
            value=max((max(0, one["to"] - one["have"]) for loss in losses for one in loss["workers"]), default=0),
        )

    def _of_servers(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(
            "elasticps_cluster_servers",
            "Servers by state; silent: it holds ranges and its lease has ended.",
            labels=["state"],
        )
        counts = Counter(self._states())
        for state in STATES:
            family.add_metric([state], counts[state])
        yield family

    def _states(self) -> Iterator[str]:
        registered = {server.member for server in self._state.registered}
        holding = set() if self._state.view is None else holders(self._state.view)
        for member in registered | holding:
            if member not in registered:
                yield "silent"
            elif member in self._state.draining:
                yield "draining"
            else:
                yield "serving" if member in holding else "spare"


def _of_view(view: View) -> Iterator[Metric]:
    yield GaugeMetricFamily("elasticps_cluster_epoch", "The newest view.", value=view.epoch)
    lengths = (view.chains >= 0).sum(axis=1)
    ranges = GaugeMetricFamily(
        "elasticps_cluster_ranges", "Ranges, by the length of their chains.", labels=["replicas"]
    )
    for replicas, count in enumerate(np.bincount(lengths, minlength=view.replicas + 1).tolist()):
        ranges.add_metric([str(replicas)], count)
    yield ranges
    short, joining = int((lengths < view.replicas).sum()), int((view.joining >= 0).sum())
    yield GaugeMetricFamily("elasticps_cluster_short_ranges", "Ranges with fewer replicas than asked for.", value=short)
    yield GaugeMetricFamily(
        "elasticps_cluster_joining_ranges", "Ranges of which a replica is being filled.", value=joining
    )
    yield GaugeMetricFamily(
        "elasticps_cluster_one_zone_ranges",
        "Ranges with several replicas, all in one zone, though the servers are in several.",
        value=_in_one_zone(view),
    )


def holders(view: View) -> set[Member]:
    """The servers that have a place in a chain, or are being filled for one."""
    indices = np.unique(np.column_stack((view.chains, view.joining)))
    return {view.servers[i].member for i in indices.tolist() if i >= 0}


def lost(before: View, after: View) -> set[Member]:
    """Finds servers that held ranges and left the view: they died, were taken for dead, or gave up their last range."""
    listed = {server.member for server in after.servers}
    full = {before.servers[i].member for i in np.unique(before.chains).tolist() if i >= 0}
    return full - listed


def moved(before: View, after: View) -> int:
    """Counts the ranges whose joining replica has become a full one."""
    index = {server.member: i for i, server in enumerate(after.servers)}
    translated = np.array([index.get(server.member, -2) for server in before.servers] + [-2])
    joined = translated[before.joining]  # index -1, nobody, finds the last -2
    return int((after.chains == joined[:, None]).any(axis=1).sum())


def waiting(view: View, registered: Set[Member]) -> int:
    """Counts the ranges without a replica on a registered server."""
    there = np.array([server.member in registered for server in view.servers] + [False])
    return int((~there[view.chains].any(axis=1)).sum())  # index -1, nobody, finds the last


def _in_one_zone(view: View) -> int:
    names = sorted({server.zone for server in view.servers})
    if len(names) < 2 or view.replicas < 2:
        return 0
    zones = np.array([names.index(server.zone) for server in view.servers])
    there = view.chains >= 0
    of_chains = np.where(there, zones[view.chains], zones[view.chains[:, :1]])  # an empty place counts as the head's
    several = there.sum(axis=1) > 1
    return int((several & (of_chains == of_chains[:, :1]).all(axis=1)).sum())


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=value)
