"""Time from the death of a server to the next committed push on the ranges that it headed."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from benchmarks.counting import judge, prepare, start_workers, steps_of
from benchmarks.runner import Progress, Result, figures, percentiles, silent
from benchmarks.workers import Process
from coordinator.core.view import View
from elasticps.admin import fetch_status
from elasticps.errors import Timeout
from elasticps.local import LocalCluster
from elasticps.local.failover_log import Failover, adoption, failover
from elasticps.security import credentials_of
from elasticps.system import background
from elasticps.system.coordination import opened, read_view

SERVERS, REPLICAS, WORKERS = 3, 2, 2
RECOVERY_TIMEOUT_S = 60.0
REPAIR_TIMEOUT_S = 600.0
BATCH = 64
STEADY_STEPS = 50  # committed by each worker between two kills, at least


PARTS = {
    "detected": "death detected", "written": "view written", "adopted": "view adopted by all servers",
    "commits": "next push committed",
}  # fmt: skip


@dataclass(frozen=True)
class Kill:
    """One death; times in ms since the signal was sent.

    detected, written  by the leader: the evidence, and the view without the dead server
    adopted            by the last of the other servers
    commits            the first commit of each worker under that view
    held_bytes         that the server had allocated for rows
    """

    server: str
    ranges_headed: int
    held_bytes: int
    detected: float
    written: float
    adopted: float
    commits: tuple[float, ...]


@dataclass(frozen=True)
class FailoverRun:
    """All kills of a run.

    rows     stored before
    updates  of rows, acknowledged
    wrong    keys whose value is not the exact number of the updates acknowledged: some lost, or applied twice
    clean    whether the audit found every replica equal and every promise kept
    """

    signal: str
    rows: int
    kills: tuple[Kill, ...]
    updates: int
    wrong: int
    clean: bool

    def since_signal(self, part: str) -> list[float]:
        """Of all kills; `commits`: of all kills and workers."""
        if part == "commits":
            return [ms for kill in self.kills for ms in kill.commits]
        return [getattr(kill, part) for kill in self.kills]

    def as_dict(self) -> dict[str, Any]:
        """For programs."""
        parts = {part: percentiles(self.since_signal(part), 50, 99, 100, digits=1) for part in PARTS}
        shape = {"servers": SERVERS, "replicas": REPLICAS, "workers": WORKERS, "unit": "ms since the signal"}
        return {**shape, **parts, **asdict(self)}


def run(
    *, kills: int = 20, stop: bool = False, rows: int = 0, tls: bool = False, progress: Progress = silent
) -> Result:
    """Kills, or with `stop` freezes, the server that heads most ranges, `kills` times, with a repair between them.

    `rows` x 64 float32 with Adagrad are stored first. Two worker processes push all the time; at the end every replica
    is audited, and every value compared with the pushes acknowledged. Raises Timeout where recovery does not come.
    """
    progress("starting a cluster")
    with LocalCluster("failover", servers=SERVERS, replicas=REPLICAS, tls=tls) as cluster, ExitStack() as stack:
        prepare(cluster, rows, progress)
        workers = start_workers(stack, cluster, WORKERS, rows=rows, batch=BATCH)
        _steady(workers)
        done = []
        for number in range(kills):
            done.append(_round(cluster, workers, stop))
            progress(f"{number + 1} of {kills}: {max(done[-1].commits):.0f} ms")
        verdict = judge(cluster, [worker.ask("end")["counts"] for worker in workers], progress)
    name = signal.SIGSTOP.name if stop else signal.SIGKILL.name
    found = FailoverRun(name, rows, tuple(done), verdict.updates, verdict.wrong, verdict.clean)
    shown = figures(
        f"failover: ms since {name}, {kills} times, {rows:,} rows stored",
        {text: percentiles(found.since_signal(part), 50, 99, 100) for part, text in PARTS.items()},
        ("p50", "p99", "max"),
    )
    return Result(found, [shown, verdict.text], ok=not verdict.wrong and verdict.clean)


def _round(cluster: LocalCluster, workers: Sequence[Process], stop: bool) -> Kill:
    # Also a server that was only suspected, wrongly, leaves ranges with one copy for a while: that is not the time.
    view: View = _until(partial(_whole, cluster), REPAIR_TIMEOUT_S, "the repair did not end")
    heads = np.bincount(view.heads, minlength=len(view.servers))
    victim = cluster.server(view.servers[int(heads.argmax())].name)
    credentials = credentials_of(cluster.operator_url)
    held = int(background.run(fetch_status(victim.admin, 10.0, credentials))["bytes"])
    log_from = len(cluster.log("c0"))
    sent = time.time()
    if stop:
        cluster.pause(victim.name)
    else:
        cluster.kill(victim.name)
    end: Failover = _until(
        lambda: failover(cluster.log("c0")[log_from:], f"{victim.name}#{victim.incarnation}"),
        RECOVERY_TIMEOUT_S, "the leader wrote no view without the dead server",
    )  # fmt: skip
    commits = [
        _until(partial(worker.ask, "first_after", unix_s=end.written), RECOVERY_TIMEOUT_S, "no push was committed")
        for worker in workers
    ]
    others = [server.name for server in view.servers if server.name != victim.name]
    adopted = max(_until(partial(_adoption, cluster, name, end.epoch), 10.0, "no view was adopted") for name in others)
    if stop:
        cluster.resume(victim.name)
    else:
        cluster.start_server(victim.name)
        _until(
            lambda: cluster.server(victim.name).incarnation > victim.incarnation, REPAIR_TIMEOUT_S, "it did not rejoin"
        )
    _until(partial(_whole, cluster), REPAIR_TIMEOUT_S, "the repair did not end")
    _steady(workers)

    def since(t: float) -> float:
        return round((t - sent) * 1e3, 1)

    return Kill(
        victim.name, int(heads.max()), held, since(end.detected), since(end.written), since(adopted),
        tuple(since(t) for t in commits),
    )  # fmt: skip


def _adoption(cluster: LocalCluster, name: str, epoch: int) -> float | None:
    return adoption(cluster.log(name), epoch)


def _whole(cluster: LocalCluster) -> View | None:
    """The view, if every server is in it as it is now, and every range has all its replicas."""
    view = _view(cluster)
    listed = {server.member for server in view.servers}
    all_listed = all((server.name, server.incarnation) in listed for server in cluster.servers)
    return view if all_listed and bool((view.chains >= 0).all()) and bool((view.joining < 0).all()) else None


def _steady(workers: Sequence[Process]) -> None:
    """Waits until each worker has committed some more steps."""
    for worker in workers:
        goal = steps_of(worker) + STEADY_STEPS
        _until(partial(_has_done, worker, goal), RECOVERY_TIMEOUT_S, "no push was committed")


def _has_done(worker: Process, steps: int) -> bool:
    return steps_of(worker) >= steps


def _view(cluster: LocalCluster) -> View:
    async def read() -> View:
        async with opened(cluster.operator_url, 10.0) as store:
            return await read_view(store)

    return background.run(read())


def _until(look: Callable[[], Any], timeout_s: float, otherwise: str) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (found := look()):
        if time.monotonic() > deadline:
            raise Timeout(f"{otherwise} within {timeout_s:g} s")
        time.sleep(0.02)
    return found
