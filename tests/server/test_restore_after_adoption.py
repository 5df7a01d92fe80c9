"""A server outlives the store: a restore after the store was rebuilt is not taken for one of before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from coordinator.adoption import adopt, plan_adoption
from coordinator.core.view import ClusterConfig
from coordinator.membership import create_cluster, new_number
from coordinator.memory import MemoryStore
from elasticps.checkpoint.restore import driving
from tests.coordinator.test_adoption import witness
from tests.server.conftest import Group, Run
from tests.server.test_late_restore import all_done, place


def test_a_restore_after_the_store_was_rebuilt_succeeds(run: Run, tmp_path: Path) -> None:
    spec = place(tmp_path)

    async def test(group: Group) -> None:
        before, after = MemoryStore("test"), MemoryStore("test")
        for name in ("s0", "s1"):
            await group.start(name)
        group.adopt(group.make_view(lambda r: ["s0", "s1"] if r % 2 else ["s1", "s0"]))
        await create_cluster(before, ClusterConfig(2, 2, id="one"))
        for _ in range(500):  # leases, views, rosters
            await before.put("x", b"")
        async with driving(before) as (serial, _):
            assert await all_done(group, serial, spec) == ""
            for server in group.servers.values():
                assert await server.restoring.end(serial, ())
        newest = max(server.admin.cluster_known()["newest"] for server in group.servers.values())
        knows = replace(witness("a"), newest=newest)
        await adopt(after, plan_adoption([knows, replace(knows, name="b", incarnation=1)], (), "x"))
        assert await new_number(after) > newest
        async with driving(after) as (serial, _):
            assert await all_done(group, serial, spec) == ""

    run(test)
