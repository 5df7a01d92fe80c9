"""A recovery of ranges under way when the store is lost continues in the store that adopts the cluster."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from coordinator.adoption import Witness, adopt, plan_adoption
from coordinator.core.keys import RANGE_RECOVERY
from coordinator.core.view import Roster, ServerInfo, View
from coordinator.memory import MemoryStore
from elasticps.admin.admin_pb2 import RestoreResponse
from elasticps.checkpoint import range_recovery
from elasticps.checkpoint.loss_policy import LossPolicy
from elasticps.checkpoint.storage import Storage
from elasticps.model import spec
from elasticps.model.spec import TableSpec
from replication.chain import CopyState
from tests.checkpoint.writer import Change, row, write

TABLE = TableSpec("t", 3, spec.Adagrad(0.1))


def test_a_recovery_under_way_continues_in_a_new_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(
        Storage(str(tmp_path)), 1, {"default/t": (7, TABLE)}, {"default/t": Change({1: row(TABLE, 1)})}, ranges=2,
        cluster="test@one",
    )  # fmt: skip

    async def answer(*_: object) -> RestoreResponse:
        return RestoreResponse(headed=1)

    monkeypatch.setattr(range_recovery, "ask_restore", answer)
    a = ServerInfo("a", 1, "h:1", "h:2")
    view = View(
        "test@one", 9, 2, 1, (a,), np.array([[0], [-1]], np.int32), np.array([-1, 0], np.int32),
        np.array([1, 9], np.int64), "by hand", copy_state=np.array([CopyState.NONE, CopyState.RECOVERING], np.int32),
        recovery_epoch=np.array([0, 8], np.int64),
    )  # fmt: skip

    async def test() -> None:
        store = MemoryStore("test")
        witness = Witness("a", 1, view, Roster(3, (), "test@one"), 7, {7: TABLE.to_json()})
        await adopt(store, plan_adoption([witness], (), "default"))
        await store.put("servers/a", a.to_json())
        recovery = LossPolicy(store, tmp_path.as_uri(), None)
        for _ in range(2):
            await recovery._judge()
        entry = await store.get(RANGE_RECOVERY)
        assert entry is not None, "range 1 has no head, and nobody brings it back, ever"
        assert json.loads(entry.value)["ranges"] == [1]

    asyncio.run(test())
