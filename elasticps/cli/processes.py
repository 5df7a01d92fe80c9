"""`elasticps server` and `elasticps coordinator`: one process of a cluster each."""

from __future__ import annotations

import asyncio
import enum
import os
import signal
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
import uvloop

from coordinator.adoption import restore_config
from coordinator.connect import insist, open_store, release_of, release_warning
from coordinator.core import fields
from coordinator.core.names import check_name
from coordinator.core.store import Store
from coordinator.core.url import parse
from coordinator.core.view import ClusterConfig
from coordinator.failovers import Failovers
from coordinator.leader import run_coordinator
from coordinator.leadership import first_of
from coordinator.membership import create_cluster
from elasticps.cli.autoscale import Mode, Scaling, scaling_of
from elasticps.cli.checkpoint import parse_keep
from elasticps.cli.options import RequiredUrl, seconds, usable_host, usable_place
from elasticps.cli.output import print_json
from elasticps.errors import ConfigError, KernelsMissing
from elasticps.security import credentials_of
from elasticps.security.credentials import Credentials
from elasticps.security.identity import Role
from elasticps.system import logs
from elasticps.system.descriptors import raise_limit
from elasticps.system.memory import parse_size

if TYPE_CHECKING:
    from elasticps.checkpoint.manifest import Manifest

log = fields.logger(__name__)

Name = Annotated[str, typer.Option("--name", help="A name that no other process of its kind has.", show_default=False)]
LogLevel = Annotated[str, typer.Option("--log-level", help=f"{', '.join(logs.LEVELS)}.")]
LogFormat = Annotated[str, typer.Option("--log-format", help=f"{', '.join(logs.FORMATS)}.")]
MetricsPort = Annotated[
    int, typer.Option("--metrics-port", min=0, max=65535, help="Port of Prometheus metrics, at the host; 0: none.")
]


class DrainSignal(enum.StrEnum):
    """The signal on which a server hands over and ends."""

    TERM = "TERM"
    USR2 = "USR2"
    RTMIN = "RTMIN"


def server(
    url: RequiredUrl,
    name: Name,
    host: Annotated[
        str, typer.Option(callback=usable_host, help="Address to listen on, and to be found under.")
    ] = "127.0.0.1",
    advertise: Annotated[
        str,
        typer.Option(
            help="Host to be found under, where it listens on another. Unless given, with --host 0.0.0.0 it is the "
            "address from which etcd is reached."
        ),
    ] = "",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the data plane; 0: any free one.")] = 0,
    admin_port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the gRPC service; 0: any free one.")] = 0,
    zone: Annotated[str, typer.Option(help="What fails together with this server: a rack, a machine.")] = "",
    weight: Annotated[float, typer.Option(min=0.01, help="Its share of the ranges, relative to the others.")] = 1.0,
    plugin: Annotated[
        list[str] | None,
        typer.Option(help="A module to import first, for instance to register an optimizer. May be given again."),
    ] = None,
    drain_timeout: Annotated[
        float,
        typer.Option(
            min=0,
            help="Seconds after SIGTERM in which its ranges move to others; it stays longer as long as no server that "
            "stays has a copy of some. 0: it just ends.",
        ),
    ] = 60.0,
    wait: Annotated[
        float, typer.Option(min=0, help="Seconds to wait at the start for etcd (at least 10) and for the cluster.")
    ] = 0.0,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="Take the name though another process lives under it; that one ends.")
    ] = False,
    memory_limit: Annotated[
        str,
        typer.Option(
            help="What it may use, such as 4GiB; above four fifths or less of it no push may add rows.  "
            "\\[default: the limit of its control group, or the machine's memory]",
            show_default=False,
        ),
    ] = "",
    metrics_port: MetricsPort = 0,
    measure: Annotated[
        bool, typer.Option("--measure", help="Time requests, for the dashboard; --metrics-port does that, too.")
    ] = False,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Serve other machines without TLS: whoever reaches a port is obeyed.")
    ] = False,
    drain_on: Annotated[
        DrainSignal,
        typer.Option(help="It takes the part of SIGTERM, which a scheduler may send to every process of a job."),
    ] = DrainSignal.TERM,
    log_level: LogLevel = "info",
    log_format: LogFormat = "logfmt",
) -> None:
    """Run one server. SIGTERM: it hands everything over, then ends. SIGINT (Ctrl-C) or a second SIGTERM: it ends."""
    _ignore_user_signals()
    from elasticps.server.process.main import serve  # compiles kernels: only this command waits for that

    logs.configure(log_level, log_format=log_format, cluster=_cluster(url), process=name)
    uvloop.run(
        serve(
            url,
            name=name,
            host=host,
            port=port,
            admin_port=admin_port,
            zone=zone,
            weight=weight,
            plugins=tuple(plugin or ()),
            drain_timeout_s=drain_timeout,
            advertise=advertise,
            metrics_port=metrics_port,
            measure=measure,
            wait_s=wait,
            take_over=take_over,
            memory_limit=parse_size(memory_limit) if memory_limit else 0,
            insecure=insecure,
            drain_signal=signal.Signals[f"SIG{drain_on.value}"],
        )
    )


def coordinator(
    url: RequiredUrl,
    name: Name,
    ranges: Annotated[
        int | None,
        typer.Option(help="Slices of the hash space, a power of two, fixed for ever.  \\[default: 256]"),
    ] = None,
    replicas: Annotated[
        int | None,
        typer.Option(help="Servers that hold each range, fixed for ever.  \\[default: 2]"),
    ] = None,
    min_servers: Annotated[
        int | None,
        typer.Option(help="Servers that the first view waits for.  \\[default: 1]"),
    ] = None,
    restore: Annotated[
        str,
        typer.Option(
            metavar="URL",
            callback=usable_place,
            help="A cluster that it creates begins with the newest checkpoint there is at this URL; workers wait until "
            "it is there. Of no effect on a cluster that exists.",
            show_default=False,
        ),
    ] = "",
    checkpoint_url: Annotated[
        str,
        typer.Option(
            metavar="URL",
            callback=usable_place,
            help="Where checkpoints go, as for `checkpoint create`: those of --checkpoint-every, and those that "
            "workers ask for.",
            show_default=False,
        ),
    ] = "",
    checkpoint_every: Annotated[
        str, typer.Option(help="Make one so often while it leads: 30s, 5m, 2h.", show_default=False)
    ] = "",
    checkpoint_keep: Annotated[
        str,
        typer.Option(
            help="Which are kept there, such as last=3,hourly=24,daily=7; what those build on stays, too.  "
            "\\[default: all]",
            show_default=False,
        ),
    ] = "",
    autoscale: Annotated[
        Mode,
        typer.Option(
            help="On Kubernetes: scale the servers by their memory and load while it leads, or log what it would."
        ),
    ] = Mode.OFF,
    autoscale_servers: Annotated[
        str, typer.Option(metavar="MIN-MAX", help="How many servers there may be, such as 3-12.", show_default=False)
    ] = "",
    autoscale_target: Annotated[str, typer.Option(help="The StatefulSet of the servers.")] = "elasticps-server",
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for etcd at the start.")] = 30.0,
    host: Annotated[str, typer.Option(callback=usable_host, help="Address that metrics are served at.")] = "127.0.0.1",
    metrics_port: MetricsPort = 0,
    log_level: LogLevel = "info",
    log_format: LogFormat = "logfmt",
) -> None:
    """Run one coordinator until it is asked to end. Several stand by for each other.

    It creates the cluster if there is none of that name.
    """
    _ignore_user_signals()
    logs.configure(log_level, log_format=log_format, cluster=_cluster(url), process=name)
    KernelsMissing.check()  # now, and not when it leads and has to bring ranges back from a checkpoint
    chosen = {"ranges": ranges, "replicas": replicas, "min_servers": min_servers}
    given = {key: value for key, value in chosen.items() if value is not None}
    if (checkpoint_every or checkpoint_keep) and not checkpoint_url:
        option = "--checkpoint-every" if checkpoint_every else "--checkpoint-keep"
        raise ConfigError(f"{option} needs --checkpoint-url: where they go")
    if checkpoint_keep:
        parse_keep(checkpoint_keep)
    checkpoints = (
        checkpoint_url,
        seconds(checkpoint_every, "--checkpoint-every") if checkpoint_every else 0.0,
        checkpoint_keep,
    )
    scaling = scaling_of(autoscale, autoscale_servers, autoscale_target)
    uvloop.run(_coordinate(url, name, given, timeout, (host, metrics_port), restore, checkpoints, scaling))


def _ignore_user_signals() -> None:
    """Ignores SIGUSR1 and SIGUSR2, which a scheduler may send to every process of a job: they are for its command."""
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def _cluster(url: str) -> str:
    try:
        return parse(url).cluster
    except ValueError as error:
        raise ConfigError(str(error)) from None


async def _coordinate(
    url: str, name: str, chosen: dict[str, int], timeout_s: float, metrics_at: tuple[str, int], restore: str = "",
    checkpoints: tuple[str, float, str] = ("", 0.0, ""), scaling: Scaling | None = None,
) -> None:  # fmt: skip
    from elasticps.monitor import dial_server  # brings in the data plane's wire: only this command needs it

    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    raise_limit()  # a line to each server
    credentials = credentials_of(url)
    if credentials is not None:
        credentials.require(Role.COORDINATOR, name)
    async with AsyncExitStack() as stack:
        found: list[Store] = []
        await first_of(_begin(url, name, chosen, timeout_s, restore, stack, found), stop.wait())
        if stop.is_set():  # asked to end before there was anything to end
            return
        (store,) = found
        work: list[Coroutine[None, None, None]] = []
        on_ill: Callable[[bool], None] = _nothing
        if metrics_at[1]:
            from elasticps.metrics.cluster import ClusterMetrics  # who serves none need not wait for its import

            metrics = ClusterMetrics(store, name)
            stack.push_async_callback(metrics.close)
            await metrics.start(*metrics_at)
            work.append(metrics.follow())
            on_ill = metrics.on_ill
        if restore:
            work.append(_restore(store, credentials))
        print_json({"ready": True, "name": name, "pid": os.getpid()})
        dial = dial_server(name, credentials)
        schedule = partial(_see_to_data, store, credentials, *checkpoints, scaling)
        failovers = Failovers(store)
        leading = run_coordinator(
            store, name=name, stop=stop, dial=dial, on_ill=on_ill, while_leading=schedule, on_failover=failovers.note
        )
        await first_of(leading, failovers.run(), *work)


async def _begin(
    url: str, name: str, chosen: dict[str, int], timeout_s: float, restore: str, stack: AsyncExitStack,
    found: list[Store],
) -> None:  # fmt: skip
    """Adds the store to `found` when it answers and has the cluster; closed with `stack`."""
    try:
        check_name("coordinator", name)
        store = await open_store(url, timeout_s=timeout_s)
        stack.push_async_callback(store.close)
        if text := release_warning(await release_of(store)):
            log.warning("an unsuitable etcd", reason=text)
        await insist(lambda: _create(store, chosen, restore), timeout_s)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    found.append(store)


def _nothing(ill: bool) -> None:
    """Stands in for the metrics of a coordinator that serves none."""


async def _restore(store: Store, credentials: Credentials | None) -> None:
    """Goes on with restores that were begun. Never returns, as this coordinator goes on when they are done."""
    from elasticps.checkpoint.restore import keep_restoring

    await keep_restoring(store, credentials)
    await asyncio.Event().wait()


async def _see_to_data(
    store: Store, credentials: Credentials | None, url: str, every_s: float, keep: str, scaling: Scaling | None
) -> None:
    """Makes checkpoints, removes old ones, restores lost ranges from them, and scales, while this coordinator leads."""
    from elasticps.checkpoint.create import by_grpc, checkpoint
    from elasticps.checkpoint.loss_policy import LossPolicy
    from elasticps.checkpoint.schedule import CheckpointSchedule, Cleaner

    async def take(full: bool, if_changed: bool) -> Manifest:
        async with by_grpc(credentials) as connect:
            return await checkpoint(store, url, connect, full=full, if_changed=if_changed)

    schedule = CheckpointSchedule(store, take if url else None, every_s, Cleaner(url, keep).clean_up)
    scaled = [] if scaling is None else [scaling(store, credentials)]
    await first_of(schedule.run(), LossPolicy(store, url, credentials).run(), *scaled)


async def _create(store: Store, chosen: dict[str, Any], restore: str) -> None:
    """Makes sure that there is a cluster, and that it is as `chosen`; one that is made begins with a checkpoint, if one
    is to be restored."""
    existing = await restore_config(store)
    if existing is None and restore:
        from elasticps.checkpoint.restore import begin_with

        await begin_with(store, restore)
    await create_cluster(store, replace(existing or ClusterConfig(), **chosen))
