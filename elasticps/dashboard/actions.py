"""Changes to a cluster from the page: drains, and the number of servers of a local cluster."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from coordinator.core.errors import StoreUnavailable
from coordinator.core.store import Store
from coordinator.membership import cancel_drain, request_drain
from elasticps.errors import ConfigError
from elasticps.local import scaling, state
from elasticps.local.operator_client import OperatorClient
from elasticps.local.process import Process

TIMEOUT_S = 5.0

Scaler = Callable[[int], str]
"""Has so many servers serve, and says which do; blocks."""


class Actions:
    """Performs changes for requests that have the token, with the rights of the dashboard's own certificate. scaler:
    None for a cluster whose processes are not this machine's."""

    def __init__(self, token: str, store: Callable[[], Store | None], scaler: Scaler | None = None) -> None:
        self.token = token
        self._store = store
        self._scaler = scaler
        self._scaling: asyncio.Task[str] | None = None

    async def perform(self, request: Mapping[str, Any]) -> str:
        """request: {"act": "drain" or "cancel-drain", "server": name} or {"act": "scale", "servers": 4}. Says what was
        done. ValueError, KeyError or TypeError for what is none of these, or as the store raises."""
        act = request["act"]
        if act == "scale":
            return await self._scale(request["servers"])
        if act not in ("drain", "cancel-drain"):
            raise ValueError(f"no such act: {act!r}")
        store, server = self._store(), str(request["server"])
        if store is None:
            raise StoreUnavailable("etcd was not reached yet")
        try:
            async with asyncio.timeout(TIMEOUT_S):
                if act == "drain":
                    await request_drain(store, server)
                    return f"{server} drains"
                there = await cancel_drain(store, server)
                return f"{server} stays" if there else f"{server} was not asked to drain"
        except TimeoutError:
            raise StoreUnavailable("etcd does not answer") from None

    async def _scale(self, servers: object) -> str:
        if self._scaler is None:
            raise ConfigError(
                "this machine did not start the servers: start more where they run, or drain one of them here"
            )
        if not isinstance(servers, int) or isinstance(servers, bool):
            raise TypeError(f"so many servers cannot be: {servers!r}")
        if self._scaling is not None and not self._scaling.done():
            raise ConfigError("servers come or go already; wait until nothing moves")
        self._scaling = asyncio.create_task(asyncio.to_thread(self._scaler, servers), name="scale")
        return await asyncio.shield(self._scaling)  # it goes on, even if nobody waits for the answer


def scaler_of(url: str) -> Scaler | None:
    """Scales the local cluster at `url` as `elasticps scale` does; None if the cluster was started elsewhere."""
    if state.started_here(url) is None:
        return None

    def scale(servers: int) -> str:
        record = state.started_here(url)
        if record is None:
            raise ConfigError("the cluster has ended")
        folder = state.folder_of(record.name)
        with OperatorClient(record.url) as operator:
            names = [server.name for server in record.servers]
            change = scaling.change(names, operator.draining(), servers, operator.leaving())
        spawn = _reaped(scaling.spawn_recorded(folder))
        outcome = scaling.scale(record.url, change, spawn, partial(scaling.wait_ended, folder))
        return f"{', '.join(outcome.servers)} serve, after {outcome.seconds:.1f} s"

    return scale


def _reaped(spawn: Callable[[str, list[str]], Process]) -> scaling.Spawn:
    """Waits for the processes that `spawn` starts, which are children of this process: no zombie is left."""

    def spawned(name: str, more: list[str]) -> Process:
        process = spawn(name, more)
        threading.Thread(target=process.popen.wait, name=f"waits for {name}", daemon=True).start()
        return process

    return spawned
