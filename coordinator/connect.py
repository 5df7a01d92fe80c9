"""Opens the store that a cluster's URL names, and says which releases of etcd will do."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import TypeVar

import tenacity

from coordinator.core.errors import StoreUnavailable
from coordinator.core.store import Store
from coordinator.core.url import parse
from coordinator.etcd import EtcdStore

T = TypeVar("T")
OLDEST = (3, 4)  # of etcd; Debian 12's, 3.4.23, was tried
_AGAIN_S = 0.1  # between two attempts
_HUNG_UP = "Socket closed"  # what gRPC says of a peer that has accepted the connection and ended it


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


async def insist(call: Callable[[], Awaitable[T]], timeout_s: float) -> T:
    """Repeats `call` while the store gives no answer, and returns what it returns. Raises StoreUnavailable after
    `timeout_s` seconds."""
    again = tenacity.AsyncRetrying(
        retry=tenacity.retry_if_exception_type(StoreUnavailable),
        stop=tenacity.stop_after_delay(timeout_s),
        wait=tenacity.wait_fixed(_AGAIN_S),
        reraise=True,
    )

    async def attempt() -> T:  # tenacity awaits only functions that are declared async
        return await call()

    return await again(attempt)


async def release_of(store: Store) -> str:
    """Returns the release of etcd that keeps the store, such as "3.5.9"; "" if it is unknown."""
    return await store.release() if isinstance(store, EtcdStore) else ""


def release_warning(release: str) -> str:
    """Warns of a release of etcd that is too old or damages data; returns "" for any other, and for an unknown one."""
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", release)
    if found is None:
        return ""
    major, minor, patch = (int(number or 0) for number in found.groups())
    if (major, minor) < OLDEST:
        return f"etcd {release} is older than any that was tried: take 3.4, or better 3.5.3 or later"
    if (major, minor) == (3, 5) and patch <= 2:
        return (
            f"etcd {release} may corrupt its data when it is killed under load, and its makers advise against it: it "
            "will do for trying out; else take etcd 3.5.3 or later"
        )
    return ""
