"""The end of a whole cluster, and its return from a checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from elasticps.checkpoint.create import checkpoint_cluster
from elasticps.checkpoint.restore import restore_cluster
from elasticps.errors import ConfigError
from elasticps.local import LocalCluster

_MARK = ".demo"  # a file in a folder that a demo has made


class Checkpoints:
    """Of the demo's model, in a folder. Those of an earlier run go. ConfigError if the folder has something else."""

    def __init__(self, folder: Path) -> None:
        if folder.is_symlink() or (folder.exists() and not (folder / _MARK).is_file()):
            raise ConfigError(f"{folder} is not the demo's: remove it, or name another folder with --out")
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        (folder / _MARK).touch()
        self._url = folder.absolute().as_uri()

    def take(self, cluster: LocalCluster) -> str:
        """Takes one while training goes on; says what it has."""
        made = checkpoint_cluster(cluster.operator_url, self._url)
        return f"checkpoint {made.cut}: {sum(file.rows for file in made.files):,} rows"

    def bring_back(self, servers: int, replicas: int, progress: Callable[[str], None]) -> tuple[LocalCluster, str]:
        """A new cluster with the newest one in it; and what came back."""
        cluster = LocalCluster(name="demo", servers=servers, replicas=replicas, measure=True, progress=progress)
        cluster.start()
        try:
            report = restore_cluster(cluster.operator_url, self._url)
        except BaseException:
            cluster.stop()
            raise
        return cluster, f"{servers} servers go on from checkpoint {report.cut}"


def kill_everything(cluster: LocalCluster) -> None:
    """kill -9 of each of its processes."""
    for name in [*(server.name for server in cluster.servers if server.running), "c0", "etcd"]:
        cluster.kill(name)
    cluster.stop()
