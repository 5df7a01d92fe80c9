"""A web page that shows a cluster live: `elasticps dashboard`, `elasticps up --dashboard`.

store, servers ──poller──▶ events ──core──▶ snapshot and updates ──fanout──▶ viewers, each over server-sent events

There is one poller, whatever the number of viewers: no server does anything for a viewer. This file imports nothing of
what serves the page, so that commands know quickly whether that is installed.
"""

from __future__ import annotations

from importlib.util import find_spec

from elasticps.errors import ConfigError

PORT = 8321


def check_installed() -> None:
    """Raises ConfigError where the packages that serve the page are not installed."""
    if missing := [package for package in ("starlette", "uvicorn") if find_spec(package) is None]:
        raise ConfigError(f"the dashboard needs {' and '.join(missing)}: pip install 'elasticps[dashboard]'")
