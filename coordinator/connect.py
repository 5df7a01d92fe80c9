"""From a cluster's URL to its store."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import tenacity

from coordinator.core.errors import StoreUnavailable
from coordinator.core.store import Store
from coordinator.core.url import parse
from coordinator.etcd import EtcdStore

T = TypeVar("T")
_AGAIN_S = 0.1

_HUNG_UP = "Socket closed"  # what gRPC calls a peer that has taken the connection and ended it


async def open_store(url: str, timeout_s: float = 10.0, *, call_timeout_s: float = 5.0) -> Store:
    """Connects to the etcd that `url` names and makes sure that it answers.

    Raises ValueError for an unusable URL or TLS file, StoreUnavailable within `timeout_s` seconds with the endpoints
    tried and what each said. `call_timeout_s` bounds each later call.
    """
    where = parse(url)
    store = EtcdStore(where, timeout_s=call_timeout_s)
    try:
        await store.ping(timeout_s)
    except BaseException as error:
        await store.close()
        if isinstance(error, StoreUnavailable) and where.tls is None and _HUNG_UP in str(error):
            raise StoreUnavailable(f"{error}. If it wants TLS, name files in the URL: ?ca=…&cert=…&key=…") from error
        raise
    return store


async def release_of(store: Store) -> str:
    """Which release of etcd keeps it; "" where that is not known."""
    return await store.release() if isinstance(store, EtcdStore) else ""


async def insist(call: Callable[[], Awaitable[T]], timeout_s: float) -> T:
    """What `call` returns; made again while the store gives no answer. StoreUnavailable after `timeout_s` seconds."""
    again = tenacity.AsyncRetrying(
        retry=tenacity.retry_if_exception_type(StoreUnavailable),
        stop=tenacity.stop_after_delay(timeout_s),
        wait=tenacity.wait_fixed(_AGAIN_S),
        reraise=True,
    )

    async def attempt() -> T:  # tenacity awaits only what is declared so
        return await call()

    return await again(attempt)
