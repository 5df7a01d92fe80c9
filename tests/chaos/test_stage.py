"""Processes of a run: what is to run, and what is not."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import pytest

from chaos.live.network import Loopback
from chaos.live.stage import Processes


@pytest.fixture
def stage() -> Iterator[Processes]:
    stage = Processes(Loopback())
    yield stage
    assert stage.close() == []


def test_who_was_killed_and_is_paused_at_the_same_moment_stays_dead_until_its_time(stage: Processes) -> None:
    """It was started at once, and the faults waited for its death until the end of the run."""
    stage.add_worker("w", lambda: [sys.executable, "-I", "-S", "-c", "import time; time.sleep(60)"], says_ready=False)
    stage.kill("w")
    stage.pause("w")
    deadline = time.monotonic() + 60
    while stage.running("w") and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not stage.running("w")
    stage._jobs["w"].since = 0.0  # it may be started again, if it were to run
    assert stage.poll() == []
    assert not stage.running("w")
    stage.resume("w")
    assert stage.poll() == []
    assert not stage.running("w")
