"""Ray with several raylets on this machine, without its dashboard, telemetry and log forwarding."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_METRICS_COLLECTION": "0",
    "RAY_memory_monitor_refresh_ms": "0",  # other tests use this machine's memory, too
    "RAY_health_check_period_ms": "1000",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_AUTH_MODE": "disabled",  # or it writes a token into the home folder
}
STORE_BYTES = 80 << 20


class Raylets:
    """A Ray cluster with one CPU for each of its nodes but the first, which has none: there the driver is."""

    def __init__(self, nodes: int) -> None:
        import ray
        from ray.cluster_utils import Cluster

        head = {
            "num_cpus": 0, "object_store_memory": STORE_BYTES, "include_dashboard": False,
            "include_log_monitor": False,
        }  # fmt: skip
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self.address = self._cluster.address
        for _ in range(nodes):
            self.add(wait=False)
        self._cluster.wait_for_nodes(timeout=120)
        ray.init(self.address, log_to_driver=False, logging_level="error")

    def add(self, wait: bool = True, cpus: int = 1) -> None:
        """Adds a node."""
        self._cluster.add_node(wait=wait, num_cpus=cpus, object_store_memory=STORE_BYTES)

    def kill(self, node: str) -> None:
        """SIGKILL to the raylet of a node, by its id."""
        (found,) = [each for each in self._cluster.worker_nodes if each.node_id == node]
        (raylet,) = found.all_processes["raylet"]
        raylet.process.kill()

    def drain(self, node: str) -> None:
        """What a cloud's notice of a preemption leads to."""
        import ray
        from ray._raylet import GcsClient
        from ray.core.generated import autoscaler_pb2

        reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        accepted, why = GcsClient(address=ray.get_runtime_context().gcs_address).drain_node(node, reason, "spot", 0)
        assert accepted, why

    def close(self) -> None:
        import ray

        ray.shutdown()
        self._cluster.shutdown()


@pytest.fixture(scope="module")
def raylets() -> Iterator[Any]:
    pytest.importorskip("ray")
    folder = Path(tempfile.mkdtemp(prefix="r", dir="/tmp"))  # paths of sockets are short
    with pytest.MonkeyPatch.context() as patch:
        for name, value in QUIET.items():
            patch.setenv(name, value)
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]) + os.pathsep + os.environ.get("PYTHONPATH", ""))
        patch.setenv("RAY_TMPDIR", str(folder))
        (folder / "ray").mkdir()
        raylets = Raylets(4)
        try:
            yield raylets
        finally:
            raylets.close()
            shutil.rmtree(folder, ignore_errors=True)


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
