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


def ending(stage: Processes, name: str, role: str, code: int) -> None:
    """Adds a process of that role that says it is ready and ends, and waits for its end."""
    script = f"print('{{\"ready\": true}}', flush=True); raise SystemExit({code})"
    stage._add(name, role, lambda: [sys.executable, "-I", "-S", "-c", script], {})
    stage.start(name)
    wait_for_the_end(stage, name)


def wait_for_the_end(stage: Processes, name: str) -> None:
    deadline = time.monotonic() + 60
    while stage.running(name) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not stage.running(name)


def test_who_ends_by_itself_is_told_once_and_started_again_only_by_who_looks_after_it(stage: Processes) -> None:
    ending(stage, "s0", "server", 3)
    job = stage._jobs["s0"]
    job.since, first = 0.0, job.process
    assert stage.ended() == [("s0", "server s0 ended with exit code 3")]
    assert stage.ended() == []
    assert job.process is first
    assert stage.poll() == []
    assert job.process is not first
    wait_for_the_end(stage, "s0")


def test_a_hoard_that_has_ended_is_not_started_again(stage: Processes) -> None:
    """It would take rows for its own to which the one before it had added."""
    ending(stage, "hoard1", "hoard", 1)
    job = stage._jobs["hoard1"]
    job.since, first = 0.0, job.process
    assert stage.poll() == [("hoard1", "hoard hoard1 ended with exit code 1")]
    assert stage.poll() == []
    assert job.process is first
