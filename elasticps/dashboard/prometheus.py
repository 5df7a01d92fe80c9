"""Asks Prometheus for the hour before the dashboard began."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from contextlib import suppress

from elasticps.dashboard.core.past import PastSamples, add_answer, questions
from elasticps.errors import ConfigError, Error

PAST_S = 3600
STEP_S = 15
TIMEOUT_S = 10.0
MOST_BYTES = 8 << 20  # of one answer: 256 servers in an hour are 1.5 MB


def read_past(prometheus: str, cluster: str, now: float) -> PastSamples:
    """Reads the hour before `now` (Unix time) of a cluster from the Prometheus at a URL. Blocks. Raises Error where no
    usable answer comes."""
    past = PastSamples()
    for (column, each), query in questions(cluster).items():
        parameters = {"query": query, "start": f"{now - PAST_S:.3f}", "end": f"{now:.3f}", "step": str(STEP_S)}
        url = f"{prometheus.rstrip('/')}/api/v1/query_range"
        try:
            with urllib.request.urlopen(url, urllib.parse.urlencode(parameters).encode(), timeout=TIMEOUT_S) as answer:
                body = answer.read(MOST_BYTES + 1)
            if len(body) > MOST_BYTES:
                raise ValueError(f"more than {MOST_BYTES:,} bytes")
            add_answer(past, column, each, json.loads(body))
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
