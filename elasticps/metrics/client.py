"""The metrics of a worker, for training scripts that want to be scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from coordinator.view import View, WorkerInfo


class Subject(Protocol):
    """What is read of a client."""

    app: str
    worker: WorkerInfo

    @property
    def cluster(self) -> str: ...
    @property
    def view(self) -> View: ...
    @property
    def clock(self) -> int: ...
    @property
    def committed(self) -> int: ...


class ClientMetrics(Collector):
    """Clocks and epoch of a client, read when scraped. Register it in a registry of your own, or use `serve_client`."""

    def __init__(self, ps: Subject) -> None:
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


def serve_client(ps: Subject, port: int, host: str = "127.0.0.1") -> Callable[[], None]:
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
