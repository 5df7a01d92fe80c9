"""Calls the admin service of one server, with TLS where there are credentials."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coordinator.core.errors import ForkedProcess
from coordinator.core.view import Roster, View
from coordinator.grpc_limits import use_grpc
from elasticps.admin import admin_pb2, admin_pb2_grpc
from elasticps.errors import ClusterUnreachable, ConfigError, Error, ServerError
from elasticps.security.identity import Role, host_name

if TYPE_CHECKING:
    from elasticps.security.credentials import Credentials

_OPTIONS = (
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),  # servers are near; a proxy for the outside would not know them
)


async def fetch_status(address: str, timeout_s: float, credentials: Credentials | None = None) -> dict[str, Any]:
    """The fields of StatusResponse (admin.proto) as the server at `address` ("host:port") gives them; `readers` as
    plain values.

    Raises ClusterUnreachable when it does not answer within `timeout_s`, ServerError when it does not talk to us.
    """
    async with open_channel(address, credentials) as channel:
        try:
            answer = await admin_pb2_grpc.AdminStub(channel).Status(admin_pb2.StatusRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise failure(address, timeout_s, error) from error
    found = {field.name: getattr(answer, field.name) for field in answer.DESCRIPTOR.fields}
    readers = [{field.name: getattr(one, field.name) for field in one.DESCRIPTOR.fields} for one in answer.readers]
    return found | {"readers": readers}


async def fetch_tables(address: str, timeout_s: float, credentials: Credentials | None = None) -> list[dict[str, Any]]:
    """The fields of TableStatus (admin.proto) of each table at the server at `address`.

    Raises ClusterUnreachable when it does not answer within `timeout_s`.
    """
    async with open_channel(address, credentials) as channel:
        try:
            answer = await admin_pb2_grpc.AdminStub(channel).Tables(admin_pb2.TablesRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise failure(address, timeout_s, error) from error
    fields = ("id", "rows_headed", "rows", "bytes", "spec", "app", "candidates", "admitted")
    return [
        {field: getattr(table, field) for field in fields} | {"evicted": dict(table.evicted)} for table in answer.tables
    ]


async def fetch_hot(
    address: str, seconds: float, timeout_s: float, credentials: Credentials | None = None
) -> dict[str, Any]:
    """The fields of HotResponse (admin.proto), sampled for `seconds` at the server at `address`; `tables` and their
    fields as plain values. Raises ClusterUnreachable when it does not answer within `timeout_s` after that."""
    async with open_channel(address, credentials) as channel:
        try:
            request = admin_pb2.HotRequest(seconds=seconds)
            answer = await admin_pb2_grpc.AdminStub(channel).Hot(request, timeout=seconds + timeout_s)
        except grpc.aio.AioRpcError as error:
            raise failure(address, seconds + timeout_s, error) from error
    return {
        "incarnation": answer.incarnation, "pulls": answer.pulls, "pushes": answer.pushes, "sampled": answer.sampled,
        "ranges": [[r, n] for r, n in zip(answer.ranges, answer.range_counts, strict=True)],
        "tables": [
            {
                "id": table.id, "name": table.name, "sampled": table.sampled, "lost": table.lost,
                "keys": [[key, n] for key, n in zip(table.keys, table.counts, strict=True)],
            }
            for table in answer.tables
        ],
    }  # fmt: skip


class Known(NamedTuple):
    """What a server knows of its cluster; None where it knows no view or roster."""

    name: str
    incarnation: int
    view: View | None
    roster: Roster | None
    newest: int


async def fetch_cluster(address: str, timeout_s: float, credentials: Credentials | None = None) -> Known:
    """ClusterResponse (admin.proto) of the server at `address`. Raises ClusterUnreachable as `fetch_status` does."""
    async with open_channel(address, credentials) as channel:
        try:
            answer = await admin_pb2_grpc.AdminStub(channel).Cluster(admin_pb2.ClusterRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise failure(address, timeout_s, error) from error
    view = View.decode(answer.view) if answer.view else None
    roster = Roster.decode(answer.roster) if answer.roster else None
    return Known(answer.name, answer.incarnation, view, roster, answer.newest)


async def take_mark(address: str, mark: int, timeout_s: float, credentials: Credentials | None = None) -> bool:
    """Makes the server at `address` send mark `mark` down the logs of its ranges; False if its view changed meanwhile.

    Returns when every replica has passed it. Raises ClusterUnreachable when that takes longer than `timeout_s`.
    """
    async with open_channel(address, credentials) as channel:
        try:
            answer = await admin_pb2_grpc.AdminStub(channel).Mark(admin_pb2.MarkRequest(mark=mark), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise failure(address, timeout_s, error) from error
    return bool(answer.complete)


async def fetch_marked(
    address: str, mark: int, timeout_s: float, credentials: Credentials | None = None
) -> admin_pb2.MarkedResponse:
    """What the server at `address` noted at a mark. Raises ClusterUnreachable as `fetch_status` does."""
    async with open_channel(address, credentials) as channel:
        request = admin_pb2.MarkedRequest(mark=mark)
        try:
            answer: admin_pb2.MarkedResponse = await admin_pb2_grpc.AdminStub(channel).Marked(
                request, timeout=timeout_s
            )
        except grpc.aio.AioRpcError as error:
            raise failure(address, timeout_s, error) from error
    return answer


async def ask_restore(
    address: str, timeout_s: float, request: admin_pb2.RestoreRequest, credentials: Credentials | None = None
) -> admin_pb2.RestoreResponse:
    """Asks the server at `address` for its part of a restore. Raises ClusterUnreachable as `fetch_status` does."""
    async with open_channel(address, credentials) as channel:
        try:
            answer: admin_pb2.RestoreResponse = await admin_pb2_grpc.AdminStub(channel).Restore(
                request, timeout=timeout_s
            )
        except grpc.aio.AioRpcError as error:
            raise failure(address, timeout_s, error) from error
    return answer


async def fetch_health(
    address: str, timeout_s: float, service: str = "", credentials: Credentials | None = None
) -> str:
    """What the standard health service at `address` says: "SERVING", "NOT_SERVING" or "SERVICE_UNKNOWN"."""
    async with open_channel(address, credentials) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                return "SERVICE_UNKNOWN"
            raise failure(address, timeout_s, error) from error
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def open_channel(address: str, credentials: Credentials | None, role: Role = Role.SERVER) -> grpc.aio.Channel:
    """Opens a channel to the gRPC services of a server, or a reader, at an address. ConfigError in a process that was
    forked from one that uses gRPC."""
    try:
        use_grpc()
    except ForkedProcess as error:
        raise ConfigError(str(error)) from None
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=_OPTIONS)
    pems = credentials.pems()
    ours = grpc.ssl_channel_credentials(pems.ca, pems.key, pems.cert)
    name = ("grpc.ssl_target_name_override", host_name(credentials.cluster, role))  # whatever its address is
    return grpc.aio.secure_channel(address, ours, options=(*_OPTIONS, name))


def generation_of(credentials: Credentials | None) -> int:
    """The generation of the present certificates. A channel that was opened with another generation has to be opened
    again: servers refuse calls on connections whose certificate has ended."""
    if credentials is None:
        return 0
    credentials.refresh()
    return credentials.generation


def failure(address: str, timeout_s: float, error: grpc.aio.AioRpcError) -> Error:
    """Returns the error to raise for a failed call."""
    if error.code() is grpc.StatusCode.PERMISSION_DENIED:
        return ServerError(f"the server at {address} refused: {error.details()}")
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return ClusterUnreachable(f"the server at {address} did not answer within {timeout_s:g} s")
    return ClusterUnreachable(
        f"the server at {address} cannot be asked: {error.code().name.lower()}: {error.details()}"
    )
