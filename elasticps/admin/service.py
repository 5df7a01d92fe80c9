"""The admin and health services of one server process, by gRPC."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import grpc
from cryptography import x509
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health  # type: ignore[attr-defined]  # its stubs leave this one out

from elasticps.admin import admin_pb2, admin_pb2_grpc
from elasticps.admin.cuts import sparse_steps, write_state, write_written
from elasticps.admin.interface import MAX_URL, AdminInterface, RestoreProgress, RestoreSpec
from elasticps.errors import ConfigError
from elasticps.security.identity import Act, NotAuthorised, identity_among
from elasticps.wire.headers import MAX_CUT
from replication.progress import PART_BITS

if TYPE_CHECKING:
    from elasticps.security.credentials import Credentials, Pems

SERVICE = "elasticps.v1.Admin"

# Requests here are empty or carry a name; the limits keep a stray peer from holding memory or all the handlers.
_OPTIONS = (
    ("grpc.max_receive_message_length", 64 * 1024),
    ("grpc.max_send_message_length", 64 * 1024 * 1024),  # digests of 65536 ranges with clocks
    ("grpc.max_metadata_size", 16 * 1024),
    ("grpc.so_reuseport", 0),  # two servers on one port would each get half of the calls
    ("grpc.server_handshake_timeout_ms", 5000),  # up to the first HTTP/2 settings; gRPC's own would be two minutes
)
_MAX_CALLS_AT_ONCE = 64
_MOST_WAIT_S = 5.0


Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class Admin(admin_pb2_grpc.AdminServicer):
    """Answers the calls of admin.proto, whose names its methods have."""

    def __init__(self, target: Callable[[], AdminInterface | None], credentials: Credentials | None) -> None:
        self._find = target
        self._credentials = credentials

    async def _target(self, context: Context, act: Act) -> AdminInterface:
        if self._credentials is not None and (why := objection(context, act, self._credentials.cluster)):
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, why)
        target = self._find()
        if target is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the server has not registered yet")
        assert target is not None
        return target

    async def Status(self, request: admin_pb2.StatusRequest, context: Context) -> admin_pb2.StatusResponse:  # noqa: N802
        status = (await self._target(context, Act.LOOK)).status()
        cpu_s = time.thread_time()  # this thread runs the event loop
        return admin_pb2.StatusResponse(**status, cpu_s=cpu_s, clock=time.time())

    async def Activity(  # noqa: N802
        self, request: admin_pb2.ActivityRequest, context: Context
    ) -> admin_pb2.ActivityResponse:
        return admin_pb2.ActivityResponse(**(await self._target(context, Act.LOOK)).activity())

    async def Tables(self, request: admin_pb2.TablesRequest, context: Context) -> admin_pb2.TablesResponse:  # noqa: N802
        tables = (await self._target(context, Act.LOOK)).tables()
        return admin_pb2.TablesResponse(tables=[admin_pb2.TableStatus(**table) for table in tables])

    async def Cluster(  # noqa: N802
        self, request: admin_pb2.ClusterRequest, context: Context
    ) -> admin_pb2.ClusterResponse:
        return admin_pb2.ClusterResponse(**(await self._target(context, Act.LOOK)).cluster_known())

    async def Hot(self, request: admin_pb2.HotRequest, context: Context) -> admin_pb2.HotResponse:  # noqa: N802
        found = dict(await (await self._target(context, Act.LOOK)).hot(request.seconds))
        tables = [admin_pb2.HotTable(**table) for table in found.pop("tables")]
        return admin_pb2.HotResponse(**found, tables=tables)

    async def Mark(self, request: admin_pb2.MarkRequest, context: Context) -> admin_pb2.MarkResponse:  # noqa: N802
        target = await self._target(context, Act.CHANGE)
        complete = await target.mark(request.mark)
        return admin_pb2.MarkResponse(complete=complete, epoch=target.epoch)

    async def Restore(  # noqa: N802
        self, request: admin_pb2.RestoreRequest, context: Context
    ) -> admin_pb2.RestoreResponse:
        restoring = (await self._target(context, Act.CUT)).restoring
        if request.act == admin_pb2.RestoreRequest.END:
            return admin_pb2.RestoreResponse(complete=await restoring.end(request.serial, request.new))
        if request.act == admin_pb2.RestoreRequest.LOOK:
            return admin_pb2.RestoreResponse(**_fields(restoring.look(request.new, request.workers)))
        tables = tuple(zip(request.old, request.new, strict=True))
        floors = tuple(zip(request.workers, request.clocks, strict=True))
        spec = RestoreSpec(
            request.url, request.cut, tables, request.whole, request.anew, tuple(request.specs), floors
        )  # fmt: skip
        return admin_pb2.RestoreResponse(**_fields(restoring.go_on(request.serial, spec, request.done)))

    async def Marked(self, request: admin_pb2.MarkedRequest, context: Context) -> admin_pb2.MarkedResponse:  # noqa: N802
        target = await self._target(context, Act.LOOK)
        ranges = [
            admin_pb2.MarkedRange(
                range=r,
                seq=found.seq,
                digest=found.digest,
                workers=found.workers,
                clocks=[progress >> PART_BITS for progress in found.progress],
            )
            for r, found in target.marked(request.mark).items()
        ]
        told = [admin_pb2.ToldClock(worker=worker, clock=clock) for worker, clock in target.acknowledged.items()]
        return admin_pb2.MarkedResponse(ranges=ranges, told=told, epoch=target.epoch, incarnation=target.me.incarnation)

    async def Hold(self, request: admin_pb2.HoldRequest, context: Context) -> admin_pb2.HoldResponse:  # noqa: N802
        cuts = (await self._target(context, Act.CUT)).cuts
        if not 0 < request.cut <= MAX_CUT:
            text = f"a cut's number is from 1 to {MAX_CUT}, got {request.cut}"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, text)
        return admin_pb2.HoldResponse(held=cuts.hold(request.cut, request.hold_ms / 1000))

    async def Held(self, request: admin_pb2.HeldRequest, context: Context) -> admin_pb2.HeldResponse:  # noqa: N802
        held = (await self._target(context, Act.LOOK)).cuts.held(request.cut)
        reports = held.values()
        return admin_pb2.HeldResponse(
            workers=held.keys(), clocks=[report.clock for report in reports],
            epochs=[report.epoch for report in reports], digests=[report.digest for report in reports],
        )  # fmt: skip

    async def Cut(self, request: admin_pb2.CutRequest, context: Context) -> admin_pb2.CutResponse:  # noqa: N802
        cuts = (await self._target(context, Act.CUT)).cuts
        if request.since >= request.cut or request.cut > MAX_CUT or len(request.url) > MAX_URL:
            text = f"there is no cut {request.cut} since {request.since} for a URL of {len(request.url)} letters"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, text)
        return admin_pb2.CutResponse(complete=await cuts.take(request.cut, request.since, request.url))

    async def Release(  # noqa: N802
        self, request: admin_pb2.ReleaseRequest, context: Context
    ) -> admin_pb2.ReleaseResponse:
        (await self._target(context, Act.CUT)).cuts.release(request.cut)
        return admin_pb2.ReleaseResponse()

    async def CutState(  # noqa: N802
        self, request: admin_pb2.CutStateRequest, context: Context
    ) -> admin_pb2.CutStateResponse:
        return write_state((await self._target(context, Act.LOOK)).cuts.state(request.cut))

    async def CutWritten(  # noqa: N802
        self, request: admin_pb2.CutWrittenRequest, context: Context
    ) -> admin_pb2.CutWrittenResponse:
        cuts = (await self._target(context, Act.CUT)).cuts  # to ask how far it is has it written
        return write_written(await cuts.written(request.cut, min(request.wait_ms / 1000, _MOST_WAIT_S)))


class HealthService(health.HealthServicer):  # type: ignore[misc]  # it has no types
    """The standard health service, for callers that may look."""

    def __init__(self, credentials: Credentials | None) -> None:
        super().__init__()
        self._credentials = credentials

    async def Check(self, request: Any, context: Context) -> Any:  # noqa: N802
        await self._admit(context)
        return await super().Check(request, context)

    async def Watch(self, request: Any, context: Context) -> None:  # noqa: N802
        await self._admit(context)
        await super().Watch(request, context)

    async def _admit(self, context: Context) -> None:
        if self._credentials is not None and (why := objection(context, Act.LOOK, self._credentials.cluster)):
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, why)


def _fields(progress: RestoreProgress) -> dict[str, Any]:
    """The fields of RestoreResponse in admin.proto."""
    fields = progress._asdict()
    fields["told"] = fields.pop("acknowledged")
    fields["records"] = sparse_steps(progress.records)
    return fields


def objection(context: Context, act: Act, cluster: str) -> str:
    """Returns why the caller may not make this call, "" if it may."""
    proof = context.auth_context()
    if proof.get("ssl_tls_version") != [b"TLSv1.3"]:
        return "TLS 1.3 is required"
    try:
        caller = identity_among([uri.decode("latin-1") for uri in proof.get("peer_uri", ())])
    except NotAuthorised as error:
        return str(error)
    # gRPC checks a certificate when a connection begins, and never again.
    if any(_ends(pem) <= time.time() for pem in proof.get("x509_pem_cert", ())):
        return "your certificate has ended"
    if caller.cluster != cluster:
        return f"this is cluster {cluster!r}, and you are {caller}"
    return "" if caller.may(act) else f"{caller} may not do this: it takes an operator"


@lru_cache(maxsize=256)
def _ends(pem: bytes) -> float:
    """Returns when a certificate ends, in Unix time."""
    return x509.load_pem_x509_certificate(pem).not_valid_after_utc.timestamp()


def secured(credentials: Credentials) -> grpc.ServerCredentials:
    """TLS for the service. gRPC asks for certificates at each handshake, so that new ones are used at once."""
    latest: Pems | None = None

    def newer() -> grpc.ServerCertificateConfiguration | None:
        # None unless they are new: for each configuration gRPC frees what other handshakes may be using.
        nonlocal latest
        pems = credentials.pems()
        if pems == latest:
            return None
        latest = pems
        return grpc.ssl_server_certificate_configuration([(pems.key, pems.cert)], pems.ca)

    ask = cast("Callable[[], grpc.ServerCertificateConfiguration]", newer)  # grpc-stubs do not know of None
    return grpc.dynamic_ssl_server_credentials(ask(), ask, require_client_authentication=True)


class AdminServer:
    """The running services; made by `start_admin`."""

    def __init__(self, server: grpc.aio.Server, health_servicer: health.HealthServicer, address: str) -> None:
        self._server = server
        self._health = health_servicer
        self.address = address

    async def set_serving(self, serving: bool) -> None:
        """Sets what the health service answers, for the process as a whole and for this service."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in ("", SERVICE):
            await self._health.set(service, status)

    async def stop(self, finish_s: float = 0.5) -> None:
        """Tells watchers of the health service, waits `finish_s` for calls in progress, closes the port."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(finish_s)


async def start_admin(
    host: str, port: int, target: Callable[[], AdminInterface | None], credentials: Credentials | None = None
) -> AdminServer:
    """Serves on `host` (port 0: any free one), with TLS if there are credentials. `target` is called on this event
    loop for every request; while it gives None, calls are refused as unavailable. Healthy only after
    `set_serving(True)`.

    Raises ConfigError when the port cannot be had.
    """
    server = grpc.aio.server(options=_OPTIONS, maximum_concurrent_rpcs=_MAX_CALLS_AT_ONCE)
    health_servicer = HealthService(credentials)
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    admin_pb2_grpc.add_AdminServicer_to_server(Admin(target, credentials), server)
    name = f"[{host}]" if ":" in host else host
    try:
        if credentials is None:
            bound = server.add_insecure_port(f"{name}:{port}")
        else:
            bound = server.add_secure_port(f"{name}:{port}", secured(credentials))
    except RuntimeError as error:
        raise ConfigError(  # why is in gRPC's own log only
            f"the admin port {name}:{port} cannot be had: another process listens there, or this machine has no such "
            "address; take another --admin-port, or 0 for any free one"
        ) from error
    running = AdminServer(server, health_servicer, f"{name}:{bound}")
    await running.set_serving(False)
    await server.start()
    return running
