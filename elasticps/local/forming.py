"""The first steps of a cluster in the coordination store."""

from __future__ import annotations

import time

from coordinator.connect import open_store
from coordinator.core.view import ClusterConfig, View
from coordinator.membership import ViewFollower, create_cluster
from elasticps.errors import Error


async def create(url: str, config: ClusterConfig, deadline: float) -> None:
    """Writes the configuration of a new cluster; waits for etcd until `deadline`, in monotonic seconds."""
    store = await open_store(url, timeout_s=deadline - time.monotonic())
    try:
        await create_cluster(store, config)
    finally:
        await store.close()


async def wait_for_servers(url: str, names: list[str], replicas: int, deadline: float) -> None:
    """Waits for a view that lists all of them, with as many replicas of each range as there can be. Raises Error."""
    last = min(replicas, len(names)) - 1

    def complete(view: View) -> bool:
        return all(view.index(name) >= 0 for name in names) and bool((view.chains[:, last] >= 0).all())

    store = await open_store(url, timeout_s=deadline - time.monotonic())
    try:
        follower = ViewFollower(store)
        await follower.start()
        try:
            await follower.wait_for(complete, timeout_s=deadline - time.monotonic())
        except TimeoutError:
            raise Error(f"no view with the servers {', '.join(names)} was formed in time") from None
        finally:
            await follower.close()
    finally:
        await store.close()
