"""A restore that failed and whose driver died while undoing it is repeated; servers are fakes."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest

from coordinator.core.keys import CONFIG, RESTORING
from coordinator.core.view import ClusterConfig, ServerInfo, View
from coordinator.memory import MemoryStore
from elasticps.admin import admin_pb2
from elasticps.checkpoint import restore
from elasticps.checkpoint.storage import Storage
from elasticps.errors import CheckpointError, ClusterUnreachable, ConfigError
from elasticps.model.optimizers import Accumulate
from elasticps.model.spec import TableSpec
from tests.checkpoint.writer import Change, row, write

TABLE = TableSpec("t", 2, Accumulate())
SERVERS = tuple(ServerInfo(name, 1, f"{name}:1", f"{name}:2") for name in ("s0", "s1"))


def test_a_failed_restore_is_repeated_with_other_table_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elasticps.checkpoint.storage._memory", {})
    url = "memory://undone"
    write(Storage(url), 1, {"default/t": (7, TABLE)}, {"default/t": Change({1: row(TABLE, 1)})})
    made: dict[str, set[int]] = {server.admin: set() for server in SERVERS}
    dropped: dict[str, set[int]] = {server.admin: set() for server in SERVERS}
    broken, stuck = ["s1:2"], ["s1:2"]

    async def ask(admin: str, timeout_s: float, request: Any, credentials: object) -> Any:
        if request.act == request.LOOK:
            return admin_pb2.RestoreResponse(taken=sorted({*request.new} & (made[admin] | dropped[admin])))
        if request.act == request.END:
            if admin in stuck:
                raise ClusterUnreachable("it does not answer")
            dropped[admin] |= {*request.new}
            return admin_pb2.RestoreResponse(complete=True)
        if again := {*request.new} & dropped[admin]:
            return admin_pb2.RestoreResponse(failed=f"{again} were dropped")
        made[admin] |= {*request.new}
        if admin in broken:
            return admin_pb2.RestoreResponse(failed="No space left")
        return admin_pb2.RestoreResponse(ranges=range(4))

    monkeypatch.setattr(restore, "ask_restore", ask)
    monkeypatch.setattr(restore, "_ASK_S", 0.2)

    async def story() -> None:
        store = MemoryStore()
        chains = np.array([[r % 2, 1 - r % 2] for r in range(4)], np.int32)
        view = View("c@1", 1, 4, 2, SERVERS, chains, np.full(4, -1, np.int32), np.ones(4, np.int64), "")
        await store.put("view", view.encode())
        await store.put(CONFIG, ClusterConfig(4, 2, id="c").to_json())
        with pytest.raises((CheckpointError, TimeoutError)):
            await restore.restore(store, url)
        assert await store.get(RESTORING) is not None  # it could not be undone in full
        broken.clear()
        stuck.clear()
        report = await restore.restore(store, url)
        assert report.tables == ("default/t",)
        assert await store.get(RESTORING) is None

    asyncio.run(story())


def test_a_restore_whose_table_name_is_taken_registers_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elasticps.checkpoint.storage._memory", {})
    url = "memory://taken"
    tables = {f"default/{name}": (id_, TableSpec(name, 2, Accumulate())) for name, id_ in (("a", 7), ("b", 8))}
    write(Storage(url), 1, tables, {name: Change({1: row(TABLE, 1)}) for name in tables})
    dropped: set[int] = set()
    store = MemoryStore()

    async def ask(admin: str, timeout_s: float, request: Any, credentials: object) -> Any:
        if request.act == request.END:
            dropped.update(request.new)
            return admin_pb2.RestoreResponse(complete=True)
        if request.act == request.GO:  # a worker makes a table
            await store.put("tables/default/b", json.dumps({"id": 99, "spec": TABLE.to_json()}).encode())
        return admin_pb2.RestoreResponse(ranges=range(4))

    monkeypatch.setattr(restore, "ask_restore", ask)

    async def story() -> None:
        chains = np.array([[r % 2, 1 - r % 2] for r in range(4)], np.int32)
        view = View("c@1", 1, 4, 2, SERVERS, chains, np.full(4, -1, np.int32), np.ones(4, np.int64), "")
        await store.put("view", view.encode())
        await store.put(CONFIG, ClusterConfig(4, 2, id="c").to_json())
        with pytest.raises(ConfigError, match="nothing was restored"):
            await restore.restore(store, url, tables=["a", "b"])
        entries = (await store.list("tables/")).entries
        assert {entry.key: json.loads(entry.value)["id"] for entry in entries} == {"tables/default/b": 99}
        assert len(dropped) == 2

    asyncio.run(story())
