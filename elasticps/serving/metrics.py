"""Prometheus metrics of a reader's process, and its health: whether what it shows is new enough."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from elasticps.serving.service import ServedReader


class ReaderMetrics(Collector):
    """What a reader has and does, read when it is scraped. Register it in a registry of your own, too."""

    def __init__(self, reader: ServedReader, name: str = "") -> None:
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
        yield GaugeMetricFamily("elasticps_reader_rows", "Rows that are here.", value=stats.rows)
        yield GaugeMetricFamily("elasticps_reader_bytes", "Memory that they take.", value=stats.bytes)
        yield GaugeMetricFamily("elasticps_reader_epoch", "The view that it follows.", value=max(as_of.epoch, 0))
        yield GaugeMetricFamily(
            "elasticps_reader_pinned", "1 while it shows a checkpoint, and not what is trained.",
            value=bool(reader.pinned),
        )  # fmt: skip
        for name, text, value in (
            ("pulls", "Calls that read rows.", stats.pulls),
            ("pulled_rows", "Rows that they read.", stats.pulled),
            ("windows", "Windows of changes applied.", stats.windows),
            ("window_bytes", "Bytes of these.", stats.window_bytes),
            ("changed_rows", "Rows changed or deleted by them, as often as they were.", stats.changed),
            ("filled_rows", "Rows that came because a range was read again.", stats.filled),
            ("fills", "Ranges that were read again.", stats.fills),
        ):
            yield CounterMetricFamily(f"elasticps_reader_{name}", text, value=value)
