"""Answers the admin service: status, activity, hot keys, and digests of ranges at one place of their logs."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from elasticps.admin.interface import MarkedRange
from elasticps.server.core.audit import slices
from elasticps.server.core.headroom import Headroom
from elasticps.server.fast.layout import H_RECEIVED_FORWARD, H_RECEIVED_PULL, H_RECEIVED_PUSH
from elasticps.server.roles.context import Context
from elasticps.server.roles.cuts import CutHandler
from elasticps.server.roles.executor import COUNTED
from elasticps.server.roles.handshake import HelloHandler
from elasticps.server.roles.hot_keys import HotKeys
from elasticps.server.roles.readers import ReaderFeeds
from elasticps.server.roles.restoring import Restorer
from elasticps.server.roles.snapshots import SnapshotSender
from elasticps.server.roles.worker_activity import WorkerActivity
from elasticps.wire.activity import Activity
from replication.chain import Role
from replication.effects import Status
from replication.messages import OperationKind
from replication.progress import PART_BITS
from replication.step_records import home_range

_RECEIVED = (H_RECEIVED_PUSH, H_RECEIVED_PULL, H_RECEIVED_FORWARD)  # counters of usual frames, which are nearly all


class Measured(Protocol):
    """Durations of a server's requests: see `elasticps.metrics.timing`."""

    @property
    def busy_s(self) -> float: ...

    def counts_by_time(self) -> tuple[Sequence[float], dict[str, Sequence[int]]]:
        """Bounds in seconds; by kind, how many requests took a time between them."""


class AdminRoles(NamedTuple):
    """The parts of a server of which its admin service speaks, or that it asks."""

    snapshots: SnapshotSender
    headroom: Headroom
    handshake: HelloHandler
    cuts: CutHandler
    activity: WorkerActivity
    restoring: Restorer
    readers: ReaderFeeds


class ServerAdmin:
    """The `AdminInterface` of a server. measured: durations of requests, if they are measured. parked: counts requests
    that wait for steps of workers."""

    measured: Measured | None = None

    def __init__(self, context: Context, parked: Callable[[], int], roles: AdminRoles) -> None:
        self.me = context.me  # this server
        self._serving = context.serving  # its ranges and view
        self._executor = context.executor  # its rows and replicas
        self._path = context.path  # counts frames
        self._notifier = context.notifier  # counts refusals
        self._parked = parked  # pulls that wait
        self._readers = roles.readers  # that are attached
        self._snapshots = roles.snapshots  # rows sent to joiners
        self._headroom = roles.headroom  # of memory
        self._handshake = roles.handshake  # connections
        self.cuts = roles.cuts  # of checkpoints
        self._activity = roles.activity  # of workers
        self.restoring = roles.restoring  # from checkpoints
        self._clock = context.clock  # seconds
        self._started_s = self._clock()  # when this began

    @property
    def epoch(self) -> int:
        """Epoch of the view that is followed."""
        return self._serving.epoch

    @property
    def acknowledged(self) -> dict[int, int]:
        """By worker, the clock up to which it has been told that its steps are committed."""
        return self._path.acknowledged_clocks()

    async def mark(self, mark: int) -> bool:
        """Makes every replica of the ranges headed here note their digests; False if the view changed meanwhile."""
        for ranges, part in slices(self._executor.store.tables, self._serving.headed, mark):
            reply = await self._executor.log(self._serving.epoch, OperationKind.AUDIT, ranges, part, 64).future
            if reply.status is not Status.COMMITTED or len(reply.moved):
                return False
        return True

    def marked(self, mark: int) -> dict[int, MarkedRange]:
        """What this replica noted at a mark, by range."""
        return self._executor.marks.of(mark)

    def status(self) -> dict[str, Any]:
        """What `elasticps status` shows of this server."""
        store, replica, role = self._executor.store, self._executor.replica, self._executor.replica.role
        held = int((role == Role.FULL).sum())
        return {
            "id": self.me.name,
            "pid": os.getpid(),
            "address": self.me.address,
            "admin": self.me.admin,
            "incarnation": self.me.incarnation,
            "state": "serving" if held else "spare",
            "epoch": self.epoch,
            "ranges_headed": len(self._serving.headed),
            "ranges_held": held,
            "ranges_joining": int((role == Role.JOINING).sum()),
            "rows": store.rows,
            "bytes": store.nbytes,
            "memory_used": self._headroom.used,
            "memory_mark": self._headroom.mark,
            "memory_limit": self._headroom.limit,
            "connections": len(self._handshake.connections),
            **{what: self._executor.counts.count(what) for what in COUNTED},
            "refused": self._notifier.errors.total,
            "parked": self._parked(),
            "log_bytes": replica.log.nbytes + replica.retained.nbytes,
            "sent_bytes": self._snapshots.sent_bytes,
            "tables": len(store.live),
            "uptime_s": self._clock() - self._started_s,
            "leader_clock": self._handshake.leader_wall_s(),
            "readers": self._readers.describe(),
        }

    def activity(self) -> dict[str, Any]:
        """Traffic and progress, for a dashboard that asks every second."""
        clocks = self.clocks()
        found: dict[str, Any] = {
            "incarnation": self.me.incarnation,
            "received_bytes": sum(map(self._path.counter, _RECEIVED)),
            "workers": clocks.keys(),
            "clocks": clocks.values(),
            "uses": [_fields(worker, activity) for worker, activity in self._activity.look().items()],
        }
        if self.measured is not None:
            bounds_s, counts = self.measured.counts_by_time()
            found |= {"busy_s": self.measured.busy_s, "bounds_s": bounds_s, **counts}
        return found

    async def hot(self, seconds: float) -> dict[str, Any]:
        """The keys that workers ask for most in the next `seconds`."""
        hot = HotKeys(self._path, self._executor.store, self._serving.ranges)
        await hot.look(seconds, self._clock)
        return {"incarnation": self.me.incarnation} | hot.found()

    def clocks(self) -> dict[int, int]:
        """By worker whose home range is headed here, the steps applied there: each of its steps ticks that range."""
        headed, clocks = set(self._serving.headed.tolist()), self._executor.replica.clocks
        homes = {worker: home_range(worker, self._serving.ranges) for worker in self._serving.workers}
        found = {worker: clocks.at(worker, home) for worker, home in homes.items() if home in headed}
        return {worker: progress >> PART_BITS for worker, progress in found.items() if progress}

    def cluster_known(self) -> dict[str, Any]:
        """What this server knows of the cluster, for a store that has lost it."""
        serving, view = self._serving, self._serving.view
        store = self._executor.store
        return {
            "name": self.me.name,
            "incarnation": self.me.incarnation,
            "view": b"" if view is None else view.encode(),
            "roster": b"" if view is None or serving.roster is None else serving.roster.encode(),
            "newest": max(
                self._executor.replica.clocks.newest,
                self.restoring.serial,
                *serving.workers,
                *store.tables,
                *store.dropped,
            ),
        }

    def tables(self) -> list[dict[str, Any]]:
        """What `elasticps tables` shows of this server."""
        headed = self._serving.headed
        return [
            {
                "id": table.table_id,
                "rows_headed": sum(table.count_range(r) for r in headed.tolist()),
                "rows": table.rows,
                "bytes": table.nbytes,
                "spec": table.spec.to_json(),
                "app": table.app,
                **({} if table.lifecycle is None else table.lifecycle.counts(headed)),
            }
            for table in self._executor.store.live.values()
        ]


def _fields(worker: int, activity: Activity) -> dict[str, int]:
    """The fields of a worker's activity in admin.proto."""
    fields = activity._asdict()
    return {"worker": worker, "wanted": fields.pop("cache_reads"), "kept": fields.pop("cache_hits"), **fields}
