"""Servers of a cluster of two that is cut and written as its tests say, without a process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from coordinator.core.view import Roster, ServerInfo, View, WorkerInfo
from coordinator.memory import MemoryStore
from elasticps.admin.interface import CutState, CutTaken, CutWritten, WorkerHeld, Writing, WrittenFile
from elasticps.checkpoint import row_writer
from elasticps.checkpoint.create import checkpoint
from elasticps.checkpoint.manifest import Manifest
from elasticps.checkpoint.rows import RowFile
from elasticps.checkpoint.storage import Storage
from elasticps.errors import ClusterUnreachable
from elasticps.model.optimizers import Accumulate
from elasticps.model.spec import TableSpec
from elasticps.store.layout import RowLayout
from replication.progress import ERASER, digest_of

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

    async def held(self, cut: int) -> Mapping[int, WorkerHeld]:
        if not self.index:
            return {NEW: WorkerHeld(0, 1, 0)}
        return {ONE: WorkerHeld(7, 1, digest_of(ONE, np.arange(P), np.full(P, 7 << 16)))}

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
        for name, fields in (("t", {"id": 4}), ("u", {"id": 9, "dropping": True}), ("late", {"id": 8})):
            spec = TableSpec(name, 2, Accumulate()).to_json()
            table = {"spec": spec, "creator": 1, "ready": True} | fields
            await self.store.put(f"tables/default/{name}", json.dumps(table).encode())
        for name, id_ in (("w", ONE), ("gone", GONE), ("late", 99)):
            past = {"id": id_, "base": 1, "trained": 2, "steps": 3}
            await self.store.put(f"last-worker/default/{name}", json.dumps(past).encode())

    async def take(self, **options: Any) -> Manifest:
        return await checkpoint(self.store, self.storage.url, lambda info: self.servers[info.name], **options)
