"""What serving the page takes, known without importing it."""

from __future__ import annotations

from importlib.util import find_spec

from elasticps.errors import ConfigError

PORT = 8321


def check_installed() -> None:
    """ConfigError if what serves the page is not there."""
    if missing := [package for package in ("starlette", "uvicorn") if find_spec(package) is None]:
        raise ConfigError(f"the dashboard needs {' and '.join(missing)}: pip install 'elasticps[dashboard]'")
