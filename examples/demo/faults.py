"""Faults of the demo: which server to kill, how to kill all processes, and how a cluster returns from a checkpoint."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from coordinator.core.data_loss import spans
from elasticps.checkpoint.create import checkpoint_cluster
from elasticps.checkpoint.restore import restore_cluster
from elasticps.errors import ConfigError, Error
from elasticps.local import LocalCluster

if TYPE_CHECKING:
    from coordinator.core.view import View

LOST_S = 2.0  # by then a newer view has come, if these ranges have a replica that runs
_MARK = ".demo"  # a file in a folder that a demo has made


class ReplicasLost(Error):
    """Every replica of some ranges died before another server had a copy."""


class DemoCheckpoints:
    """Checkpoints of the demo's model, in a folder. Removes those of an earlier run. ConfigError if the folder has
    something else."""

    def __init__(self, folder: Path) -> None:
        if folder.is_symlink() or (folder.exists() and not (folder / _MARK).is_file()):
            raise ConfigError(f"{folder} is not the demo's: remove it, or name another folder with --out")
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        (folder / _MARK).touch()
        self._url = folder.absolute().as_uri()

    def take(self, cluster: LocalCluster) -> str:
        """Takes a checkpoint while training goes on; returns a line about it."""
        made = checkpoint_cluster(cluster.operator_url, self._url)
        return f"checkpoint {made.cut}: {sum(file.rows for file in made.files):,} rows"

    def bring_back(self, servers: int, replicas: int, progress: Callable[[str], None]) -> tuple[LocalCluster, str]:
        """Starts a cluster with the newest checkpoint in it; returns it, and a line about that."""
        cluster = LocalCluster(name="demo", servers=servers, replicas=replicas, measure=True, progress=progress)
        cluster.start()
        try:
            report = restore_cluster(cluster.operator_url, self._url)
        except BaseException:
            cluster.stop()
            raise
        return cluster, f"{servers} servers go on from checkpoint {report.cut}"


def kill_everything(cluster: LocalCluster) -> None:
    """Kills each process of a cluster (kill -9)."""
    for name in [*(server.name for server in cluster.servers if server.running), "c0", "etcd"]:
        cluster.kill(name)
    cluster.stop()


class LossWatch:
    """Looks for ranges all of whose replicas have died: workers would wait for them until their time-outs."""

    def __init__(self) -> None:
        self._whole: View | None = None  # the last view of whose ranges each had a replica that ran
        self._since: float | None = None  # when ranges without one were first seen

    def check(self, view: View | None, cluster: LocalCluster, patience_s: float = LOST_S) -> None:
        """Raises ReplicasLost once there have been such ranges for `patience_s`."""
        if view is None:
            return
        lost = without_replica(
            view, {(server.name, server.incarnation) for server in cluster.servers if server.running}
        )
        if not lost.size:
            self._whole, self._since = view, None
            return
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        if now - self._since >= patience_s:
            raise ReplicasLost(lost_text(self._whole or view, lost))


def without_replica(view: View, running: Collection[tuple[str, int]]) -> NDArray[np.int64]:
    """Ranges none of whose replicas runs. running: names and incarnations of the servers that run."""
    runs = [(server.name, server.incarnation) in running for server in view.servers]
    return np.flatnonzero(~np.isin(view.chains, np.flatnonzero(runs)).any(axis=1))


def lost_text(whole: View, lost: NDArray[np.int64]) -> str:
    """What is lost with all replicas of some ranges, and how to avoid it. whole: the last view before."""
    ranges, copies = whole.chains.shape
    held = np.unique(whole.chains[lost])
    dead = " and ".join(sorted(whole.servers[i].name for i in held[held >= 0].tolist()))
    replicas = {1: "their only replica", 2: "both replicas"}.get(copies, f"all {copies} replicas")
    return (
        f"{dead} died before other servers had copies: {lost.size} of {ranges} ranges ({spans(lost)}) have lost "
        f"{replicas}, and what the model had learnt there is gone, in all tables. Ranges live on if fewer servers than "
        f"--replicas ({copies}) die before the others have copied what those had, which takes seconds: give the demo "
        f"--replicas {copies + 1} and at least as many --servers, or wait between two kills until `elasticps status` "
        "shows that every range has all its replicas"
    )


def choose_victim(view: View, running: Collection[tuple[str, int]]) -> tuple[str, int] | None:
    """The server that heads most ranges, and how many; None while each has the only full replica of some range.
    running: names and incarnations of those that run and do not drain; a user may have killed one a moment ago."""
    runs = [(server.name, server.incarnation) in running for server in view.servers]
    survives = np.isin(view.chains, np.flatnonzero(runs))
    heads = np.bincount(view.heads[view.heads >= 0], minlength=len(runs))
    for me in np.argsort(-heads, kind="stable"):
        if runs[me] and heads[me] and (survives & (view.chains != me)).any(axis=1).all():
            return view.servers[me].name, int(heads[me])
    return None
