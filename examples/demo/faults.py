"""Faults of the demo: which server to kill, how to kill all processes, and how a cluster returns from a checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from elasticps.checkpoint.create import checkpoint_cluster
from elasticps.checkpoint.restore import restore_cluster
from elasticps.errors import ConfigError
from elasticps.local import LocalCluster

if TYPE_CHECKING:
    from coordinator.core.view import View

_MARK = ".demo"  # a file in a folder that a demo has made


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
