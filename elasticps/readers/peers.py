"""Who is at the other end of a connection with TLS: readers prove their role to each other."""

from __future__ import annotations

import os
import select
import ssl
import threading
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

from coordinator.core.url import parse
from elasticps.client.runtime import READABLE, SocketPoller
from elasticps.errors import ConfigError
from elasticps.security import credentials_of
from elasticps.security.credentials import Credentials
from elasticps.security.identity import ANY, Identity, NotAuthorised, Role, identity_among
from elasticps.wire.frames import Buffer

if TYPE_CHECKING:
    import socket

    from elasticps.security.identity import Expect
    from elasticps.system.cpu_contention import CpuContention

SCHEME = "reader://"


def identity_of(secured: ssl.SSLSocket) -> Identity:
    """Who has proved to be at the other end. Raises NotAuthorised."""
    names: Any = (secured.getpeercert() or {}).get("subjectAltName", ())
    return identity_among([value for kind, value in names if kind == "URI"])


def check_reader(peer: Identity, cluster: str, app: str | None) -> None:
    """Raises NotAuthorised unless it is a reader of this cluster, and of this application, None for any."""
    if peer.cluster != cluster or peer.role is not Role.READER or (app not in (None, peer.app) and peer.app != ANY):
        raise NotAuthorised(f"this is {peer}, no reader of this cluster{f' and application {app!r}' if app else ''}")


class RelayCredentials(Credentials):
    """Of a reader that follows a relay: whom it dials has to be a reader of the same application. app: which."""

    app = "default"

    def expect(self, name: str) -> Expect:
        return lambda peer: check_reader(peer, self.cluster, self.app)


class RelayUrl(NamedTuple):
    """Where relays listen, each host:port, and how to prove who we are there, None without TLS."""

    addresses: tuple[str, ...]
    credentials: RelayCredentials | None


def parse_relay(url: str, app: str) -> RelayUrl:
    """Of reader://host:port[,host:port…], with /cluster?ca=FILE&cert=FILE&key=FILE where relays have TLS. Raises
    ConfigError."""
    place, slash, _ = url.removeprefix(SCHEME).partition("/")
    try:
        for address in filter(None, place.split(",")):
            if not address.rpartition("]")[2].rpartition(":")[2].isdecimal() or ":" not in address:
                raise ValueError(f": {address!r} is no host:port: say which port the relay listens on")
        found = parse(f"etcd://{url.removeprefix(SCHEME)}" if slash else f"etcd://{place}/any")
    except ValueError as error:
        reason = str(error).partition(": ")[2].partition(" (")[0].replace("etcd endpoint", "address of a relay")
        raise ConfigError(
            f"cannot use {url!r} as a relay's URL: {reason} (good ones: reader://127.0.0.1:9100, and with TLS "
            "reader://10.0.0.7:9100/demo?ca=ca.crt&cert=reader.crt&key=reader.key)"
        ) from None
    if found.tls is None or not found.tls.cert:
        return RelayUrl(found.endpoints, None)
    credentials = RelayCredentials(found.tls, found.cluster)
    credentials.app = app
    return RelayUrl(found.endpoints, credentials)


def reader_credentials(url: str, app: str) -> Credentials | None:
    """What the URL of a cluster or a relay names for a reader to prove who it is; None without TLS. ConfigError."""
    return parse_relay(url, app).credentials if url.startswith(SCHEME) else credentials_of(url)


def reader_name(name: str, credentials: Credentials | None) -> str:
    """A reader's name, if it was given none: that of its certificate, else host and process."""
    certified = ANY if credentials is None else credentials.identity.name
    return name or (certified if certified != ANY else f"{os.uname().nodename}.{os.getpid()}")


class PeerStream:
    """A connection on which one thread receives while others send, in whole messages."""

    def __init__(self, connection: socket.socket, timeout_s: float, contention: CpuContention | None = None) -> None:
        """timeout_s: for which nothing may move; then TimeoutError. contention: measured by several together."""
        self._connection = connection
        self.timeout_s = timeout_s
        self._sending = threading.Lock()
        # OpenSSL's state is not for two threads at once.
        self._tls = threading.Lock() if isinstance(connection, ssl.SSLSocket) else nullcontext()
        connection.setblocking(False)
        self._poller = SocketPoller(contention)  # of the thread that receives; awake for a moment
        self._poller.register(connection.fileno(), READABLE)

    def recv_into(self, buffer: memoryview) -> int:
        """As much as there is, at least a byte; 0 when the other end has closed."""
        while True:
            try:
                with self._tls:
                    return self._connection.recv_into(buffer)
            except (BlockingIOError, ssl.SSLWantReadError):
                moved = bool(self._poller.poll(self.timeout_s))
            except ssl.SSLWantWriteError:
                moved = self._wait(select.POLLOUT)
            if not moved:
                raise self._late()

    def send(self, buffers: list[Buffer]) -> None:
        """Sends all of a message."""
        views = [memoryview(one).cast("B") for one in buffers]
        data = views[0] if len(views) == 1 else memoryview(b"".join(views))
        with self._sending:
            while data:
                try:
                    with self._tls:
                        data = data[self._connection.send(data) :]
                    continue
                except (BlockingIOError, ssl.SSLWantWriteError):
                    moved = self._wait(select.POLLOUT)
                except ssl.SSLWantReadError:
                    moved = self._wait(select.POLLIN)
                if not moved:
                    raise self._late()

    def close(self) -> None:
        """Closes the connection."""
        self._poller.close()
        self._connection.close()

    def _wait(self, events: int) -> bool:
        """Whether one of these events comes in time."""
        poll = select.poll()
        poll.register(self._connection, events)
        return bool(poll.poll(1e3 * self.timeout_s))

    def _late(self) -> TimeoutError:
        return TimeoutError(f"nothing has moved for {self.timeout_s:.0f} s")
