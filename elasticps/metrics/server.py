"""The metrics of a server process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from coordinator.sessions import ServerSession
from elasticps.metrics.exposition import Scrape
from elasticps.metrics.timing import Histogram, Meter, TimedServer
from elasticps.server.options import ServerOptions
from elasticps.server.server import Server
from elasticps.store.eviction import Reason

MAX_WORKERS = 500  # workers shown by name; of all together the clocks of the first and the last


class ServerMetrics(Collector):
    """Reads a process's present `Server` when it is scraped."""

    def __init__(self) -> None:
        self.meter = Meter()
        self._session: ServerSession | None = None
        self._server: Server | None = None
        self._scrape: Scrape | None = None

    async def start(self, host: str, port: int) -> None:
        """Serves /metrics. Raises ConfigError when the port cannot be had."""
        self._scrape = await Scrape.start(host, port, [self])
        self._scrape.ready = False

    def set_serving(self, serving: bool) -> None:
        """Sets what `/readyz` answers."""
        if self._scrape is not None:
            self._scrape.ready = serving

    async def close(self) -> None:
        """Closes the port."""
        if self._scrape is not None:
            await self._scrape.close()

    def build(
        self,
        session: ServerSession,
        cluster: str,
        ranges: int,
        loop: asyncio.AbstractEventLoop,
        options: ServerOptions,
    ) -> Server:
        """Builds a measured server, and shows it from now on."""
        self._session = session
        self._server = TimedServer(self.meter, session.info, cluster, ranges, loop, options)
        return self._server

    def collect(self) -> Iterator[Metric]:
        """The families; those of the server once there is one."""
        if self._server is not None and self._session is not None:
            status = self._server.admin.status()
            yield from _identity(self._server, self._session)
            yield from _content(self._server, status)
            yield from _lifecycles(self._server)
            yield from _traffic(self._server, status)
            yield from _workers(self._server)
        yield from self._latencies()

    def _latencies(self) -> Iterator[Metric]:
        family = CounterMetricFamily(
            "elasticps_server_received_bytes", "Bodies of frames received, by kind.", labels=["kind"]
        )
        for kind, nbytes in self.meter.received_bytes.items():
            family.add_metric([kind], nbytes)
        yield family
        yield CounterMetricFamily(
            "elasticps_server_busy_seconds",
            "Time that the event loop was busy with frames, estimated from those sampled; its rate is the load.",
            value=self.meter.busy_s,
        )
        yield _histograms(
            "elasticps_server_handling_seconds", "Time that a frame kept the loop busy (sampled).", self.meter.handling
        )
        yield _histograms(
            "elasticps_server_request_seconds",
            "Time from a request's arrival until its answer was handed to the socket (sampled).",
            self.meter.waiting,
        )


def _identity(server: Server, session: ServerSession) -> Iterator[Metric]:
    me = server.me
    info = GaugeMetricFamily(
        "elasticps_server_info", "1, with what the server is.", labels=["cluster", "server", "incarnation", "zone"]
    )
    info.add_metric([server.cluster, me.name, str(me.incarnation), me.zone], 1)
    yield info
    yield _gauge("epoch", "The view that it acts under.", server.serving.epoch)
    left = session.deadline - asyncio.get_running_loop().time()
    yield _gauge("lease_seconds", "Until its lease ends unless renewed; below 0: etcd does not answer.", left)
    yield _gauge("unreachable_peers", "Neighbours in chains that it has no link to.", len(server.links.suspects()))


def _content(server: Server, status: dict[str, Any]) -> Iterator[Metric]:
    ranges = GaugeMetricFamily("elasticps_server_ranges", "Ranges, by its role in their chains.", labels=["role"])
    ranges.add_metric(["head"], status["ranges_headed"])
    ranges.add_metric(["held"], status["ranges_held"])
    ranges.add_metric(["joining"], status["ranges_joining"])
    yield ranges
    yield _gauge("rows", "Rows in all tables.", status["rows"])
    yield _gauge("tables", "Tables.", status["tables"])
    yield _gauge("store_bytes", "Memory mapped for tables.", status["bytes"])
    yield _gauge("memory_used_bytes", "Its own memory, without what dropped rows have left.", status["memory_used"])
    yield _gauge("memory_mark_bytes", "Above that pushes may add no rows; 0: no limit.", status["memory_mark"])
    yield _gauge("memory_limit_bytes", "What it may use; 0: no limit.", status["memory_limit"])
    yield _gauge("aside_bytes", "Rows kept as a checkpoint needs them.", server.checkpoints.aside_bytes)
    yield CounterMetricFamily(
        "elasticps_server_checkpoint_bytes", "Written for checkpoints.", value=server.checkpoints.written_bytes
    )
    yield CounterMetricFamily(
        "elasticps_server_checkpoint_waited_seconds",
        "Time that pushes waited because too many rows were kept as a checkpoint needs them.",
        value=server.checkpoints.waited_s,
    )
    yield _gauge("log_bytes", "Operations not acknowledged by their tails yet.", status["log_bytes"])
    yield _gauge("log_operations", "The same, counted.", len(server.replica.log))


def _lifecycles(server: Server) -> Iterator[Metric]:
    """What becomes of keys and rows of tables with policies, as head or follower, and how sweeps go."""
    found = [table.lifecycle.total() for table in server.store.live.values() if table.lifecycle is not None]
    yield _gauge("candidates", "Keys that wait for a row.", sum(each["candidates"] for each in found))
    yield _counter("admitted_keys", "Keys given a row by a policy.", sum(each["admitted"] for each in found))
    evicted = CounterMetricFamily(
        "elasticps_server_evicted_rows", "Rows, and keys that waited for one, forgotten, by reason.", labels=["reason"]
    )
    for reason in Reason:
        name = reason.name.lower()
        evicted.add_metric([name], sum(each["evicted"][name] for each in found))
    yield evicted
    yield _counter("swept_rows", "Rows that sweeps have looked at.", server.sweeper.swept_rows)
    yield _gauge("longest_look_seconds", "Longest time that one look of a sweep took.", server.sweeper.slowest_s)
    yield _gauge("clock_skew_seconds", "Its clock, ahead of the median of all.", server.sweeper.skew_s)
    yield _gauge(
        "cluster_time_ahead_seconds", "Time of a range headed, ahead of the median of clocks.", server.sweeper.lead_s
    )


def _traffic(server: Server, status: dict[str, Any]) -> Iterator[Metric]:
    operations = CounterMetricFamily("elasticps_server_operations", "Frames of workers, by kind.", labels=["kind"])
    operations.add_metric(["push"], status["pushes"])
    operations.add_metric(["pull"], status["pulls"])
    yield operations
    rows = CounterMetricFamily("elasticps_server_rows", "Rows that workers pushed and pulled.", labels=["kind"])
    rows.add_metric(["push"], status["rows_pushed"])
    rows.add_metric(["pull"], status["rows_pulled"])
    yield rows
    refused = CounterMetricFamily(
        "elasticps_server_refused",
        "Frames answered with an error, by kind of frame and code of the error.",
        labels=["kind", "code"],
    )
    for (kind, code), count in server.notifier.errors.counts.items():
        refused.add_metric([kind, code], count)
    yield refused
    yield _counter("applied_operations", "Operations applied, as head or follower.", server.executor.applied)
    yield _counter("applied_rows", "Rows updated, as head or follower.", server.executor.rows_applied)
    yield _counter("fill_sent_bytes", "Rows sent to replicas that joined.", status["sent_bytes"])
    yield _gauge("parked_pulls", "Pulls that wait for other workers.", status["parked"])
    yield _gauge("connections", "Open connections.", status["connections"])


def _workers(server: Server) -> Iterator[Metric]:
    """How far the workers are whose home range is headed here. Each server knows some workers of an application, so how
    far one is behind the first is a question to all of them."""
    clock = GaugeMetricFamily(
        "elasticps_server_worker_clock", "Steps applied in its home range.", labels=["worker", "app"]
    )
    least = GaugeMetricFamily(
        "elasticps_server_worker_clock_min", "Of the last worker with its home here.", labels=["app"]
    )
    most = GaugeMetricFamily(
        "elasticps_server_worker_clock_max", "Of the first worker with its home here.", labels=["app"]
    )
    apps: dict[str, dict[str, int]] = {}
    for number, at in server.admin.clocks().items():
        worker = server.serving.workers[number]
        apps.setdefault(worker.app, {})[worker.name] = at
    for app, found in apps.items():
        least.add_metric([app], min(found.values()))
        most.add_metric([app], max(found.values()))
        for name, at in list(found.items())[:MAX_WORKERS]:
            clock.add_metric([name, app], at)
    yield from (clock, least, most)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"elasticps_server_{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"elasticps_server_{name}", text, value=value)


def _histograms(name: str, text: str, by_kind: dict[str, Histogram]) -> Metric:
    family = HistogramMetricFamily(name, text, labels=["kind"])
    for kind, histogram in by_kind.items():
        family.add_metric([kind], histogram.cumulative(), histogram.total)
    return family
