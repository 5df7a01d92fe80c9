"""The newest checkpoint of a story comes back into a cluster of other servers and ranges: every row to the bit, usage
included, and every key that waits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from chaos.sim.checkpointer import PERSON, PLACE
from chaos.sim.checks.growth import KEYS, Growth
from chaos.sim.checks.growth_content import compare, content_of
from chaos.sim.checks.growth_model import TableModel
from chaos.sim.cluster import STORE_TIMEOUT_S, Cluster
from chaos.sim.network import Weather
from chaos.sim.run import Scene, virtual
from chaos.sim.small_limits import turned
from chaos.sim.story import Kind, tell
from coordinator.core.view import ClusterConfig
from elasticps.checkpoint import restore
from elasticps.kernels.hashing import key_ranges, range_shift, table_salt
from elasticps.server.roles.sweeper import Sweeper
from replication.chain import Role
from tests.sim.conftest import wait_for

SERVERS, REPLICAS = 3, 2


def checkpointed(
    growth: Growth, cut: int, ranges: int, tables: list[int], into: int
) -> Iterator[tuple[int, int, TableModel]]:
    """What each of `into` ranges of each table has, by the models of all ranges at a cut."""
    models = [growth.model_at(r, cut) for r in range(ranges)]
    for number in tables:
        found = [model.table(number) for model in models]
        place = np.empty(KEYS, np.int32)
        key_ranges(np.arange(KEYS), table_salt(number), range_shift(into), place)
        for r in range(into):
            rows = {key: row for one in found if one for key, row in one.rows.items() if place[key] == r}
            waiting = {key: known for one in found if one for key, known in one.waiting.items() if place[key] == r}
            yield number, r, replace(next(one for one in found if one), rows=rows, waiting=waiting)


@pytest.mark.parametrize(("seed", "into"), [(3, 4), (4, 16)])
def test_a_checkpoint_comes_back_into_other_servers_and_ranges(
    seed: int, into: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    story = tell(seed, Kind("calm", "free", cuts=True, grows=True))
    with virtual() as machine, turned(story.small, story.tight, story.short, story.grows):
        scene = Scene(story)
        machine(scene.cluster)
        scene.play()
        scene.cluster.end()
        assert scene.checkpointer is not None
        manifest = scene.checkpointer.made[max(scene.checkpointer.made)]
        tables = [number for number, spec in manifest.tables.values() if spec.usage]

        monkeypatch.setattr(Sweeper, "tick", lambda self: None)  # nothing goes afterwards
        monkeypatch.setattr(restore, "ask_restore", machine.ask_restore)
        cluster = Cluster(seed, Weather(), ClusterConfig(into, REPLICAS, SERVERS), admin=True)
        machine(cluster)
        cluster.start_leader("c0")
        for i in range(SERVERS):
            cluster.start_server(f"s{i}")
        wait_for(cluster, cluster.whole)
        done: list[restore.RestoreReport] = []

        async def bring_back() -> None:
            done.append(await restore.restore(cluster.store.client(PERSON, STORE_TIMEOUT_S), PLACE))

        cluster.start_task(PERSON, bring_back)
        wait_for(cluster, lambda: bool(done) and cluster.settled() == "")
        rows = 0
        for number, r, expected in checkpointed(scene.growth, manifest.cut, story.ranges, tables, into):
            replicas = [
                found.now for found in cluster.servers.values() if found.now and found.now.replica.role[r] == Role.FULL
            ]
            assert len(replicas) == REPLICAS
            for server in replicas:
                compare(
                    f"range {r} at {server.member}",
                    content_of(server.store.tables[number], r)._replace(sketch=None),
                    expected,
                )
            rows += len(expected.rows)
        assert rows
        cluster.end()
