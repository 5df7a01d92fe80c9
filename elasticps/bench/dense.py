"""Dense tensors through the whole path, with SGD at the server."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from elasticps.bench.limits import memcpy_gb_per_s, socket_pair
from elasticps.bench.measure import Result, Setting, measure
from elasticps.client import connect
from elasticps.local import LocalCluster
from elasticps.spec import SGD

SIZES_MB = (1, 16, 64)


def run(
    *,
    sizes_mb: Sequence[int] = SIZES_MB,
    servers: int = 1,
    replicas: int = 1,
    seconds: float = 4.0,
    progress: Callable[[str], None] = lambda text: None,
) -> Iterator[Result]:
    """Yields a result for pull (into the caller's array), push, and push-lent (`copy=False`) by size of the tensor."""
    progress("starting a cluster")
    with LocalCluster(servers=servers, replicas=replicas) as cluster, socket_pair() as pair:
        with connect(cluster.url, worker="bench", timeout=120.0) as ps:
            setting = Setting(servers, replicas, 1, memcpy_gb_per_s(), seconds)
            for size in sizes_mb:
                progress(f"{size} MB")
                floats = size * 250_000
                values = np.full(floats, 0.5, np.float32)
                tensor = ps.tensor(f"dense-{size}", init=values, optimizer=SGD(lr=0.01))
                out, data = np.empty_like(values), values.nbytes
                common = {"setting": setting, "batch": 1, "dim": floats}
                yield measure("pull", lambda: tensor.pull(out=out), pair, request=0, response=data, **common)  # noqa: B023
                for op, copy in (("push", True), ("push-lent", False)):
                    def push(copy: bool = copy) -> None:
                        ps.push({tensor: values}, copy=copy).result()  # noqa: B023

                    yield measure(op, push, pair, request=data, response=0, **common)
