"""The metrics of a worker, for training scripts that want to be scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from coordinator.core.view import View, WorkerInfo

if TYPE_CHECKING:
    from elasticps.client.cache_batches import CacheUse


class MeasuredClient(Protocol):
    """The attributes of a client that metrics read."""

    app: str
    worker: WorkerInfo

    @property
    def cluster(self) -> str: ...
    @property
    def view(self) -> View: ...
    def caches(self) -> Mapping[str, CacheUse]: ...
    @property
    def clock(self) -> int: ...
    @property
    def committed(self) -> int: ...


class ClientMetrics(Collector):
    """Clocks and epoch of a client, read when scraped. Register it in a registry of your own, or use `serve_client`."""

    def __init__(self, ps: MeasuredClient) -> None:
        self._ps = ps

    def collect(self) -> Iterator[Metric]:
        """The families."""
        ps = self._ps
        committed, clock = ps.committed, ps.clock  # in this order: the difference is never negative
        info = GaugeMetricFamily(
            "elasticps_worker_info", "1, with what the worker is.", labels=["cluster", "app", "worker", "incarnation"]
        )
        info.add_metric([ps.cluster, ps.app, ps.worker.name, str(ps.worker.incarnation)], 1)
        yield info
        yield CounterMetricFamily("elasticps_worker_steps", "Steps pushed: the worker's clock.", value=clock)
        yield CounterMetricFamily("elasticps_worker_committed_steps", "Steps committed.", value=committed)
        yield GaugeMetricFamily(
            "elasticps_worker_outstanding_steps", "Steps pushed and not committed.", value=clock - committed
        )
        yield GaugeMetricFamily("elasticps_worker_epoch", "The newest view that it knows.", value=ps.view.epoch)
        yield from _of_caches(ps.caches())


def _of_caches(caches: Mapping[str, CacheUse]) -> Iterator[Metric]:
    rows = GaugeMetricFamily("elasticps_worker_cache_rows", "Rows of a table that are kept.", labels=["table"])
    pulls = CounterMetricFamily(
        "elasticps_worker_cache_pulls",
        "Rows that pulls wanted: hit, shown without asking; unchanged, as a server said; pulled.",
        labels=["table", "outcome"],
    )
    oldest = GaugeMetricFamily(
        "elasticps_worker_cache_oldest_steps", "The greatest age of a row that was shown without asking.",
        labels=["table"],
    )  # fmt: skip
    received = CounterMetricFamily(
        "elasticps_worker_cache_bytes", "Received of rows, slots and digests; whole: without a cache.",
        labels=["table", "kind"],
    )  # fmt: skip
    for table, use in caches.items():
        rows.add_metric([table], use.rows)
        oldest.add_metric([table], use.oldest)
        pulled = use.asked - use.hits - use.unchanged
        for outcome, count in (("hit", use.hits), ("unchanged", use.unchanged), ("pulled", pulled)):
            pulls.add_metric([table, outcome], count)
        for kind, count in (("received", use.nbytes), ("whole", use.whole_bytes)):
            received.add_metric([table, kind], count)
    yield from (rows, pulls, oldest, received)


def serve_client(ps: MeasuredClient, port: int, host: str = "127.0.0.1") -> Callable[[], None]:
    """Serves the metrics of a client, as `eps.connect` returns it, on http://host:port/metrics from a thread.

    Returns a function that ends it. Raises OSError when the port cannot be had.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(ClientMetrics(ps))
    server, thread = start_http_server(port, addr=host, registry=registry)

    def close() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return close
