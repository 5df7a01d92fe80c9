"""The scrape endpoint of a server or coordinator: HTTP on its own event loop.

Not prometheus_client's server, which answers from a thread: that would read a loop's data while the loop changes it,
and take turns with it at the interpreter's lock, five milliseconds a turn. And an answer from the loop shows that the
loop still turns, which is what a liveness probe of a coordinator asks `/healthz` for.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from contextlib import suppress

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from coordinator.core import fields
from elasticps.errors import ConfigError

log = fields.logger(__name__)

MAX_HEAD_BYTES = 8 << 10
MAX_SCRAPES_AT_ONCE = 16
TIMEOUT_S = 10.0


class Scrape:
    """A running endpoint, made by `start`: `/metrics`, `/healthz` and `/readyz`.

    port   the one that it listens on
    ready  what `/readyz` answers: whether whoever is waited for may send requests here
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.port = 0
        self.ready = True
        self._registry = registry
        self._listener: asyncio.Server | None = None
        self._under_way: dict[asyncio.StreamWriter, None] = {}  # the oldest first

    @classmethod
    async def start(cls, host: str, port: int, collectors: Iterable[Collector]) -> Scrape:
        """Serves what `collectors` collect, and the process's own CPU, memory and descriptors.

        Port 0: any free one. Raises ConfigError when the port cannot be had.
        """
        registry = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=registry)
        for collector in collectors:
            registry.register(collector)
        scrape = cls(registry)
        try:
            scrape._listener = await asyncio.start_server(scrape._answer, host, port, limit=MAX_HEAD_BYTES)
        except OSError as error:
            why = os.strerror(error.errno).lower() if error.errno else str(error)
            raise ConfigError(
                f"the metrics port {host}:{port} cannot be had: {why}; take another --metrics-port"
            ) from error
        scrape.port = scrape._listener.sockets[0].getsockname()[1]
        return scrape

    async def close(self) -> None:
        """Closes the port, and the connections with it."""
        if self._listener is not None:
            self._listener.close()
        for writer in list(self._under_way):
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._under_way[writer] = None
        if len(self._under_way) > MAX_SCRAPES_AT_ONCE:  # who asks is answered at once: the oldest only holds its place
            oldest = next(iter(self._under_way))
            del self._under_way[oldest]
            oldest.transport.abort()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._response(head.decode("latin-1")))
                await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            writer.transport.abort()
        finally:
            self._under_way.pop(writer, None)
            with suppress(OSError):
                writer.close()

    def _response(self, head: str) -> bytes:
        request, *lines = head.split("\r\n")
        method, path, *_ = [*request.split(" "), "", ""]
        if method not in ("GET", "HEAD"):
            return _http("405 Method Not Allowed", "text/plain", b"only GET\n")
        path = path.partition("?")[0]
        if path == "/healthz":
            return _http("200 OK", "text/plain", b"ok\n", method)
        if path == "/readyz":
            status, text = ("200 OK", b"ok\n") if self.ready else ("503 Service Unavailable", b"not serving\n")
            return _http(status, "text/plain", text, method)
        if path != "/metrics":
            return _http("404 Not Found", "text/plain", b"there are /metrics, /healthz and /readyz\n", method)
        fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        encode, content_type = choose_encoder(fields.get("accept", ""))
        try:
            return _http("200 OK", content_type, encode(self._registry), method)
        except Exception:  # what is measured must not suffer from how it is shown
            log.exception("a scrape failed")
            return _http("500 Internal Server Error", "text/plain", b"see the log\n", method)


def _http(status: str, content_type: str, body: bytes, method: str = "GET") -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + (b"" if method == "HEAD" else body)
