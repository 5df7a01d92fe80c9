"""Dense tensors through the whole path, with SGD at the server."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from benchmarks.limits import memcpy_gb_per_s, socket_pair
from benchmarks.measure import Bench, SpeedLine
from elasticps.client import Client, connect
from elasticps.local import LocalCluster
from elasticps.model.spec import SGD

SIZES_MB = (1, 16, 64)


def run(
    *,
    sizes_mb: Sequence[int] = SIZES_MB,
    servers: int = 1,
    replicas: int = 1,
    seconds: float = 4.0,
    progress: Callable[[str], None] = lambda text: None,
) -> Iterator[SpeedLine]:
    """Yields a result for pull (into the caller's array), push, and push-lent (`copy=False`) by size of the tensor."""
    progress("starting a cluster")
    with (
        LocalCluster(servers=servers, replicas=replicas) as cluster,
        socket_pair() as pair,
        connect(cluster.url, worker="bench", timeout=120.0) as ps,
    ):
        bench = Bench(pair, servers, replicas, 1, memcpy_gb_per_s(), seconds)
        for size in sizes_mb:
            progress(f"{size} MB")
            yield from _size(bench, ps, size)


def _size(bench: Bench, ps: Client, size_mb: int) -> Iterator[SpeedLine]:
    values = np.full(size_mb * 250_000, 0.5, np.float32)
    tensor = ps.tensor(f"dense-{size_mb}", init=values, optimizer=SGD(lr=0.01))
    out = np.empty_like(values)

    def push(copy: bool) -> None:
        ps.push({tensor: values}, copy=copy).result()

    size, data = values.size, values.nbytes
    yield bench.measure("pull", lambda: tensor.pull(out=out), batch=1, dim=size, request=0, response=data)
    yield bench.measure("push", lambda: push(True), batch=1, dim=size, request=data, response=0)
    yield bench.measure("push-lent", lambda: push(False), batch=1, dim=size, request=data, response=0)
