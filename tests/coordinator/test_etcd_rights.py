"""Rights of roles in etcd, also renewed while a cluster runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordinator.core.errors import CoordinationError, NotPermitted
from coordinator.core.keys import (
    CHANGES,
    CHECKPOINT_REQUESTS,
    CONFIG,
    DRAINS,
    ELECTION,
    FAILOVER,
    HELD_UP,
    INCARNATIONS,
    KNOWN,
    LAST_WORKER,
    LOSSES,
    NEWEST_CHECKPOINT,
    NUMBERS,
    ON_LOSS,
    RANGE_RECOVERY,
    RATES,
    RESTORE_FILLS,
    RESTORING,
    ROSTER,
    SERVERS,
    TABLES,
    VIEW,
    WORKERS,
)
from coordinator.etcd import EtcdStore
from coordinator.etcd_rights import protect
from elasticps.checkpoint.cuts import LAST
from elasticps.checkpoint.restore import DRIVER, RESTORED
from elasticps.security import rights
from elasticps.security.authority import Authority
from elasticps.security.identity import Identity, Role
from tests.coordinator.support import Etcd, fresh_url


class _Beside(EtcdStore):
    """Does something else after each request."""

    async def call(self, method: Callable[[Any], Any], request: Any) -> Any:
        answer = await super().call(method, request)
        if self.then is not None:
            await self.then()
        return answer

    then: Callable[[], Any] | None = None


async def test_rights_can_be_renewed_while_a_cluster_runs(new_etcd: Callable[..., Etcd], tmp_path: Path) -> None:
    """What an earlier version had given stayed; and a coordinator that wrote just then was refused, which ended it."""
    authority = Authority.create(tmp_path / "authority")
    etcd = new_etcd(tls=authority.issue_etcd(("127.0.0.1",)))
    url = fresh_url(etcd)
    leader, server = (Identity(url.cluster, role, "*") for role in (Role.COORDINATOR, Role.SERVER))
    root = _Beside(replace(url, tls=authority.issue_root()))
    leads, serves = (EtcdStore(replace(url, tls=authority.issue(who))) for who in (leader, server))
    try:
        await root.ping(20.0)
        await protect(root, {leader.common_name: ("",), server.common_name: ("a/", "b/")})
        await serves.put("b/x", b"1")
        root.then = lambda: leads.put("view", b"1")
        await protect(root, {leader.common_name: ("",), server.common_name: ("a/", "c/")})
        for key in ("a/x", "c/x"):
            await serves.put(key, b"2")
        with pytest.raises(CoordinationError, match="permission denied"):
            await serves.put("b/x", b"2")
        assert await serves.get("b/x") is not None
    finally:
        for store in (root, leads, serves):
            await store.close()


APPS = ("bank", "thief")
DOCUMENT = Path(__file__).parents[2] / "SECURITY.md"
CONSTANTS = (
    ON_LOSS, RATES, TABLES, KNOWN, LOSSES, HELD_UP, RANGE_RECOVERY, CONFIG, DRAINS, FAILOVER, INCARNATIONS, LAST_WORKER,
    NEWEST_CHECKPOINT, NUMBERS, RESTORE_FILLS, RESTORING, ROSTER, SERVERS, VIEW, CHECKPOINT_REQUESTS, WORKERS, ELECTION,
    LAST, DRIVER, RESTORED, CHANGES,
)  # fmt: skip


def documented() -> dict[str, str]:
    """The roles that may write each key by SECURITY.md: the keys of its table and their second column."""
    rows = [line.split("|")[1:3] for line in DOCUMENT.read_text(encoding="utf-8").splitlines() if "| `" in line[:3]]
    return {key: who.strip() for keys, who in rows for key in re.findall(r"`([^`]+)`", keys)}


async def put(store: EtcdStore, key: str) -> None:
    await store.put(key, b"1")


async def swap(store: EtcdStore, key: str) -> None:
    await store.compare_and_set(key, b"2", expect=0)


async def remove(store: EtcdStore, key: str) -> None:
    await store.delete(key)


async def permitted(requested: Coroutine[Any, Any, None]) -> bool:
    try:
        await requested
    except NotPermitted:
        return False
    return True


def test_the_documentation_has_every_key() -> None:
    keys = documented()
    assert not [known for known in CONSTANTS if not any(key.startswith(known) for key in keys)]
    assert not [key for key in keys if not key.startswith(CONSTANTS)]


async def test_each_role_writes_the_keys_that_the_documentation_says_and_no_other(
    new_etcd: Callable[..., Etcd], tmp_path: Path
) -> None:
    """A worker of one application deleted the registrations of another's tables, and took them over."""
    authority = Authority.create(tmp_path / "authority")
    etcd = new_etcd(tls=authority.issue_etcd(("127.0.0.1",)))
    url = fresh_url(etcd)
    holders = {role: Identity(url.cluster, role, "x") for role in (Role.SERVER, Role.COORDINATOR, Role.OPERATOR)}
    workers = {app: Identity(url.cluster, Role.WORKER, "*", app) for app in (*APPS, "default", "*")}
    stores = {who: EtcdStore(replace(url, tls=authority.issue(one))) for who, one in (holders | workers).items()}
    root = replace(url, tls=authority.issue_root())
    before = EtcdStore(url=root)
    try:
        await before.ping(20.0)
        await before.put("tables/thief/t", b"1")  # it need not be named: it has a table
        assert await rights.protect(str(root), 20.0, ["bank"]) == ("bank", "default", "thief")
        keys = {
            re.sub(r"<application>", app, key): (app, who)
            for key, who in documented().items()
            for app in (*APPS, "default")
        }
        wrong = []
        for key, (app, who) in keys.items():
            words = {
                "–": {},
                "servers": {Role.SERVER},
                "workers": workers.keys(),
                "workers of the application": {app, "*"},
            }
            may = {Role.COORDINATOR, Role.OPERATOR, *words[who]}
            for name, store in stores.items():
                done = [way.__name__ for way in (put, swap, remove) if await permitted(way(store, key))]
                if done != (["put", "swap", "remove"] if name in may else []):
                    wrong.append((name, key, done))
        assert not wrong
    finally:
        for store in (before, *stores.values()):
            await store.close()
