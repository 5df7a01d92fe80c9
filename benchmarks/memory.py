"""Memory per row and time to readiness of a server process."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.sparse import fill
from elasticps.client import connect
from elasticps.local import LocalCluster
from elasticps.model.spec import Adagrad


def rss_bytes(pid: int) -> int:
    """Resident memory of a process, from /proc."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise ProcessLookupError(f"process {pid} shows no resident memory")


def run(
    *, rows: int = 5_000_000, dim: int = 64, progress: Callable[[str], None] = lambda text: None
) -> dict[str, float]:
    """Growth of a server's resident memory per row of `dim` float32 with Adagrad, and what the rows alone need.

    `allowed_bytes_per_row` is 1.3 x (row + slots) + 32.
    """
    progress("starting a cluster")
    with LocalCluster(servers=1, replicas=1) as cluster, connect(cluster.url, worker="bench", timeout=120.0) as ps:
        table = ps.table("bench", dim=dim, optimizer=Adagrad(lr=0.01))
        (server,) = cluster.servers
        fill(ps, table, 1000)
        before = rss_bytes(server.pid)
        progress(f"filling {rows:,} rows of {dim} floats")
        fill(ps, table, rows)
        grown = rss_bytes(server.pid) - before
    data = 2 * 4 * dim
    return {
        "rows": rows,
        "dim": dim,
        "row_and_slots_bytes": data,
        "bytes_per_row": grown / rows,
        "allowed_bytes_per_row": 1.3 * data + 32,
    }


def startup(*, times: int = 5, progress: Callable[[str], None] = lambda text: None) -> dict[str, object]:
    """Seconds from starting a server process to its being registered, kernels warm."""
    seconds = []
    with LocalCluster(servers=1, replicas=1) as cluster:
        for number in range(times):
            progress(f"start {number + 1} of {times}")
            started = time.perf_counter()
            cluster.start_server(f"extra{number}")
            seconds.append(time.perf_counter() - started)
    return {"ready_s": sorted(seconds)[times // 2], "all_s": seconds}
