"""Makes checkpoints of a story's cluster and brings back what is lost, as the coordinator that leads does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from chaos.sim.cluster import STORE_TIMEOUT_S, Cluster
from chaos.sim.cuts import ANSWER_S, HOLD_S, Afar
from coordinator.core.errors import StoreUnavailable
from elasticps.admin.admin_pb2 import RestoreRequest, RestoreResponse
from elasticps.checkpoint.create import checkpoint
from elasticps.checkpoint.loss_policy import LossPolicy
from elasticps.checkpoint.manifest import Manifest
from elasticps.checkpoint.range_recovery import bring_back
from elasticps.checkpoint.storage import Storage
from elasticps.errors import CheckpointError, ClusterUnreachable

PLACE = "memory://sim"  # where servers of stories write
PAUSE_S = 0.2
FULL = 0.3
PERSON = "person"


class Checkpointer:
    """Makes checkpoints as long as `on()`; made: the manifests of those that succeeded, by cut."""

    def __init__(self, cluster: Cluster, on: Callable[[], bool]) -> None:
        self.made: dict[int, Manifest] = {}
        self._cluster = cluster
        self._on = on
        storage = Storage(PLACE)
        storage.delete([path for path, _ in storage.files()])

    def start(self) -> None:
        """Starts making checkpoints, on a host of its own."""
        self._cluster.start_task("keeper", self._run)

    async def _run(self) -> None:
        cluster, random = self._cluster, self._cluster.clock.chance("keeper")
        store = cluster.store.client("keeper", STORE_TIMEOUT_S)
        recovery = asyncio.get_running_loop().create_task(LossPolicy(store, "", None).run())
        while self._on():
            await asyncio.sleep(random.expovariate(1 / PAUSE_S))
            full, hold_s = random.random() < FULL, random.uniform(*HOLD_S)
            try:
                made = await checkpoint(
                    store, PLACE, lambda info: Afar(cluster, info, random), full=full, hold_s=hold_s
                )  # fmt: skip
            except (CheckpointError, StoreUnavailable) as error:
                cluster.clock.note(f"no checkpoint: {error}")
                continue
            cluster.clock.note(f"checkpoint {made.cut}, which adds to {made.since}")
            self.made[made.cut] = made
        await recovery

    def have_brought_back(self, report: Callable[[dict[str, Any]], None]) -> None:
        """Gives up all lost ranges and restores them from the newest checkpoint, as a person would by command."""
        store = self._cluster.store.client(PERSON, STORE_TIMEOUT_S)

        async def work() -> None:
            report(await bring_back(store, "", None, accept_loss=True))

        self._cluster.start_task(PERSON, work)


async def ask_restore(cluster: Cluster, address: str, request: RestoreRequest) -> RestoreResponse:
    """Asks the server at an address to restore, as `elasticps.admin.client.ask_restore` does."""
    found = cluster.servers.get(address.partition(":")[0])
    if found is None or found.now is None:
        await asyncio.sleep(ANSWER_S)
        raise ClusterUnreachable(f"there is no server at {address}")
    return await Afar(cluster, found.now.me, cluster.clock.chance("restores")).restore(request)
