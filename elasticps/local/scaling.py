"""Grows and shrinks a local cluster: which servers to start and to drain, what that would move, and doing it."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from coordinator.core.dry_run import DryRun, dry_run
from coordinator.core.names import check_name
from coordinator.core.planner import Members
from coordinator.core.view import ServerInfo, View
from elasticps.errors import ConfigError, Error, Timeout
from elasticps.local import certificates, state, supervisor
from elasticps.local.operator_client import LOOK_S, OperatorClient, Progress, Tell, held
from elasticps.local.process import Process
from elasticps.security.identity import Role

SERVERS_MAX = 64
USUAL_BYTES_PER_S = 20e6  # that a server copies to others under load: measured on two cores, for dry runs
_END_S = 15.0  # for a drained server to end by itself


class StartedServer(Protocol):
    """A server that was started, by whatever starts servers here."""

    @property
    def name(self) -> str:
        """The server's name."""

    @property
    def running(self) -> bool:
        """Whether it runs, or is about to again."""

    def wait_ready(self, deadline: float) -> None:
        """Returns when it serves; Timeout at `deadline` (time.monotonic())."""

    def how_it_ended(self) -> str:
        """How it ended, in words such as "was killed by SIGKILL"."""

    def last_words(self) -> str:
        """The end of its log."""


Spawn = Callable[[str, list[str]], StartedServer]  # name and options -> the server, started and recorded
WaitEnded = Callable[[str], None]  # returns when the server of this name, which has drained, has ended


@dataclass(frozen=True)
class Change:
    """How a number of servers is reached. start, drain: names; keep: who was asked to drain, and stays after all; stay:
    who serves before and after, or has been started and will."""

    start: tuple[str, ...] = ()
    drain: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    stay: tuple[str, ...] = ()


@dataclass(frozen=True)
class ScaleResult:
    """What `scale` did, and how long it took until nothing moved any more. copies: of ranges that had to be made."""

    change: Change
    servers: tuple[str, ...]
    copies: int
    epoch: int
    seconds: float


def metrics_options(first_port: int, position: int) -> list[str]:
    """Options of the process at this position of a cluster whose first one serves metrics at that port; 0: none."""
    if first_port and first_port + position > 65535:
        raise ConfigError(f"there are not enough ports from {first_port} on for metrics: take a lower --metrics-port")
    return ["--metrics-port", str(first_port + position)] if first_port else []


def existing(names: Iterable[str]) -> str:
    """The existing names, for the message to a caller who asked for another one."""
    return f"; there are {', '.join(names)}" if names else "; there are none"


def change(running: Collection[str], draining: Collection[str], servers: int, leaving: Collection[str] = ()) -> Change:
    """Which servers come and go so that `servers` serve: names that are free, lowest first, come; highest names go.
    leaving: those that drain because their processes are about to end, so that they cannot be kept."""
    if not 1 <= servers <= SERVERS_MAX:
        raise ConfigError(f"a local cluster has 1 to {SERVERS_MAX} servers, not {servers}")
    serving = sorted(set(running) - set(draining), key=by_number)
    if len(serving) > servers:
        return Change(drain=tuple(serving[servers:]), stay=tuple(serving[:servers]))
    missing = servers - len(serving)
    keep = sorted(set(running) & set(draining) - set(leaving), key=by_number)[:missing]
    free = (name for name in (f"s{i}" for i in range(SERVERS_MAX + len(running))) if name not in running)
    start = tuple(next(free) for _ in range(missing - len(keep)))
    return Change(start, keep=tuple(keep), stay=tuple(serving))


def by_number(name: str) -> tuple[str, int, str]:
    """Sorts s2 before s10."""
    letters = name.rstrip("0123456789")
    return letters, int(name[len(letters) :] or 0), name


def options(zone: str, weight: float) -> list[str]:
    """Returns the options of the command that starts a server."""
    return ["--zone", zone, "--weight", str(weight)]


def predict(
    operator: OperatorClient,
    planned: Change,
    *,
    zone: str = "",
    weight: float = 1.0,
    nbytes: Mapping[str, int] | None = None,
) -> DryRun:
    """Computes what a change would move, without making it. ValueError for a zone or weight that cannot be."""
    view, now = operator.view, operator.members()
    new = tuple(ServerInfo(name, 1 << 40, "127.0.0.1:1", "", zone, weight) for name in planned.start)
    draining = {m for m in now.draining if m.name not in planned.keep}
    draining |= {s.member for s in now.servers if s.name in planned.drain}
    there = tuple(s for s in now.servers if s.name not in planned.start)
    members = Members(now.cluster, (*there, *new), frozenset(draining))
    return dry_run(view, members, operator.config(), nbytes=nbytes)


def scale(
    url: str, planned: Change, spawn: Spawn, ended: WaitEnded, *, zone: str = "", weight: float = 1.0,
    timeout_s: float = 600.0, tell: Tell = lambda progress: None,
) -> ScaleResult:  # fmt: skip
    """Makes the change and returns when nothing moves any more and those that drained have ended.

    Error if a server that is to serve ends meanwhile, Timeout when it takes longer; what was begun goes on by itself.
    """
    began = time.monotonic()
    with OperatorClient(url) as operator:
        try:
            target = predict(operator, planned, zone=zone, weight=weight)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        goal = held(target.view)
        for name in planned.keep:
            operator.cancel_drain(name)
        new = [spawn(name, options(zone, weight)) for name in planned.start]
        for process in new:
            process.wait_ready(began + timeout_s)
        gone = [operator.request_drain(name) for name in planned.drain]
        here = {*goal, *planned.start, *planned.keep, *planned.stay} - set(planned.drain)
        checked = time.monotonic()
        while True:
            view = operator.view
            tell(Progress(_left(view, goal), view.reason))
            _check_alive(new)
            now = time.monotonic()
            if now - began > timeout_s:
                raise Timeout(f"the cluster is not settled after {timeout_s:g} s, and goes on: {view.reason}")
            if here <= held(view).keys() and now - checked > 4 * LOOK_S:
                if operator.settled():
                    break
                checked = time.monotonic()
            time.sleep(LOOK_S)
        tell(Progress(0, view.reason))
        for server in gone:
            ended(server.name)
        serving = tuple(sorted(held(operator.view), key=by_number))
        return ScaleResult(planned, serving, target.copies, operator.view.epoch, time.monotonic() - began)


def _left(view: View, goal: Mapping[str, int]) -> int:
    now = held(view)
    return sum(max(0, count - now.get(name, 0)) for name, count in goal.items())


def _check_alive(servers: Sequence[StartedServer]) -> None:
    for server in servers:
        if not server.running:
            raise Error(f"server {server.name} {server.how_it_ended()}; {server.last_words()}")


def spawn_recorded(folder: Path) -> Callable[[str, list[str]], Process]:
    """Starts servers of a cluster that this process need not own: it lists them in the record, so that they end with
    the cluster."""

    def spawn(name: str, more: list[str]) -> Process:
        record = _record(folder)
        environment = {**os.environ, **record.environment}
        url = certificates.url_of(record.url, folder, Role.SERVER, name)
        process = Process.start(
            name,
            "server",
            server_command("server", url, name, [*more, *record.server_options]),
            folder,
            environment,
        )
        entry = state.ProcessEntry(process.name, process.role, process.pid, process.moment)

        def add(now: state.Record) -> state.Record:
            if any(p.name == name and p.running for p in now.processes):
                raise ConfigError(f"a server {name} was started by somebody else at the same time")
            return replace(now, processes=(*(p for p in now.processes if p.name != name), entry))

        try:
            state.update(folder, add)
        except BaseException:
            supervisor.send(process.pid, process.moment, signal.SIGKILL)  # nobody else knows of it
            raise
        return process

    return spawn


def server_command(role: str, url: str, name: str, more: Sequence[str]) -> list[str]:
    """The command line of a server, or of a coordinator. ConfigError for a name that cannot be."""
    try:
        check_name(role, name)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return [sys.executable, "-m", "elasticps", role, "--url", url, "--name", name, *more]


def _record(folder: Path) -> state.Record:
    record = state.read(folder)
    if record is None:
        raise ConfigError(f"the local cluster of {folder} has ended")
    return record


def wait_ended(folder: Path, name: str) -> None:
    """Returns when the process of a drained server has ended, and takes it off the record. Error if it does not."""
    deadline = time.monotonic() + _END_S
    while entry := next((p for p in _record(folder).servers if p.name == name), None):
        if time.monotonic() > deadline:
            raise Error(f"server {name} (pid {entry.pid}) has drained, and still runs {_END_S:g} s later")
        time.sleep(LOOK_S)

    def drop(now: state.Record) -> state.Record:
        return replace(now, processes=tuple(p for p in now.processes if p.name != name or p.running))

    state.update(folder, drop)
