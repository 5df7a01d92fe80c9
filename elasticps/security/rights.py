"""Who may write which of a cluster's keys in etcd, once `elasticps cluster protect` has etcd ask. All may read all."""

from __future__ import annotations

from coordinator.adoption import ON_LOSS, RATES, TABLES
from coordinator.connect import open_store
from coordinator.etcd import EtcdStore
from coordinator.etcd_rights import protect as protect_etcd
from coordinator.losses import KNOWN
from coordinator.membership import (
    DRAINS,
    INCARNATIONS,
    LAST_WORKER,
    NUMBERS,
    SERVERS,
    WANTED_CHECKPOINTS,
    WORKERS,
)
from elasticps.errors import ConfigError
from elasticps.security.identity import ANY, Identity, Role

WRITES = {
    Role.SERVER: (SERVERS, INCARNATIONS, DRAINS),  # a server that is to end asks to be drained
    Role.WORKER: (WORKERS, LAST_WORKER, NUMBERS, TABLES, RATES, ON_LOSS, WANTED_CHECKPOINTS, KNOWN),
    Role.COORDINATOR: ("",),
    Role.OPERATOR: ("",),
}


async def protect(url: str, timeout_s: float) -> None:
    """Has the etcd of a cluster ask. `url` has root's certificate (`Authority.issue_root`).

    ConfigError if it is an etcd without TLS: there nobody has a name.
    """
    store = await open_store(url, timeout_s=timeout_s)
    try:
        if not isinstance(store, EtcdStore) or not store.secure:
            raise ConfigError("only an etcd with TLS knows who asks: give a URL with ?ca=…&cert=…&key=…")
        users = {
            Identity(store.cluster, role, ANY, ANY if role is Role.WORKER else "").common_name: prefixes
            for role, prefixes in WRITES.items()
        }
        await protect_etcd(store, users)
    finally:
        await store.close()
