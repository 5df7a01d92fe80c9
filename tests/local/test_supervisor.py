from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from elasticps.local import state, supervisor

SLEEP = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(60)"]


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 40
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def moment(process: subprocess.Popen[bytes]) -> str:
    began = supervisor.started_at(process.pid)
    assert began is not None
    return began


def test_a_process_is_identified_by_its_id_and_start_time() -> None:
    with subprocess.Popen(SLEEP) as process:
        began = moment(process)
        assert supervisor.is_running(process.pid, began)
        assert not supervisor.is_running(process.pid, began + "0")
        assert supervisor.started_at(os.getpid()) != began
        process.kill()
        assert eventually(lambda: supervisor.started_at(process.pid) is None)  # a zombie does not run


def test_a_signal_never_reaches_another_process_of_the_same_id() -> None:
    with subprocess.Popen(SLEEP) as process:
        began = moment(process)
        assert not supervisor.send(process.pid, began + "0", signal.SIGKILL)
        assert process.poll() is None
        assert supervisor.send(process.pid, began, signal.SIGKILL)
        process.wait()
        assert not supervisor.send(process.pid, began, signal.SIGKILL)


def test_a_process_that_ignores_the_request_to_end_is_killed() -> None:
    def start(handler: str) -> subprocess.Popen[bytes]:
        code = f"import signal, time; signal.signal(signal.SIGINT, signal.{handler}); print(flush=True); time.sleep(60)"
        return subprocess.Popen([sys.executable, "-I", "-S", "-c", code], stdout=subprocess.PIPE)

    with start("SIG_IGN") as stubborn, start("SIG_DFL") as meek:
        for each in (stubborn, meek):
            assert each.stdout is not None
            each.stdout.readline()  # it treats the signal as it wants to from now on
        supervisor.end_all([(stubborn.pid, moment(stubborn)), (meek.pid, moment(meek))], kill_after_s=0.3)
        assert stubborn.wait() == -signal.SIGKILL
        assert meek.wait() == -signal.SIGINT


def test_the_supervisor_ends_everything_when_its_owner_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "cluster"
    folder.mkdir()
    (folder / "data").write_text("x")
    program = f"""
import os, subprocess, sys, time
sys.path.insert(0, {str(Path(supervisor.__file__).parent)!r})
import supervisor
child = subprocess.Popen({SLEEP!r}, start_new_session=True)
command = [sys.executable, "-I", "-S", supervisor.__file__, str(os.getpid()), {str(folder)!r}, ""]
watcher = subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0, start_new_session=True)
watcher.stdin.write(f"{{child.pid}} {{supervisor.started_at(child.pid)}}\\n".encode())
print(child.pid, supervisor.started_at(child.pid), watcher.pid, supervisor.started_at(watcher.pid), flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", program], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        child, child_moment, watcher, watcher_moment = owner.stdout.readline().decode().split()
        assert supervisor.is_running(int(child), child_moment)
        owner.kill()
        assert eventually(lambda: not supervisor.is_running(int(child), child_moment))
        assert eventually(lambda: not supervisor.is_running(int(watcher), watcher_moment))
    assert not folder.exists()


def test_the_supervisor_survives_a_process_that_ended_before_its_start_time_was_read(tmp_path: Path) -> None:
    """`started_at` knows no moment of it: its line is its id alone."""
    (tmp_path / "kept").mkdir()
    script = [sys.executable, "-I", "-S", supervisor.__file__, str(os.getpid()), str(tmp_path / "kept"), ""]
    with subprocess.Popen(SLEEP) as child, subprocess.Popen(script, stdin=subprocess.PIPE) as end:
        assert end.stdin is not None
        end.stdin.write(f"{child.pid} {moment(child)}\n{1 << 22} \n".encode())
        end.stdin.close()
        try:
            assert end.wait(20) == 0
            assert child.wait(20) < 0
        finally:
            child.kill()
    assert not (tmp_path / "kept").exists()


def test_the_supervisor_kills_what_a_process_has_started_with_it(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    script = [sys.executable, "-I", "-S", supervisor.__file__, str(os.getpid()), str(tmp_path / "kept"), ""]
    leader = ["sh", "-c", "sh -c 'sleep 600 & echo $!'; setsid sleep 600 & echo $!; wait"]  # an orphan, and a session
    with (
        subprocess.Popen(leader, stdout=subprocess.PIPE, process_group=0) as leading,
        subprocess.Popen(script, stdin=subprocess.PIPE) as end,
    ):
        assert leading.stdout is not None
        assert end.stdin is not None
        children = [int(leading.stdout.readline()) for _ in range(2)]
        end.stdin.write(f"{leading.pid} {moment(leading)}\n".encode())
        end.stdin.close()
        assert end.wait(20) == 0
        assert eventually(lambda: not any(map(supervisor.started_at, children)))


def test_the_supervisor_kills_what_carries_its_owners_mark_when_the_parent_is_dead(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    script = [sys.executable, "-I", "-S", supervisor.__file__, str(os.getpid()), str(tmp_path / "kept"), ""]
    variables = {**os.environ, supervisor.MARK: supervisor.mark_of(os.getpid())}
    orphan = ["sh", "-c", "setsid sleep 600 >&2 & echo $!; kill -9 $$"]
    left = int(subprocess.run(orphan, stdout=subprocess.PIPE, env=variables, check=False).stdout)
    variables[supervisor.MARK] += "0"
    spared = int(subprocess.run(orphan, stdout=subprocess.PIPE, env=variables, check=False).stdout)
    try:
        subprocess.run(script, input=b"", check=True, timeout=40)
        assert eventually(lambda: supervisor.started_at(left) is None)
        assert supervisor.started_at(spared) is not None
    finally:
        supervisor.kill_marked(variables[supervisor.MARK])
    assert eventually(lambda: supervisor.started_at(spared) is None)


def test_a_job_that_a_marked_process_has_submitted_is_spared(monkeypatch: pytest.MonkeyPatch) -> None:
    """sbatch gives it all variables, the mark too."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    marked = {**os.environ, supervisor.MARK: f"{os.getpid()}:mark"}
    with (
        subprocess.Popen(SLEEP, env=marked) as ours,
        subprocess.Popen(SLEEP, env={**marked, "SLURM_JOB_ID": "8"}) as submitted,
    ):
        try:
            supervisor.kill_marked(marked[supervisor.MARK])
            assert ours.wait(40) == -signal.SIGKILL
            assert submitted.poll() is None
        finally:
            ours.kill()
            submitted.kill()


def test_a_process_of_another_user_hinders_nobody_from_killing_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(SLEEP) as top, subprocess.Popen(SLEEP) as theirs, subprocess.Popen(SLEEP) as ours:
        send = supervisor.send

        def refused(pid: int, began: str, number: int) -> bool:
            if pid == theirs.pid:
                raise PermissionError
            return send(pid, began, number)

        monkeypatch.setattr(supervisor, "send", refused)
        below = [(each.pid, moment(each)) for each in (theirs, ours)]
        monkeypatch.setattr(supervisor, "descendants", lambda _: below)
        try:
            supervisor._kill_tree(top.pid, moment(top))
            assert ours.wait(40) == top.wait(40) == -signal.SIGKILL
            assert theirs.poll() is None
        finally:
            for each in (top, theirs, ours):
                each.kill()


def test_the_supervisor_removes_nothing_while_another_cluster_begins_there(tmp_path: Path) -> None:
    folder = tmp_path / "cluster"
    born = state.claim(folder).born
    script = [sys.executable, "-I", "-S", supervisor.__file__, str(os.getpid()), str(folder), born]
    with subprocess.Popen(script, stdin=subprocess.PIPE) as end:
        assert end.stdin is not None
        with state.locked(tmp_path):
            end.stdin.close()
            state.begin(folder, "cluster")  # as `claim` does
        assert end.wait(20) == 0
    assert folder.exists()


def test_the_supervisor_leaves_a_newer_cluster_of_the_same_name_alone(tmp_path: Path) -> None:
    folder = tmp_path / "cluster"
    born = state.claim(folder).born
    script = [sys.executable, "-I", "-S", supervisor.__file__, str(os.getpid()), str(folder), born]
    with subprocess.Popen(script, stdin=subprocess.PIPE) as end, subprocess.Popen(SLEEP) as new:
        assert end.stdin is not None
        try:
            state.remove(folder)
            state.claim(folder)
            entry = state.ProcessEntry("s0", "server", new.pid, moment(new))
            record = state.update(folder, lambda now: replace(now, processes=(entry,)))
            end.stdin.close()
            assert end.wait(20) == 0
            assert new.poll() is None
        finally:
            new.kill()
    assert state.read(folder) == record
