"""A channel to one etcd member: its options, its certificates, and what its failures mean."""

from __future__ import annotations

import asyncio
import os
import ssl
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from aetcd import rpc
from grpc.aio import EOF, AioRpcError  # type: ignore[attr-defined]  # grpc-stubs lacks EOF

from coordinator.core.errors import CoordinationError, LeaseLost, NotPermitted, WritesRefused
from coordinator.core.url import TlsFiles
from coordinator.grpc_limits import task_cancelled

_CHANNEL_OPTIONS = (
    # Endpoints are asked directly, and each client finds out for itself whether one is back.
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 250),
    # Only a ping tells a silent watch from a dead peer. etcd refuses pings more often than every 5 s.
    ("grpc.keepalive_time_ms", 6000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.http2.ping_timeout_ms", 2000),  # else a minute, whatever the keepalive time-out says
    ("grpc.http2.max_pings_without_data", 0),
    # A window of fixed size instead of one that is measured: that takes a ping, and wakes three threads, per answer.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 1 << 20),
    ("grpc.max_receive_message_length", 64 << 20),
)

# The request itself is wrong: another endpoint would say the same.
_REFUSED = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION)
_NO_SPACE = "database space exceeded"  # the alarm NOSPACE, of all members, until somebody disarms it
_RIGHTS_CHANGED = "revision of auth store is old"  # while the request was under way


class RevisionGone(CoordinationError):
    """etcd does not have the revision that was asked for: it is compacted away, or has not been reached."""


@dataclass(frozen=True)
class Member:
    """One endpoint: its channel, and the stubs on it, which have no types.

    renewing  idle streams on which leases are renewed: to open one costs etcd more than a renewal
    """

    address: str
    channel: grpc.aio.Channel
    kv: Any
    lease: Any
    watch: Any
    renewing: list[Any] = field(default_factory=list)

    async def keep_alive(self, request: Any, timeout: float) -> Any:
        """Renews a lease on a stream that stays open. If all idle streams have broken, a new one shows whether the
        endpoint answers. A stream that gave no answer in time is closed, so that a late answer is never taken for that
        of another renewal."""
        try:
            async with asyncio.timeout(timeout):
                while self.renewing:
                    with suppress(AioRpcError, asyncio.InvalidStateError):
                        return await self._renew_on(self.renewing.pop(), request)
                return await self._renew_on(self.lease.LeaseKeepAlive(), request)
        except TimeoutError:
            raise asyncio.InvalidStateError("no answer in time") from None

    async def _renew_on(self, call: Any, request: Any) -> Any:
        answer = EOF
        try:
            await call.write(request)
            answer = await call.read()
        finally:
            if answer is EOF:
                call.cancel()
        if answer is EOF:
            raise asyncio.InvalidStateError("etcd closed the stream")
        self.renewing.append(call)
        return answer

    def stop_renewing(self) -> None:
        """Closes the streams that are not in use."""
        while self.renewing:
            self.renewing.pop().cancel()


def open_member(address: str, credentials: grpc.ChannelCredentials | None) -> Member:
    """Opens a channel to the member at "host:port", with TLS if there are credentials."""
    if credentials is None:
        channel = grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
    else:
        channel = grpc.aio.secure_channel(address, credentials, options=_CHANNEL_OPTIONS)
    return Member(address, channel, rpc.KVStub(channel), rpc.LeaseStub(channel), rpc.WatchStub(channel))


def raise_definite(error: BaseException) -> None:
    """Raises the error of a call that no retry would change; returns if another endpoint may answer."""
    if isinstance(error, asyncio.CancelledError):
        if task_cancelled():
            raise error
        return
    if isinstance(error, AioRpcError):
        if error.code() == grpc.StatusCode.NOT_FOUND and "lease" in (error.details() or ""):
            raise LeaseLost(f"etcd no longer knows the lease: {error.details()}") from error
        if _RIGHTS_CHANGED in (error.details() or ""):
            return
        if error.code() == grpc.StatusCode.PERMISSION_DENIED:
            raise NotPermitted(f"etcd refused: {error.details()}") from error
        if _NO_SPACE in (error.details() or ""):
            raise WritesRefused(
                f"etcd takes no writes: the space that its quota allows is used up ({error.details()}). Give it some: "
                "`etcdctl compact`, `etcdctl defrag`, then `etcdctl alarm disarm` (docs/guides/troubleshooting.md)"
            ) from error
        if error.code() == grpc.StatusCode.OUT_OF_RANGE:
            raise RevisionGone(f"etcd refused: {error.details()}") from error
        if error.code() in _REFUSED:
            raise CoordinationError(f"etcd refused: {error.details()}") from error


def explain(error: BaseException) -> str:
    """Says in few words why a call failed."""
    if isinstance(error, asyncio.CancelledError):
        return "the connection was closed"
    if isinstance(error, AioRpcError):
        if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
            return "no answer in time"
        details = (error.details() or "").rpartition("last error: ")[2].strip()
        return f"{error.code().name.lower().replace('_', ' ')}: {details}"
    return str(error) or repr(error)


def signature(tls: TlsFiles | None) -> tuple[tuple[int, int, int], ...]:
    """Identifies the contents of the certificate files: it differs when one of them was written or replaced."""
    found = []
    for path in () if tls is None else filter(None, (tls.ca, tls.cert, tls.key)):
        with suppress(OSError):
            status = os.stat(path)
            found.append((status.st_ino, status.st_mtime_ns, status.st_size))
    return tuple(found)


def tls_credentials(tls: TlsFiles) -> grpc.ChannelCredentials:
    """Reads certificate files. Raises ValueError if they cannot be used, such as one that is just being written: gRPC
    would find out when it connects."""
    ca, key, cert = _pem("ca", tls.ca), _pem("key", tls.key), _pem("cert", tls.cert)
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        if tls.ca:
            context.load_verify_locations(tls.ca)
        if tls.cert:
            context.load_cert_chain(tls.cert, tls.key)
    except OSError as error:  # ssl.SSLError is one
        raise ValueError(f"the certificate {tls.cert}, its key or the authority cannot be used: {error}") from None
    return grpc.ssl_channel_credentials(ca, key, cert)


def _pem(what: str, path: str) -> bytes | None:
    try:
        return Path(path).read_bytes() if path else None
    except OSError as error:
        raise ValueError(f"cannot read the {what} file {path}: {error.strerror}") from error
