"""Processes of a run: what is to run, and what is not."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from chaos.live.network import Loopback
from chaos.live.stage import MARK, Processes

Eventually = Callable[[Callable[[], bool]], None]


@pytest.fixture
def stage() -> Iterator[Processes]:
    stage = Processes(Loopback())
    yield stage
    assert stage.close() == []


def test_a_killed_process_stays_dead_even_if_paused_at_the_same_moment(stage: Processes) -> None:
    """It was started at once, and the faults waited for its death until the end of the run."""
    stage.add_worker("w", lambda: [sys.executable, "-I", "-S", "-c", "import time; time.sleep(60)"], says_ready=False)
    stage.kill("w")
    stage.pause("w")
    wait_for_the_end(stage, "w")
    stage._jobs["w"].since = 0.0  # it may be started again, if it were to run
    assert stage.poll() == []
    assert not stage.running("w")
    stage.resume("w")
    assert stage.poll() == []
    assert not stage.running("w")


def ending(stage: Processes, name: str, role: str, code: int, *, ready: bool = True) -> None:
    """Adds a process of that role that says it is ready and ends, and waits for its end."""
    script = f"{ready} and print('{{\"ready\": true}}', flush=True); raise SystemExit({code})"
    stage._add(name, role, lambda: [sys.executable, "-I", "-S", "-c", script], {})
    stage.start(name)
    wait_for_the_end(stage, name)


def wait_for_the_end(stage: Processes, name: str) -> None:
    deadline = time.monotonic() + 60
    while stage.running(name) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not stage.running(name)


def test_a_process_that_ends_by_itself_is_reported_once_and_restarted_by_poll(stage: Processes) -> None:
    ending(stage, "s0", "server", 3)
    job = stage._jobs["s0"]
    job.since, first = 0.0, job.process
    assert stage.ended() == [("s0", "server s0 ended with exit code 3")]
    assert stage.ended() == []
    assert job.process is first
    assert stage.poll() == []
    assert job.process is not first
    wait_for_the_end(stage, "s0")


@pytest.mark.parametrize("role", ["hoard", "hostile"])
def test_a_helper_process_that_has_worked_is_not_restarted(stage: Processes, role: str) -> None:
    """A hoard would take rows for its own to which the one before it had added, a hostile peer go on after its time."""
    ending(stage, "it", role, 1)
    job = stage._jobs["it"]
    job.since, first = 0.0, job.process
    assert stage.poll() == [("it", f"{role} it ended with exit code 1")]
    assert stage.poll() == []
    assert job.process is first
    assert stage.worked("it")


def test_a_helper_process_that_was_never_ready_is_restarted(stage: Processes) -> None:
    ending(stage, "it", "hostile", 1, ready=False)
    job = stage._jobs["it"]
    job.since, first = 0.0, job.process
    assert stage.poll() == []
    assert job.process is not first
    wait_for_the_end(stage, "it")
    assert not stage.worked("it")


def test_a_helper_process_that_was_ready_once_counts_as_having_worked(stage: Processes) -> None:
    ending(stage, "it", "hostile", 0)
    stage._jobs["it"].command = lambda: [sys.executable, "-I", "-S", "-c", ""]
    stage.start("it")
    wait_for_the_end(stage, "it")
    assert stage.worked("it")


def test_a_worker_that_finishes_during_a_poll_is_not_restarted(
    stage: Processes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A second life added its rows once more, and took the sums for pushes that counted twice (seed 124)."""
    waits = "import pathlib, sys, time\nwhile not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.01)"
    done = tmp_path / "done"
    stage.add_worker("w", lambda: [sys.executable, "-I", "-S", "-c", waits, str(done)], says_ready=False)
    stage._jobs["w"].since = 0.0  # it may be started again, if it were to run
    looked = stage.ended

    def look() -> list[tuple[str, str]]:
        found = looked()
        done.touch()
        wait_for_the_end(stage, "w")
        return found

    monkeypatch.setattr(stage, "ended", look)
    assert stage.poll() == []
    assert not stage.running("w")
    assert stage.poll() == []
    assert not stage.running("w")


def test_a_process_that_outlives_the_run_is_reported() -> None:
    stage = Processes(Loopback())
    command = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"]
    with subprocess.Popen(command, env={MARK: str(stage.folder)}) as left:
        try:
            (text,) = stage.close()
        finally:
            left.kill()
    assert text == f"process {left.pid} of the run was left: {' '.join(command)}"


def test_all_processes_end_even_if_logs_cannot_be_kept(tmp_path: Path) -> None:
    """The network and the folder of the run were left behind."""
    stage = Processes(Loopback())
    ending(stage, "it", "server", 0)
    (tmp_path / "file").touch()
    (text,) = stage.close(tmp_path / "file" / "logs")
    assert "file/logs: Not a directory" in text
    assert not stage.folder.exists()


def test_the_memory_of_a_process_is_measured(stage: Processes, eventually: Eventually) -> None:
    stage.add_worker("w", lambda: [sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"], says_ready=False)
    eventually(lambda: stage.memory_used("w") > 1 << 20)
    assert stage.late(["w"]) == []
    stage.kill("w")
    wait_for_the_end(stage, "w")
    assert stage.memory_used("w") == 0
