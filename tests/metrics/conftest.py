from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.metrics.fleet import Fleet


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    """A factory of coordinators and servers; they end with the test."""
    found = Fleet(tmp_path)
    try:
        yield found
    finally:
        found.stop()
