"""The samples of the hour before the dashboard began, out of Prometheus' answers; and the questions to ask. Pure.

Source of the questions' form: Prometheus' HTTP API, `/api/v1/query_range`, whose answers are matrices.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from elasticps.dashboard.core.samples import Sample

_COUNTED = {
    "push_s": 'elasticps_server_operations_total{kind="push"}',
    "pull_s": 'elasticps_server_operations_total{kind="pull"}',
    "rows_pushed_s": 'elasticps_server_rows_total{kind="push"}',
    "rows_pulled_s": 'elasticps_server_rows_total{kind="pull"}',
    "refused_s": "elasticps_server_refused_total",
    "sent_s": "elasticps_server_fill_sent_bytes_total",
    "received_s": "elasticps_server_received_bytes_total",
    "busy": "elasticps_server_busy_seconds_total",
}
_MEASURED = {
    "parked": "elasticps_server_parked_pulls",
    "log_bytes": "elasticps_server_log_bytes",
    "rows": "elasticps_server_rows",
    "bytes": "elasticps_server_store_bytes",
    "memory_used": "elasticps_server_memory_used_bytes",
    "memory_mark": "elasticps_server_memory_mark_bytes",
    "memory_limit": "elasticps_server_memory_limit_bytes",
    "connections": "elasticps_server_connections",
}
_SHARES = {"p50": 0.5, "p99": 0.99}


@dataclass
class PastSamples:
    """Samples from before the dashboard began. cluster: of all servers together, by time; servers: by name and time."""

    cluster: dict[float, Sample] = field(default_factory=dict)
    servers: dict[str, dict[float, Sample]] = field(default_factory=dict)


def questions(cluster: str) -> dict[tuple[str, bool], str]:
    """PromQL by column, and whether it is asked for each server (True) or for all together."""
    info = f"on (instance) group_left (server) elasticps_server_info{{cluster={json.dumps(cluster)}}}"
    found: dict[tuple[str, bool], str] = {}
    values = {column: f"rate({counter}[1m])" for column, counter in _COUNTED.items()} | _MEASURED
    for column, value in values.items():
        found[column, True] = f"sum by (server) ({value} * {info})"
        found[column, False] = f"sum ({value} * {info})"
    for kind in ("push", "pull"):
        buckets = f'rate(elasticps_server_request_seconds_bucket{{kind="{kind}"}}[1m]) * {info}'
        for name, share in _SHARES.items():
            found[f"{kind}_{name}", True] = f"histogram_quantile({share}, sum by (server, le) ({buckets}))"
            found[f"{kind}_{name}", False] = f"histogram_quantile({share}, sum by (le) ({buckets}))"
    first, last = (f"{of} by (app) (elasticps_server_worker_clock_{of} * {info})" for of in ("max", "min"))
    found["lag", False] = f"max ({first} - {last})"
    return found


def add_answer(past: PastSamples, column: str, each: bool, answer: Mapping[str, Any]) -> None:
    """Adds the answer to one question. ValueError, KeyError or TypeError for a malformed one; NaN and infinity are left
    out."""
    if answer["status"] != "success" or answer["data"]["resultType"] != "matrix":
        raise ValueError("this is no matrix of values")
    for series in answer["data"]["result"]:
        into = past.servers.setdefault(str(series["metric"]["server"]), {}) if each else past.cluster
        for time, text in series["values"]:
            value = float(text)
            if abs(value) != float("inf") and value == value:
                into.setdefault(float(time), {})[column] = value
