"""Turns on access control in etcd: users by the common names of their certificates, with rights by prefix.

Sources: etcd's guides "Role-based access control" and "Authentication"; users without a password are those that
`--client-cert-auth` knows by their certificates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aetcd import rpc

from coordinator.etcd import EtcdStore

ROOT = "root"  # etcd's own name for the user, and the role, that may change rights


async def protect(store: EtcdStore, writers: Mapping[str, Sequence[str]]) -> None:
    """Lets each user read all keys of this store's cluster, and write those that begin with one of its prefixes; nobody
    else may do anything. Users of other clusters keep their rights.

    May be repeated with more rights or fewer while users work: no right that a user has before and afterwards is
    missing meanwhile. Needs the certificate of `ROOT` then. Raises as the store does.
    """

    async def ask(method: str, request: Any) -> Any:
        return await store.call(lambda member: getattr(rpc.AuthStub(member.channel), method), request)

    roles = (await ask("RoleList", rpc.AuthRoleListRequest())).roles
    users = (await ask("UserList", rpc.AuthUserListRequest())).users
    for user, prefixes in writers.items():
        if user not in roles:
            await ask("RoleAdd", rpc.AuthRoleAddRequest(name=user))
        required = dict.fromkeys(store.spans(""), rpc.Permission.READ)
        required |= {span: rpc.Permission.READWRITE for prefix in prefixes for span in store.spans(prefix)}
        held = (await ask("RoleGet", rpc.AuthRoleGetRequest(role=user))).perm
        has = {(each.key, each.range_end): each.permType for each in held}
        for (start, end), permission in required.items() - has.items():
            what = rpc.Permission(permType=permission, key=start, range_end=end)
            await ask("RoleGrantPermission", rpc.AuthRoleGrantPermissionRequest(name=user, perm=what))
        for start, end in has.keys() - required.keys():  # of an earlier version
            gone = rpc.AuthRoleRevokePermissionRequest(role=user, key=start, range_end=end)
            await ask("RoleRevokePermission", gone)
    for user in (ROOT, *writers):
        if user not in users:
            alone = rpc.UserAddOptions(no_password=True)
            await ask("UserAdd", rpc.AuthUserAddRequest(name=user, options=alone))
        grant = rpc.AuthUserGrantRoleRequest(user=user, role=user)
        await ask("UserGrantRole", grant)
    await ask("AuthEnable", rpc.AuthEnableRequest())
