"""Has etcd ask who may write what: users by the common names of their certificates, with rights by prefix.

Sources: etcd's guides "Role-based access control" and "Authentication"; users without a password are those that
`--client-cert-auth` knows by their certificates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aetcd import rpc

from coordinator.etcd import EtcdStore

ROOT = "root"  # etcd's own name for who may change rights, and for what they may do


async def protect(store: EtcdStore, writers: Mapping[str, Sequence[str]]) -> None:
    """Lets each user read all keys of this store's cluster and write those that begin with one of its prefixes, and
    nobody else do anything. Other clusters' users keep their rights.

    May be repeated, when there is more to be granted; it takes `ROOT`'s certificate then. Raises as the store does.
    """

    async def ask(method: str, request: Any) -> Any:
        return await store.call(lambda member: getattr(rpc.AuthStub(member.channel), method), request)

    roles = (await ask("RoleList", rpc.AuthRoleListRequest())).roles
    users = (await ask("UserList", rpc.AuthUserListRequest())).users
    for user, prefixes in writers.items():
        if user not in roles:
            await ask("RoleAdd", rpc.AuthRoleAddRequest(name=user))
        for permission, spans in (
            (rpc.Permission.READ, store.spans("")),
            (rpc.Permission.READWRITE, [span for prefix in prefixes for span in store.spans(prefix)]),
        ):
            for start, end in spans:
                what = rpc.Permission(permType=permission, key=start, range_end=end)
                asked = rpc.AuthRoleGrantPermissionRequest(name=user, perm=what)
                await ask("RoleGrantPermission", asked)
    for user in (ROOT, *writers):
        if user not in users:
            alone = rpc.UserAddOptions(no_password=True)
            await ask("UserAdd", rpc.AuthUserAddRequest(name=user, options=alone))
        grant = rpc.AuthUserGrantRoleRequest(user=user, role=user)
        await ask("UserGrantRole", grant)
    await ask("AuthEnable", rpc.AuthEnableRequest())
