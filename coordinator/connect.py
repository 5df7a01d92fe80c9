"""From a cluster's URL to its store."""

from __future__ import annotations

from coordinator.etcd import EtcdStore
from coordinator.store import Store
from coordinator.url import parse


async def open_store(url: str, timeout_s: float = 10.0, *, call_timeout_s: float = 5.0) -> Store:
    """Connects to the etcd that `url` names and makes sure that it answers.

    Raises ValueError for an unusable URL or TLS file, StoreUnavailable within `timeout_s` seconds with the endpoints
    tried and what each said. `call_timeout_s` bounds each later call.
    """
    store = EtcdStore(parse(url), timeout_s=call_timeout_s)
    try:
        await store.ping(timeout_s)
    except BaseException:
        await store.close()
        raise
    return store
