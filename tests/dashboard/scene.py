"""A cluster that exists in a model only: a planner without processes, servers that say what the scene has them say."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from coordinator.core.keys import CONFIG, ELECTION, FAILOVER, ROSTER, SERVERS, VIEW, Failover
from coordinator.core.planner import Health, Members, plan
from coordinator.core.store import Delete, Entry, Put
from coordinator.core.view import ClusterConfig, Roster, ServerInfo, View, WorkerInfo
from elasticps.dashboard.core.model import Model
from replication.chain import Member

T0 = 1_763_840_000.0
FOUND_S = 0.015  # before the view stands
BOUNDS_S = [0.001, 0.01, 0.1]


class Scene:
    """model: what it feeds; now: its time, Unix seconds."""

    def __init__(
        self, servers: int = 3, ranges: int = 16, replicas: int = 2, workers: int = 2, zones: int = 1, t0: float = T0
    ) -> None:
        self.now = t0
        self.revision = 0  # of the store
        self.model = Model("demo", t0)
        self.config = ClusterConfig(ranges=ranges, replicas=replicas, min_servers=servers)
        self.view: View | None = None
        self.infos: dict[str, ServerInfo] = {}
        self.counted: dict[str, int] = {}
        self.silent: set[str] = set()
        self.gone: dict[Member, str] = {}
        self.workers = tuple(WorkerInfo(i + 1, f"w{i}", i + 1, "default") for i in range(workers))
        self.put(CONFIG, self.config.to_json())
        self.put(ELECTION, json.dumps({"name": "c0"}).encode())
        for i in range(servers):
            self.register(f"s{i}", zone=f"z{i % zones}" if zones > 1 else "")
        self.plan()
        self.put(ROSTER, Roster(1, self.workers, "demo").encode())
        self.model.store_answers(self.now)
        self.tick()

    def put(self, key: str, value: bytes) -> None:
        """Writes a key of the store."""
        self.revision += 1
        self.model.follow(self.now, Put(Entry(key, value, self.revision, self.revision)))

    def delete(self, key: str) -> None:
        """Deletes a key of the store."""
        self.revision += 1
        self.model.follow(self.now, Delete(key, self.revision))

    def register(self, name: str, zone: str = "", incarnation: int = 1) -> None:
        """A server takes its name."""
        self.infos[name] = ServerInfo(name, incarnation, "127.0.0.1:1", "127.0.0.1:2", zone)
        self.counted[name] = 0
        self.silent.discard(name)
        self.put(SERVERS + name, self.infos[name].to_json())

    def plan(self, *lost: str, level: bool = False) -> None:
        """The leader's next view, if it has one."""
        view = self.view
        self.gone |= {self.infos[name].member: "connection closed" for name in lost}
        filled = {}
        if view is not None and level:
            filled = {r: int(view.since[r]) for r in np.flatnonzero(view.joining >= 0).tolist()}
        members = Members("demo", tuple(i for n, i in self.infos.items() if n not in lost))
        decision = plan(view, members, self.config, Health(self.gone, filled))
        if decision is not None and decision.view is not None:
            self.view = decision.view
            self.put(VIEW, decision.view.encode())
            if decision.lost:
                found = Failover(decision.view.epoch, self.now - FOUND_S, self.now)
                self.put(FAILOVER, found.to_json())

    def kill(self, name: str) -> None:
        """Its connection breaks, and the next view is without it."""
        self.silent.add(name)
        self.model.silent(self.now, name, self.infos[name].incarnation, "the connection broke")
        self.now += 0.02
        self.plan(name)
        self.delete(SERVERS + name)
        del self.infos[name]

    def answer(self, *names: str, pushes: int = 100) -> None:
        """Servers say what they are, all unless some are named."""
        epoch = 0 if self.view is None else self.view.epoch
        for name in names or tuple(self.infos):
            if name in self.silent:
                continue
            self.counted[name] += pushes
            incarnation = self.infos[name].incarnation
            count = self.counted[name]
            self.model.status(self.now, name, incarnation, status(name, incarnation, epoch, count))
            ids, steps = [w.id for w in self.workers], min(self.counted.values())
            self.model.activity(self.now, name, activity(incarnation, ids, steps, count))

    def tick(self, seconds: int = 1) -> None:
        """Lets time pass; every server is asked each second."""
        for _ in range(seconds):
            self.now += 1.0
            self.answer()
            self.model.tick(self.now)


def status(name: str, incarnation: int, epoch: int, pushes: int) -> dict[str, Any]:
    """A StatusResponse."""
    figures = {
        "rows": 1000, "bytes": 1 << 20, "connections": 2, "pushes": pushes, "pulls": 2 * pushes,
        "rows_pushed": 10 * pushes, "rows_pulled": 20 * pushes, "refused": 0, "parked": 1, "tables": 1, "uptime_s": 9.0,
        "log_bytes": 4096, "sent_bytes": 0, "memory_used": 1 << 28, "memory_mark": 1 << 30, "memory_limit": 5 << 28,
        "readers": [{"name": "r0", "app": "default", "age_s": 0.02, "unread_bytes": 0}],
    }  # fmt: skip
    return {"id": name, "incarnation": incarnation, "epoch": epoch, "state": "serving", "pid": 1, **figures}


def activity(incarnation: int, workers: list[int], steps: int, pushes: int) -> dict[str, Any]:
    """An ActivityResponse: each worker's number behind the first."""
    counts = [pushes, pushes // 2, 0, 0]
    return {
        "incarnation": incarnation, "received_bytes": 1000 * pushes, "workers": workers,
        "clocks": [max(0, steps - i) for i in range(len(workers))], "busy_s": pushes / 1e4, "bounds_s": BOUNDS_S,
        "push": counts, "pull": counts, "uses": [],
    }  # fmt: skip


def use(worker: int, **text: int) -> dict[str, int]:
    """A WorkerUse."""
    nothing = dict.fromkeys(("clock", "committed", "sent", "received", "wanted", "kept", "shards"), 0)
    return {"worker": worker, **nothing, **text}
