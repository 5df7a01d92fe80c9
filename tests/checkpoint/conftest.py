"""A cluster of fake servers for tests that make checkpoints."""

from __future__ import annotations

import pytest

from elasticps.checkpoint import create, cuts
from tests.checkpoint.fake_servers import Scene


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    monkeypatch.setattr("elasticps.checkpoint.storage._memory", {})
    monkeypatch.setattr(create, "_PAUSE_S", 0.001)
    monkeypatch.setattr(create, "_SILENT_S", 0.05)
    monkeypatch.setattr(cuts, "_POLL_S", 0.001)
    return Scene()
