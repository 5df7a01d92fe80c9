"""The process of `elasticps reader`: follows training, serves rows by gRPC, health and metrics by HTTP."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import NamedTuple

from coordinator.core import fields
from elasticps.errors import ConfigError
from elasticps.metrics.exposition import Scrape
from elasticps.metrics.reader import ReaderMetrics
from elasticps.readers import Reader
from elasticps.readers.pull_server import PullServer
from elasticps.security.credentials import Credentials
from elasticps.server.process.addresses import is_loopback
from elasticps.serving.service import LookupServer, start_lookup

log = fields.logger(__name__)

CHECK_S = 0.2  # between looks at the age


class ServingOptions(NamedTuple):
    """Where a reader's process serves, and how old its rows may be.

    host, port: of gRPC; metrics_port: of HTTP, at the same host, None for none; max_age_s: older, and it is not
    ready; listen: host and port for pulls of the data plane's protocol, None for none."""

    host: str
    port: int
    metrics_port: int | None
    max_age_s: float
    insecure: bool = False
    listen: tuple[str, int] | None = None


class Ready(NamedTuple):
    """Where a process serves: gRPC at host:port; the port of HTTP, None without; pulls at host:port, "" without."""

    grpc: str
    metrics_port: int | None
    pulls: str = ""


def check_host(options: ServingOptions, credentials: Credentials | None) -> None:
    """Raises ConfigError where other machines would read rows without TLS."""
    hosts = [options.host] if options.listen is None else [options.host, options.listen[0]]
    exposed = [host for host in hosts if not is_loopback(host)]
    if credentials is None and not options.insecure and exposed:
        raise ConfigError(
            f"without TLS whoever reaches {exposed[0]} could read rows, and pin the reader: give the URL a reader's "
            "certificate (`elasticps certificates` makes them), or say --insecure where a network of your own protects "
            "it"
        )


async def serve_reader(
    reader: Reader, name: str, options: ServingOptions, credentials: Credentials | None, tell: Callable[[Ready], None]
) -> None:
    """Serves until SIGTERM or SIGINT, or until the reader has ended, which raises what ended it. tell: is called once,
    when it serves."""
    check_host(options, credentials)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with AsyncExitStack() as stack:
        service = await start_lookup(reader, options.host, options.port, credentials, name)
        stack.push_async_callback(service.stop)
        scrape = None
        if options.metrics_port is not None:
            scrape = await Scrape.start(options.host, options.metrics_port, [ReaderMetrics(reader, name)])
            stack.push_async_callback(scrape.close)
        pulls = None
        if options.listen is not None:
            pulls = _listen(reader, *options.listen, credentials, name)
            stack.callback(pulls.close)
        tell(Ready(service.address, None if scrape is None else scrape.port, "" if pulls is None else pulls.address))
        await _follow_age(reader, service, scrape, options.max_age_s, stop)


def _listen(reader: Reader, host: str, port: int, credentials: Credentials | None, name: str) -> PullServer:
    """Listens for pulls. Raises ConfigError where the address cannot be had."""
    try:
        return PullServer(reader, host, port, credentials, name)
    except OSError as error:
        number = error.errno or 0  # below 0 it is the resolver's
        reason = os.strerror(number) if number > 0 else "no address is known by this name"
        raise ConfigError(
            f"--listen {host}:{port} cannot be had: {reason}; take another port, 0 for any free one, or an address of "
            "this machine"
        ) from None


async def _follow_age(
    reader: Reader, service: LookupServer, scrape: Scrape | None, max_age_s: float, stop: asyncio.Event
) -> None:
    """Has both health checks say whether what it shows is new enough."""
    serving: bool | None = None
    while not stop.is_set():
        reader.check()
        fresh = reader.age <= max_age_s
        if fresh is not serving:
            if serving is not None:
                tell = log.info if fresh else log.warning
                tell("rows are new enough" if fresh else "rows are too old", age_s=round(reader.age, 3))
            await service.set_serving(fresh)
            if scrape is not None:
                scrape.ready = fresh
            serving = fresh
        try:
            await asyncio.wait_for(stop.wait(), CHECK_S)
        except TimeoutError:
            continue
