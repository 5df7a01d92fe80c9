"""`elasticps up`, `down` and `kill`: a cluster of processes on this machine."""

from __future__ import annotations

import enum
import signal as signals
import time
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from elasticps.cli.bars import restore_with_bar
from elasticps.cli.options import Every, Name, Url, usable_place
from elasticps.cli.output import ExitCode, err, out, print_json, sigterm_interrupts
from elasticps.dashboard import PORT, check_installed
from elasticps.errors import ConfigError, Error
from elasticps.local import LocalCluster, certificates, etcd, state, supervisor

if TYPE_CHECKING:
    from elasticps.dashboard.serve import Dashboard

DEFAULT_NAME = "local"

_LOOK_EVERY_S = 0.2
_GONE_WITHIN_S = 30.0  # freeing much memory takes a while


def up(
    servers: Annotated[int, typer.Option(min=1, help="How many servers.")] = 3,
    replicas: Annotated[int, typer.Option(min=1, help="Copies of each range, on as many servers.")] = 2,
    coordinators: Annotated[int, typer.Option(min=1, help="How many coordinators; one leads.")] = 1,
    ranges: Annotated[int, typer.Option(help="Slices of the hash space, a power of two.")] = 256,
    name: Annotated[str, typer.Option(help="The cluster's name.")] = DEFAULT_NAME,
    plugin: Annotated[
        list[str] | None,
        typer.Option(help="A module that every server imports first. May be given again."),
    ] = None,
    memory_limit: Annotated[
        str,
        typer.Option(help="What each server may use, such as 4GiB.  \\[default: the machine's]", show_default=False),
    ] = "",
    detach: Annotated[bool, typer.Option("--detach", help="Leave it running; `elasticps down` ends it.")] = False,
    dashboard: Annotated[
        bool, typer.Option("--dashboard", help="Serve a page that shows it, and print its address.")
    ] = False,
    metrics_port: Annotated[
        int,
        typer.Option(
            min=0, max=65535, help="Serve Prometheus metrics: c0 at this port, s0 and so on at the next ones."
        ),
    ] = 0,
    restart: Annotated[
        bool, typer.Option("--restart", help="Start servers and coordinators that die again under their names.")
    ] = False,
    tls: Annotated[
        bool,
        typer.Option("--tls", help="Encrypt everything; each process gets a certificate, by a throw-away CA."),
    ] = False,
    restore: Annotated[
        str,
        typer.Option(
            metavar="URL",
            callback=usable_place,
            help="Begin with the newest checkpoint there is at this URL.",
            show_default=False,
        ),
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON instead of the URL.")] = False,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that the start may take.")] = 600.0,
) -> None:
    """Start a cluster on this machine and print its URL: etcd, a coordinator and servers.

    It ends with this command, on Ctrl-C, unless --detach is given.
    """
    if dashboard:
        check_installed()
        if detach:
            raise ConfigError("--dashboard ends with this command: beside a detached cluster run elasticps dashboard")
    if restore:
        from elasticps.checkpoint import catalog  # brings in obstore, which a cluster without checkpoints never needs
        from elasticps.checkpoint.storage import Storage

        catalog.chain(Storage(restore))  # before anything starts
    with sigterm_interrupts(), err.status("starting etcd") as spinner:
        cluster = LocalCluster(
            name,
            servers=servers,
            replicas=replicas,
            coordinators=coordinators,
            ranges=ranges,
            memory_limit=memory_limit,
            plugins=plugin or (),
            measure=dashboard,
            metrics_port=metrics_port,
            directory=state.folder_of(name),
            detach=detach,
            restart=restart,
            tls=tls,
            timeout_s=timeout,
            progress=spinner.update,
        )
        cluster.start()
    page: Dashboard | None = None
    with sigterm_interrupts():
        try:
            if restore:
                _restore(cluster, restore, timeout)
            if dashboard:
                page = _begin_page(cluster)
            _announce(cluster, detach=detach, as_json=as_json)
            if not detach:
                _watch(cluster)
        except KeyboardInterrupt:
            err.print("ending the cluster")
            if detach:  # whoever interrupted it may not have read how it is ended
                cluster.stop()
                raise
        finally:
            if page is not None:
                page.stop()
            if not detach:
                cluster.stop()


def _begin_page(cluster: LocalCluster) -> Dashboard:
    from elasticps.dashboard.serve import begin_beside  # only who asks for it waits for its import

    page = begin_beside(cluster.operator_url, PORT)
    err.print(f"dashboard: {page.address}", markup=False)
    return page


def _restore(cluster: LocalCluster, place: str, timeout_s: float) -> None:
    try:
        restore_with_bar(cluster.operator_url, place, None, "", timeout_s, as_json=False)
    except KeyboardInterrupt:
        err.print("interrupted: the restore had not finished, and the cluster ends; its checkpoints are as they were")
        with suppress(KeyboardInterrupt):  # a second one changes nothing about how this ends
            cluster.stop()
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    except BaseException:
        cluster.stop()  # a detached one too: what was asked for is not there
        raise


def _announce(cluster: LocalCluster, *, detach: bool, as_json: bool) -> None:
    if as_json:
        servers = [asdict(server) for server in cluster.servers]
        urls = {"url": cluster.url, "operator_url": cluster.operator_url}
        print_json({"name": cluster.name, **urls, "directory": str(cluster.directory), "servers": servers})
        return
    table = Table("server", "pid", "address", box=None, header_style="bold", pad_edge=False)
    for server in cluster.servers:
        table.add_row(server.name, str(server.pid), server.address)
    err.print(table)
    if len(cluster.servers) < cluster.config.replicas:
        text = f"{cluster.config.replicas} replicas of each range were asked for: that needs as many servers"
        err.print(f"{text}. What a server holds is lost with it if nobody else has a copy", style="yellow")
    if text := etcd.warning(etcd.etcd_binary()):
        err.print(text, style="yellow", markup=False)
    err.print(f"logs in {cluster.directory}", markup=False, soft_wrap=True)
    err.print(f"end it with: elasticps down --name {cluster.name}" if detach else "end it with Ctrl-C")
    if cluster.operator_url != cluster.url:
        err.print(f"for operators: {cluster.operator_url}", markup=False, soft_wrap=True)
    out.print(cluster.url, markup=False)
    out.file.flush()


def _watch(cluster: LocalCluster) -> None:
    while True:
        time.sleep(_LOOK_EVERY_S)
        for line in cluster.ended():
            err.print(line, style="yellow", markup=False)


def down(url: Url = None, name: Name = None, every: Every = False) -> None:
    """End a cluster that `up` has started, and remove its data and logs."""
    if every and (url or name):
        raise ConfigError(f"--all and --{'name' if name else 'url'} exclude each other")
    chosen, unreadable = state.survey() if every else ([find(url, name)], [])
    for record in chosen:
        with err.status(f"ending {record.name}"):
            state.end(state.folder_of(record.name), record)
        err.print(f"cluster {record.name} has ended", markup=False)
    if unreadable:
        raise Error("\n".join(unreadable))
    if not chosen:
        err.print("no local cluster is there")
    raise typer.Exit(ExitCode.OK)


class Signal(enum.StrEnum):
    """A signal that `kill` can send."""

    KILL = "KILL"
    TERM = "TERM"
    STOP = "STOP"
    CONT = "CONT"


def kill(
    process: Annotated[
        str, typer.Argument(metavar="SERVER", help="For example s1; also c0 or etcd.", autocompletion=processes)
    ],
    signal: Annotated[Signal, typer.Option(help="STOP freezes it, CONT lets it go on.")] = Signal.KILL,
    url: Url = None,
    name: Name = None,
) -> None:
    """Send a signal to a process of a local cluster, as a crash would: KILL unless another is given."""
    record = find(url, name)
    entry = next((p for p in record.processes if p.name == process and p.role != "owner"), None)
    if entry is None:
        names = ", ".join(p.name for p in record.processes if p.role != "owner")
        raise ConfigError(f"cluster {record.name!r} has no process called {process!r}; it has {names}")
    if not supervisor.send(entry.pid, entry.moment, signals.Signals[f"SIG{signal.value}"]):
        raise Error(f"{entry.role} {entry.name} is not running any more")
    deadline = time.monotonic() + _GONE_WITHIN_S
    while signal is Signal.KILL and entry.running and time.monotonic() < deadline:
        time.sleep(0.005)
    err.print(f"{entry.role} {entry.name} (pid {entry.pid}) was sent SIG{signal.value}", markup=False)


def find(url: str | None, name: str | None) -> state.Record:
    """Finds a recorded local cluster by URL or name; without either, returns the only one that is recorded."""
    _one_of(url, name)
    if name is not None:
        record = state.read(state.folder_of(name))
        if record is None:
            raise ConfigError(f"no local cluster is called {name!r}; {_known()}")
        return record
    if url is not None:
        record = started_here(url)
        if record is None:
            raise ConfigError(
                f"the cluster at {url} was not started by `elasticps up` on this machine ({_known()}): "
                "start and end its processes where they run"
            )
        return record
    records, unreadable = state.survey()
    if len(records) != 1:
        raise ConfigError(f"say which cluster with --name; {_known()}" if records else _known())
    for text in unreadable:
        err.print(text, style="yellow", markup=False, soft_wrap=True)
    return records[0]


def started_here(url: str) -> state.Record | None:
    """The recorded local cluster of that URL, None if it is none of them."""
    try:
        return state.started_here(url)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def target(url: str | None, name: str | None) -> str:
    """The URL of the cluster that --url or --name means."""
    _one_of(url, name)
    return url if url is not None else find(None, name).url


def worker_target(url: str | None, name: str | None) -> str:
    """The same for a command that does what a worker does: a local cluster with TLS has another certificate for it."""
    _one_of(url, name)
    if url is not None:
        return url
    record = find(None, name)
    return certificates.worker_url(record.url, state.folder_of(record.name))


def processes(incomplete: str) -> list[str]:
    """Lists the processes, for shell completion."""
    names = {p.name for record in state.records() for p in record.processes if p.role != "owner"}
    return sorted(name for name in names if name.startswith(incomplete))


def _one_of(url: str | None, name: str | None) -> None:
    if url is not None and name is not None:
        raise ConfigError("--url and --name exclude each other")


def _known() -> str:
    records, unreadable = state.survey()
    names = ", ".join(record.name for record in records)
    if not records and not unreadable:
        return "no local cluster is there; start one with: elasticps up"
    return "; ".join([*([f"there {'is' if len(records) == 1 else 'are'}: {names}"] if records else []), *unreadable])
