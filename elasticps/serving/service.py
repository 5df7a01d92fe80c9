"""The gRPC services of a reader's process: rows for services in any language, and pinning for operators."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

import grpc
import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc
from numpy.typing import NDArray

from elasticps.admin.service import HealthService, objection, secured
from elasticps.errors import CheckpointError, Closed, ConfigError, InputError, OtherShare, Timeout, UnknownTable
from elasticps.readers.values import AsOf, ReaderSpec, ReaderStats
from elasticps.security.identity import ANY, Act, NotAuthorised, Role, identity_among
from elasticps.serving import lookup_pb2, lookup_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Mapping

    from elasticps.model.spec import TableSpec
    from elasticps.security.credentials import Credentials

LOOKUP = "elasticps.v1.Lookup"
MOST_ANSWER_BYTES = 64 << 20
MOST_REQUEST_BYTES = 16 << 20
MOST_TABLES = 1024
MOST_CALLS = 256
HOLD_S = 5.0
PULLING = 4  # threads: gathers do not hold the interpreter's lock
MAX_CHECKPOINT = 4096  # characters
_OPTIONS = (
    ("grpc.max_receive_message_length", MOST_REQUEST_BYTES),
    ("grpc.max_send_message_length", MOST_ANSWER_BYTES + (1 << 20)),
    ("grpc.max_metadata_size", 16 * 1024),
    ("grpc.so_reuseport", 0),
    ("grpc.server_handshake_timeout_ms", 5000),
)
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
ResultT = TypeVar("ResultT")


class ServedReader(Protocol):
    """What is asked of a reader."""

    spec: ReaderSpec

    @property
    def cluster(self) -> str: ...
    @property
    def tables(self) -> Mapping[str, TableSpec]: ...
    @property
    def age(self) -> float: ...
    @property
    def as_of(self) -> AsOf: ...
    @property
    def pinned(self) -> str: ...
    def pull(self, keys: Mapping[str, object]) -> dict[str, NDArray[np.float32]]: ...
    def hold(self, timeout: float = ...) -> AsOf: ...
    def release(self) -> None: ...
    def stats(self) -> ReaderStats: ...
    def pin(self, checkpoint: str) -> AsOf: ...
    def roll_back(self, checkpoint: str) -> AsOf: ...
    def follow(self) -> None: ...


def _status(error: Exception) -> grpc.StatusCode:
    """How a call ends that raised this."""
    if isinstance(error, UnknownTable):
        return grpc.StatusCode.NOT_FOUND
    if isinstance(error, OtherShare):
        return grpc.StatusCode.FAILED_PRECONDITION
    if isinstance(error, (InputError, ConfigError, CheckpointError)):
        return grpc.StatusCode.INVALID_ARGUMENT
    return grpc.StatusCode.UNAVAILABLE


class ReaderCalls:
    """What the services have in common: a reader, who may ask it, and threads that do."""

    def __init__(self, reader: ServedReader, credentials: Credentials | None, name: str) -> None:
        self.reader = reader
        self.name = name  # of the process
        self.holding = asyncio.Lock()  # one call at a time has the reader hold
        self._credentials = credentials
        self._threads = ThreadPoolExecutor(PULLING, "elasticps-lookup")

    async def admit(self, context: Context, act: Act) -> None:
        """Ends a call of somebody who may not make it."""
        if self._credentials is None:
            return
        why = objection(context, act, self._credentials.cluster)
        if not why and act is Act.READ:
            why = self._stranger(context)
        if why:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, why)

    def _stranger(self, context: Context) -> str:
        """Why the caller may not have rows of this reader's application, "" if it may."""
        try:
            proof = context.auth_context()
            caller = identity_among([uri.decode("latin-1") for uri in proof.get("peer_uri", ())])
        except NotAuthorised as error:
            return str(error)
        app = self.reader.spec.application
        ours = caller.role in (Role.WORKER, Role.READER) and caller.app in (ANY, app)
        return "" if ours else f"{caller} may not read tables of application {app!r}"

    async def ask(self, context: Context, function: Callable[[], ResultT]) -> ResultT:
        """Calls the reader in a thread; what it raises on purpose ends the call."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, function)
        except (UnknownTable, InputError, ConfigError, CheckpointError, Timeout, Closed) as error:
            await context.abort(_status(error), str(error))
            raise AssertionError("abort raises") from error

    def shown(self) -> lookup_pb2.ShownState:
        """What pulls show at this moment."""
        as_of = self.reader.as_of
        return lookup_pb2.ShownState(
            time_s=as_of.time_s, age_s=min(self.reader.age, 1e12), steps=as_of.steps, pinned=self.reader.pinned,
            epoch=max(as_of.epoch, 0),
        )  # fmt: skip

    def close(self) -> None:
        """Ends the threads."""
        self._threads.shutdown()


class Lookup(lookup_pb2_grpc.LookupServicer):
    """Answers the calls of `Lookup` in lookup.proto."""

    def __init__(self, calls: ReaderCalls) -> None:
        self._calls = calls

    async def Lookup(  # noqa: N802
        self, request: lookup_pb2.LookupRequest, context: Context
    ) -> lookup_pb2.LookupResponse:
        calls = self._calls
        await calls.admit(context, Act.READ)
        if not request.hold:
            return await calls.ask(context, lambda: self._answer(request))
        async with calls.holding:
            return await calls.ask(context, lambda: self._of_one_moment(request))

    def _of_one_moment(self, request: lookup_pb2.LookupRequest) -> lookup_pb2.LookupResponse:
        reader = self._calls.reader
        if reader.pinned:  # a checkpoint is one
            return self._answer(request)
        reader.hold(HOLD_S)
        try:
            return self._answer(request)
        finally:
            reader.release()

    def _answer(self, request: lookup_pb2.LookupRequest) -> lookup_pb2.LookupResponse:
        reader = self._calls.reader
        specs = reader.tables
        keys = {
            one.table: None
            if (spec := specs.get(one.table)) is not None and spec.shape is not None and not one.keys
            else np.fromiter(one.keys, np.int64, len(one.keys))
            for one in request.tables
        }
        if len(keys) < len(request.tables) or len(keys) > MOST_TABLES:
            raise InputError(f"a request names each table once, and at most {MOST_TABLES}")
        _check_size(keys, specs)
        shown = self._calls.shown()  # before the rows: they are at least as new
        rows = reader.pull(keys)
        return lookup_pb2.LookupResponse(
            tables=[_written(name, rows[name], specs.get(name)) for name in keys], shown=shown
        )


def _check_size(keys: Mapping[str, NDArray[np.int64] | None], specs: Mapping[str, TableSpec]) -> None:
    """Raises InputError for what no answer has room for, before any of it is allocated."""
    nbytes = 0
    for name, some in keys.items():
        if (spec := specs.get(name)) is not None:
            nbytes += 4 * (spec.size if some is None else spec.dim * len(some))
    if nbytes > MOST_ANSWER_BYTES:
        raise InputError(f"these rows have {nbytes:,} bytes, and an answer has at most {MOST_ANSWER_BYTES:,}")


def _written(name: str, rows: NDArray[np.float32], spec: TableSpec | None) -> lookup_pb2.TableRows:
    whole = spec is not None and spec.shape is not None and rows.shape == spec.shape
    dim = rows.shape[-1] if rows.ndim else 1
    data = rows.astype("<f4", copy=False).tobytes()
    return lookup_pb2.TableRows(table=name, dim=dim, rows=data, shape=rows.shape if whole else ())


class ReaderAdmin(lookup_pb2_grpc.ReaderAdminServicer):
    """Answers the calls of `ReaderAdmin` in lookup.proto."""

    def __init__(self, calls: ReaderCalls) -> None:
        self._calls = calls

    async def Status(  # noqa: N802
        self, request: lookup_pb2.ReaderStatusRequest, context: Context
    ) -> lookup_pb2.ReaderStatusResponse:
        await self._calls.admit(context, Act.LOOK)
        reader = self._calls.reader
        stats = reader.stats()
        p50, p99 = stats.ages_s
        return lookup_pb2.ReaderStatusResponse(
            cluster=reader.cluster, application=reader.spec.application, tables=sorted(reader.tables), rows=stats.rows,
            bytes=stats.bytes, pulls=stats.pulls, pulled=stats.pulled, shown=self._calls.shown(), age_p50_s=p50,
            age_p99_s=p99, name=self._calls.name, share=str(reader.spec.share),
        )  # fmt: skip

    async def Pin(self, request: lookup_pb2.PinRequest, context: Context) -> lookup_pb2.PinResponse:  # noqa: N802
        return await self._change(request, context, self._calls.reader.pin)

    async def RollBack(self, request: lookup_pb2.PinRequest, context: Context) -> lookup_pb2.PinResponse:  # noqa: N802
        return await self._change(request, context, self._calls.reader.roll_back)

    async def Follow(self, request: lookup_pb2.FollowRequest, context: Context) -> lookup_pb2.PinResponse:  # noqa: N802
        await self._calls.admit(context, Act.CHANGE)
        await self._calls.ask(context, self._calls.reader.follow)
        return lookup_pb2.PinResponse(shown=self._calls.shown())

    async def _change(
        self, request: lookup_pb2.PinRequest, context: Context, function: Callable[[str], AsOf]
    ) -> lookup_pb2.PinResponse:
        calls = self._calls
        await calls.admit(context, Act.CHANGE)
        if not 0 < len(request.checkpoint) <= MAX_CHECKPOINT:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "name a checkpoint: URL or URL/000042")
        async with calls.holding:
            await calls.ask(context, lambda: function(request.checkpoint))
        return lookup_pb2.PinResponse(shown=calls.shown())


class LookupServer:
    """The running services; made by `start_lookup`."""

    def __init__(self, server: grpc.aio.Server, health: HealthService, calls: ReaderCalls, address: str) -> None:
        self.address = address  # host:port
        self._server = server
        self._health = health
        self._calls = calls

    async def set_serving(self, serving: bool) -> None:
        """Sets what the health service answers, for the process as a whole and for `Lookup`."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in ("", LOOKUP):
            await self._health.set(service, status)

    async def stop(self, finish_s: float = 0.5) -> None:
        """Tells watchers of the health service, waits `finish_s` for calls in progress, closes the port."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(finish_s)
        self._calls.close()


async def start_lookup(
    reader: ServedReader, host: str, port: int, credentials: Credentials | None = None, name: str = ""
) -> LookupServer:
    """Serves a reader's rows by gRPC on `host` (port 0: any free one), with TLS if there are credentials: of a reader.
    Healthy only after `set_serving(True)`. Raises ConfigError when the port cannot be had."""
    server = grpc.aio.server(options=_OPTIONS, maximum_concurrent_rpcs=MOST_CALLS)
    health = HealthService(credentials)
    calls = ReaderCalls(reader, credentials, name)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    lookup_pb2_grpc.add_LookupServicer_to_server(Lookup(calls), server)
    lookup_pb2_grpc.add_ReaderAdminServicer_to_server(ReaderAdmin(calls), server)
    shown = f"[{host}]" if ":" in host else host
    try:
        if credentials is None:
            bound = server.add_insecure_port(f"{shown}:{port}")
        else:
            bound = server.add_secure_port(f"{shown}:{port}", secured(credentials))
    except RuntimeError as error:
        calls.close()
        raise ConfigError(
            f"the port {shown}:{port} cannot be had: another process listens there, or this machine has no such "
            "address; take another --grpc-port, or 0 for any free one"
        ) from error
    running = LookupServer(server, health, calls, f"{shown}:{bound}")
    await running.set_serving(False)
    await server.start()
    return running
