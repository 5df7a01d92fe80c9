"""The metrics of a reader: how old what it shows is, what it has, and what it does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from elasticps.readers.values import AsOf, ReaderSpec, ReaderStats


class MeasuredReader(Protocol):
    """The attributes of a reader that metrics read."""

    spec: ReaderSpec

    @property
    def cluster(self) -> str: ...
    @property
    def as_of(self) -> AsOf: ...
    @property
    def pinned(self) -> str: ...
    def stats(self) -> ReaderStats: ...


class ReaderMetrics(Collector):
    """What a reader has and does, read when it is scraped. Register it in a registry of your own."""

    def __init__(self, reader: MeasuredReader, name: str = "") -> None:
        self._reader = reader
        self._name = name

    def collect(self) -> Iterator[Metric]:
        """The families."""
        reader = self._reader
        stats, as_of = reader.stats(), reader.as_of
        info = GaugeMetricFamily(
            "elasticps_reader_info", "1, with what the reader is.", labels=["cluster", "app", "reader"]
        )
        info.add_metric([reader.cluster, reader.spec.application, self._name], 1)
        yield info
        yield GaugeMetricFamily(
            "elasticps_reader_age_seconds", "Age of the oldest range's newest state here.", value=stats.age_s
        )
        ages = GaugeMetricFamily(
            "elasticps_reader_window_age_seconds",
            "From a window's making at its server to its being readable here, of the last thousand.",
            labels=["quantile"],
        )
        for quantile, age_s in zip(("0.5", "0.99"), stats.ages_s, strict=True):
            ages.add_metric([quantile], age_s)
        yield ages
        pinned = bool(reader.pinned)
        yield GaugeMetricFamily("elasticps_reader_rows", "Rows that are here.", value=stats.rows)
        yield GaugeMetricFamily("elasticps_reader_bytes", "Memory that they take.", value=stats.bytes)
        yield GaugeMetricFamily("elasticps_reader_epoch", "The view that it follows.", value=max(as_of.epoch, 0))
        yield GaugeMetricFamily("elasticps_reader_pinned", "1 while it shows a checkpoint.", value=pinned)
        yield CounterMetricFamily("elasticps_reader_pulls", "Calls that read rows.", value=stats.pulls)
        yield CounterMetricFamily("elasticps_reader_pulled_rows", "Rows that they read.", value=stats.pulled)
        yield CounterMetricFamily("elasticps_reader_windows", "Windows of changes applied.", value=stats.windows)
        yield CounterMetricFamily("elasticps_reader_window_bytes", "Bytes of these.", value=stats.window_bytes)
        yield CounterMetricFamily("elasticps_reader_changed_rows", "Rows that these changed.", value=stats.changed)
        yield CounterMetricFamily("elasticps_reader_filled_rows", "Rows of ranges read again.", value=stats.filled)
        yield CounterMetricFamily("elasticps_reader_fills", "Ranges that were read again.", value=stats.fills)
