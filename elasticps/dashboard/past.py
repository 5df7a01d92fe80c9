"""The hour before the dashboard began, as Prometheus has it: what to ask, and samples out of its answers. Pure, but for
`read_past`, which asks.

Source of the questions' form: Prometheus' HTTP API, `/api/v1/query_range`, whose answers are matrices.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from elasticps.dashboard.samples import Sample
from elasticps.errors import ConfigError, Error

PAST_S = 3600
STEP_S = 15
TIMEOUT_S = 10.0
MOST_BYTES = 8 << 20  # of one answer: 256 servers in an hour are 1.5 MB

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
class Past:
    """By time: a sample of everything together; and by server and time, of each."""

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
    found["lag", False] = f"max (elasticps_server_worker_lag_max * {info})"
    return found


def note(past: Past, column: str, each: bool, answer: Mapping[str, Any]) -> None:
    """Adds the answer to one question. ValueError, KeyError or TypeError if it is none; NaN is nothing."""
    if answer["status"] != "success" or answer["data"]["resultType"] != "matrix":
        raise ValueError("this is no matrix of values")
    for series in answer["data"]["result"]:
        into = past.servers.setdefault(str(series["metric"]["server"]), {}) if each else past.cluster
        for time, text in series["values"]:
            value = float(text)
            if abs(value) != float("inf") and value == value:
                into.setdefault(float(time), {})[column] = value


def read_past(prometheus: str, cluster: str, now: float) -> Past:
    """Of a cluster, at `now` in Unix time, from Prometheus at that URL. Blocks. Raises Error if it does not tell."""
    past = Past()
    for (column, each), query in questions(cluster).items():
        asked = {"query": query, "start": f"{now - PAST_S:.3f}", "end": f"{now:.3f}", "step": str(STEP_S)}
        url = f"{prometheus.rstrip('/')}/api/v1/query_range"
        try:
            with urllib.request.urlopen(url, urllib.parse.urlencode(asked).encode(), timeout=TIMEOUT_S) as answer:
                body = answer.read(MOST_BYTES + 1)
            if len(body) > MOST_BYTES:
                raise ValueError(f"more than {MOST_BYTES:,} bytes")
            note(past, column, each, json.loads(body))
        except urllib.error.HTTPError as error:
            with error:
                raise Error(f"Prometheus at {prometheus} refused a question: {error.code} {error.reason}") from None
        except OSError as error:
            raise Error(f"Prometheus at {prometheus} cannot be asked: {getattr(error, 'reason', error)}") from None
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise Error(f"what answers at {prometheus} is no Prometheus: {error}") from None
    return past


def check_prometheus(url: str) -> str:
    """The URL, "" for none. ConfigError if Prometheus cannot be there."""
    with suppress(ValueError):  # of brackets that do not close
        if not url or (url.startswith(("http://", "https://")) and urllib.parse.urlsplit(url).hostname):
            return url
    raise ConfigError(f"{url!r} is no URL of Prometheus: write for example http://127.0.0.1:9090")
