"""How commands read what etcd knows of a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from coordinator.connect import open_store
from coordinator.core.store import Store
from coordinator.core.url import parse
from elasticps.errors import ClusterUnreachable, ConfigError

T = TypeVar("T")


async def read_store(url: str, timeout_s: float, read: Callable[[Store], Awaitable[T]]) -> T:
    """What `read` finds in the store of the cluster at `url`. ConfigError for a URL that cannot be used,
    ClusterUnreachable and coordinator's `StoreUnavailable` when etcd does not answer within `timeout_s`."""
    try:
        cluster = parse(url)
        store = await open_store(url, timeout_s=timeout_s)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    try:
        async with asyncio.timeout(timeout_s):
            return await read(store)
    except TimeoutError:
        text = f"etcd at {', '.join(cluster.endpoints)} did not answer within {timeout_s:g} s"
        raise ClusterUnreachable(text) from None
    finally:
        await store.close()
