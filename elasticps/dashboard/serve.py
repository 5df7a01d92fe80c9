"""A running dashboard: the poller and the port. In a loop of its own process, or in the control loop of another's."""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from collections.abc import Collection
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from coordinator.core import fields
from elasticps.dashboard.actions import Actions, scaler_of
from elasticps.dashboard.app import VIEWERS_MAX, make_app
from elasticps.dashboard.core.model import Model
from elasticps.dashboard.fanout import Fanout
from elasticps.dashboard.hot import Looks
from elasticps.dashboard.poller import ClusterPoller, check_url
from elasticps.dashboard.preview import Previews
from elasticps.dashboard.prometheus import check_prometheus
from elasticps.errors import ConfigError
from elasticps.security import credentials_of
from elasticps.security.identity import Act
from elasticps.server.process.addresses import is_loopback
from elasticps.system import background

log = fields.logger(__name__)


CONNECTIONS_MAX = VIEWERS_MAX + 56
HEAD_MAX = 16 << 10
HEAD_TIMEOUT_S = 10.0  # for a whole request to arrive
WRITE_TIMEOUT_S = 30.0  # for a viewer that reads nothing
CLOSE_S = 2.0


class Dashboard:
    """Of the cluster at `url`, served at `host` and `port` (0: any free one) between `start` and `stop`.

    checkpoints   where they are kept, "" if that is not known
    prometheus    URL of the Prometheus that scrapes the cluster, for the hour before; "": there is none
    allow_host    names under which browsers may ask for it, besides addresses and localhost
    token         with it servers may be drained from the page, and started if this machine started the cluster; "":
                  nothing may be changed

    Raises ConfigError for a URL or port that cannot be used.
    """

    def __init__(
        self, url: str, *, host: str = "127.0.0.1", port: int, checkpoints: str = "", prometheus: str = "",
        allow_host: Collection[str] = (), token: str = "",
    ) -> None:  # fmt: skip
        self._checkpoints = checkpoints
        self._prometheus = check_prometheus(prometheus)
        self._hosts = frozenset(name.lower() for name in allow_host)
        self._token = token
        self._url = url
        self._name = check_url(url)
        self._sock = _listen(host, port)
        number = self._sock.getsockname()[1]
        shown = f"[{host}]" if ":" in host else host
        self.address = f"http://{shown}:{number}/"
        self._tasks: list[asyncio.Task[None]] = []  # the port's, and the poller's
        self._model = Model(self._name, time.time())
        self._fanout = Fanout()
        self._poller = self._polled(url)
        self._server: uvicorn.Server | None = None

    async def begin(self) -> None:
        """Serves, in this loop; the port takes connections already."""
        actions = None
        if self._token:
            scaler = await asyncio.to_thread(scaler_of, self._url)
            actions = Actions(self._token, lambda: self._poller.store, scaler)
        looks = Looks(lambda seconds: self._poller.ask_hot(seconds), time.monotonic)
        app = make_app(self._model, self._fanout, Previews(self._model), looks, actions, self._hosts)
        config = uvicorn.Config(
            app, http=_Protocol, ws="none", lifespan="off", interface="asgi3", log_config=None, log_level="critical",
            access_log=False, proxy_headers=False, server_header=False, backlog=128,
            timeout_keep_alive=30, timeout_graceful_shutdown=1, h11_max_incomplete_event_size=HEAD_MAX,
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        self._tasks = [
            asyncio.create_task(self._server.serve([self._sock]), name="dashboard"),
            asyncio.create_task(self._poller.run(), name="dashboard's poller"),
        ]

    def _polled(self, url: str) -> ClusterPoller:
        return ClusterPoller(url, self._model, self._fanout, self._checkpoints, self._prometheus)

    async def wait(self) -> None:
        """Until it ends, which is an error; its cause is raised."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def end(self) -> None:
        """Closes the port and all connections."""
        for task in self._tasks[1:]:
            task.cancel()
        if self._server is not None:
            self._server.should_exit = self._server.force_exit = True
            for connection in list(self._server.server_state.connections):
                connection.transport.abort()  # streams never end by themselves
        await asyncio.wait(self._tasks, timeout=CLOSE_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._sock.close()

    def start(self) -> None:
        """Serves from the control loop of this process, beside what else runs in it."""
        background.run(self.begin())

    def follow(self, url: str) -> None:
        """Shows another cluster from now on, such as the one that goes on from a checkpoint of the last."""
        background.run(self._turn_to(url))

    async def _turn_to(self, url: str) -> None:
        self._url = url
        self._tasks[1].cancel()
        await asyncio.gather(self._tasks[1], return_exceptions=True)
        self._poller = self._polled(url)
        self._tasks[1] = asyncio.create_task(self._poller.run(), name="dashboard's poller")

    def stop(self) -> None:
        """Ends what `start` began."""
        background.run(self.end())


class _Protocol(H11Protocol):
    """Who sends no whole request in time, or reads nothing, is dropped; and of too many, who has asked for nothing for
    the longest time: whoever opens connections keeps nobody out."""

    _head: asyncio.TimerHandle | None = None
    _write: asyncio.TimerHandle | None = None
    _idle_since = 0.0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._expect_head()
        if len(self.connections) > CONNECTIONS_MAX:
            others = (each for each in self.connections if isinstance(each, _Protocol) and each._is_idle())
            min(others, key=lambda each: each._idle_since).transport.abort()

    def _is_idle(self) -> bool:
        cycle: Any = self.cycle  # None before the first request, of which its type says nothing
        return not self.transport.is_closing() and (cycle is None or cycle.response_complete)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head, self._write):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            self._expect_head()
        elif self.conn.their_state is not h11.SEND_BODY and self._head is not None:
            self._head.cancel()
            self._head = None

    def _expect_head(self) -> None:
        if self._head is None:
            self._idle_since = self.loop.time()
            self._head = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.abort)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write = self.loop.call_later(WRITE_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write is not None:
            self._write.cancel()
            self._write = None


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family[0], socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(family[4])
        sock.listen(128)
    except OSError as error:
        raise ConfigError(f"the dashboard's port {host}:{port} cannot be had: {error.strerror or error}") from None
    return sock


def begin_beside(url: str, port: int) -> Dashboard:
    """A dashboard that runs in this process: at `port` if that can be had, else at any free one."""
    try:
        page = Dashboard(url, port=port)
    except ConfigError:
        page = Dashboard(url, port=0)
    page.start()
    return page


def check_host(host: str, insecure: bool) -> None:
    """ConfigError for a host that others reach, unless they may: the page has no secrets of its own, and no TLS."""
    if not insecure and not is_loopback(host):
        raise ConfigError(
            f"whoever reaches {host} could read the page, as it has no TLS: put a proxy that has before the loopback "
            "address, use ssh -L, or say --insecure where a network of your own protects it"
        )


def make_token(url: str) -> str:
    """What `--allow-actions` takes. ConfigError if the URL has the certificate of somebody who may change nothing."""
    credentials = credentials_of(url)
    if credentials is not None and not credentials.identity.may(Act.CHANGE):
        raise ConfigError(
            f"--allow-actions takes an operator's certificate in the URL; this is {credentials.identity}'s"
        )
    return secrets.token_urlsafe(24)
