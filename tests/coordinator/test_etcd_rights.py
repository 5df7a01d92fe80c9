"""Rights in etcd are given again while a cluster runs, and are then those of now."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordinator.errors import CoordinationError
from coordinator.etcd import EtcdStore
from coordinator.etcd_rights import protect
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


async def test_rights_that_are_given_again_are_those_of_now_and_never_fewer_meanwhile(
    new_etcd: Callable[..., Etcd], tmp_path: Path
) -> None:
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
