"""Who may write which of a cluster's keys in etcd, once `elasticps cluster protect` has etcd ask. All may read all."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from coordinator.connect import open_store
from coordinator.core.keys import (
    CHECKPOINT_REQUESTS,
    DRAINS,
    INCARNATIONS,
    KNOWN,
    LAST_WORKER,
    NUMBERS,
    ON_LOSS,
    RATES,
    SERVERS,
    TABLES,
    WORKERS,
)
from coordinator.core.names import DEFAULT_APP, check_name
from coordinator.etcd import EtcdStore
from coordinator.etcd_rights import protect as protect_etcd
from elasticps.errors import ConfigError
from elasticps.security.identity import ANY, Identity, Role

WRITES = {
    Role.SERVER: (SERVERS, INCARNATIONS, DRAINS),  # a server that is to end asks to be drained
    Role.COORDINATOR: ("",),
    Role.OPERATOR: ("",),
}
WORKERS_WRITE = (WORKERS, LAST_WORKER, TABLES, RATES, ON_LOSS, CHECKPOINT_REQUESTS, KNOWN)
"""Below each of these a worker writes under the name of its own application. Under `NUMBERS` every worker does: what is
there counts for nothing, only the revision of the write."""


def writers(cluster: str, apps: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """What each user of etcd may write: prefixes of keys by the users' names. The workers' users are one for each of
    these applications, and one for certificates of all applications; so are the readers', who write nothing."""
    found = {Identity(cluster, role, ANY).common_name: prefixes for role, prefixes in WRITES.items()}
    for app in apps:
        user = Identity(cluster, Role.WORKER, ANY, app).common_name
        below = "" if app == ANY else f"{app}/"
        found[user] = (NUMBERS, *(prefix + below for prefix in WORKERS_WRITE))
        found[Identity(cluster, Role.READER, ANY, app).common_name] = ()
    return found


async def protect(url: str, timeout_s: float, apps: Iterable[str] = ()) -> tuple[str, ...]:
    """Has the etcd of a cluster ask, and know these applications; returns the applications that it knows now: also the
    default one and those that have tables or workers. `url` has root's certificate (`Authority.issue_root`).

    ConfigError if it is an etcd without TLS, where nobody has a name, or for a name that no application can have.
    """
    store = await open_store(url, timeout_s=timeout_s)
    try:
        if not isinstance(store, EtcdStore) or not store.secure:
            raise ConfigError("only an etcd with TLS knows who asks: give a URL with ?ca=…&cert=…&key=…")
        try:
            known = sorted({DEFAULT_APP, *apps} | await _applications(store))
            users = writers(store.cluster, (*known, ANY))
        except ValueError as error:
            raise ConfigError(str(error)) from None
        await protect_etcd(store, users)
        return tuple(known)
    finally:
        await store.close()


async def _applications(store: EtcdStore) -> set[str]:
    """The applications that have tables or workers, or had workers."""
    found = set()
    for prefix in (TABLES, WORKERS, LAST_WORKER):
        for entry in (await store.list(prefix)).entries:
            app, _, name = entry.key.removeprefix(prefix).partition("/")
            with suppress(ValueError):  # whoever may write there may have written anything
                found |= {check_name("application", app)} if name else set()
    return found
