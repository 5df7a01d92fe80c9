"""`elasticps launch` with real processes: on one machine, and as tasks of a job on several."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

import elasticps as eps
from chaos.live import netns
from elasticps.cli.launch import _Run, _Stop
from elasticps.errors import ConfigError
from elasticps.launch.core.task import LOOPBACK, Task
from elasticps.launch.processes import LaunchOptions, TaskProcesses, _refuses
from elasticps.local import state, supervisor
from elasticps.local.process import Process
from tests.launch import slurm_cluster, worker

LAUNCH = [sys.executable, "-m", "elasticps", "launch"]
WORKER = [sys.executable, "-m", "tests.launch.worker"]
PATIENCE_S = 200.0


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of what runs here; nothing may be left in it."""
    (tmp_path / "run").mkdir()
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)  # else TMPDIR is not read again
    for variable in [each for each in os.environ if each.startswith("SLURM_")]:
        monkeypatch.delenv(variable)
    yield tmp_path
    assert not list((tmp_path / "tmp").glob("elasticps*"))
    assert [path.name for path in (tmp_path / "run").glob("elasticps/*")] in ([], [".lock"])


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*LAUNCH, *command], capture_output=True, text=True, check=False, timeout=PATIENCE_S)


def test_a_command_that_is_not_there_is_named_before_anything_starts(folder: Path) -> None:
    done = run("--", "no-such-command")
    assert done.returncode == 2
    assert "there is no command 'no-such-command'" in done.stderr


def test_a_server_and_etcd_that_die_are_started_again(folder: Path) -> None:
    processes = TaskProcesses(Task("dying"), LaunchOptions(servers=1, replicas=1))
    try:
        url = processes.start()
        record = state.started_here(url)  # so that `elasticps status` and `kill` find it
        assert record is not None
        before = {entry.name: entry for entry in record.processes if entry.role != "owner"}
        assert sorted(before) == ["c0", "etcd", "s0"]
        for entry in before.values():
            os.kill(entry.pid, signal.SIGKILL)

        def again() -> bool:
            now = state.read(processes.folder)
            assert now is not None
            return {entry.name for entry in now.processes if entry.running and before.get(entry.name) != entry} >= {
                "c0", "etcd", "s0", "owner"
            }  # fmt: skip

        wait_until(again)
        assert sorted(line.split()[1] for line in processes.ended()) == ["c0", "etcd", "s0"]
        processes._wait_for_view(time.monotonic() + PATIENCE_S)
    finally:
        processes.stop()


def test_a_second_process_of_a_task_is_refused_and_the_firsts_data_of_etcd_stay(folder: Path) -> None:
    task = Task("twice", count=2)
    first, second = (TaskProcesses(task, LaunchOptions()) for _ in range(2))
    try:
        first._own_folder(time.monotonic())
        base = first.folder.parent
        (base / "etcd").mkdir()
        with pytest.raises(ConfigError, match=rf"task 0 of cluster 'twice' runs .* \(process {os.getpid()}\).* --name"):
            second.start()
        assert (base / "etcd").exists()
        assert (base / "run" / "cluster.json").exists()
    finally:
        first.stop()
    assert not base.exists()


def test_a_start_that_fails_keeps_the_data_that_it_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = Task("failing", count=2)
    base = folder / "tmp" / f"elasticps-{os.getuid()}-failing.0"
    monkeypatch.setattr("elasticps.launch.processes.Zygote.possible", lambda: False)
    monkeypatch.setattr(TaskProcesses, "_start_etcd", fail)
    for found in (True, False):
        if found:
            (base / "etcd").mkdir(parents=True)
            base.chmod(0o700)
        with pytest.raises(ConfigError, match="it fails"):
            TaskProcesses(task, LaunchOptions()).start()
        assert base.exists() == found
        if found:
            assert not (base / "run").exists()
            shutil.rmtree(base)


def fail(*_: object) -> None:
    raise ConfigError("it fails")


def test_a_taken_port_is_told_before_it_is_waited_for(folder: Path) -> None:
    with socket.create_server((LOOPBACK, 0)) as taken:
        port = taken.getsockname()[1]
        lines: list[str] = []

        def tell(line: str) -> None:
            lines.append(line)
            taken.close()

        processes = TaskProcesses(Task("waiting", port=port), LaunchOptions(servers=1, replicas=1), tell)
        try:
            processes.start()
        finally:
            processes.stop()
    assert lines[:2] == [
        f"another process has etcd's port {port}: it is waited for, up to --timeout", "etcd is there"
    ]  # fmt: skip


def test_of_a_run_whose_servers_have_all_died_the_next_one_inherits_nothing(folder: Path) -> None:
    def run_once(options: LaunchOptions, *, keep: bool) -> tuple[list[str], list[str]]:
        """What a run tells, and the tables that it finds and makes."""
        lines: list[str] = []
        processes = TaskProcesses(Task("again", count=2), options, lines.append)
        try:
            with eps.connect(processes.start(), worker="w0") as ps:
                tables = [*ps.tables()]
                ps.table("made", dim=1, optimizer=eps.Accumulate())
        finally:
            processes.stop(keep_etcd=keep)
        return lines, tables

    notice = "an earlier run has left etcd's data, and none of its servers: the cluster begins again, empty"
    alone = LaunchOptions(servers=1, replicas=1)
    lines, _ = run_once(alone, keep=True)
    assert notice not in lines
    lines, tables = run_once(alone, keep=False)
    assert notice in lines
    assert tables == []


def test_a_server_that_may_live_keeps_etcd_s_data(folder: Path) -> None:
    with socket.create_server((LOOPBACK, 0)) as there:
        port = there.getsockname()[1]
        assert not _refuses(f"{LOOPBACK}:{port}")
    assert _refuses(f"{LOOPBACK}:{port}")
    assert not _refuses("no-such-machine.invalid:1")


def test_a_server_is_asked_to_leave_once_and_so_is_one_that_is_started_again_meanwhile(folder: Path) -> None:
    heard_file = folder / "heard_file"
    say = f"trap 'echo x >> {heard_file}' RTMIN; echo ready; while :; do sleep 0.02; done"

    def start() -> Process:
        process = Process.start("s0", "server", ["bash", "-c", say], folder)
        wait_until(lambda: process.output.read_text() == "ready\n")
        return process

    processes = TaskProcesses(Task("leaving"), LaunchOptions())
    processes._folder = folder
    state.begin(folder, "leaving")
    processes._url = "etcd://127.0.0.1:1/leaving"
    first = start()
    try:
        processes._add(first)
        processes.leave()
        processes.leave()
        wait_until(lambda: heard_file.exists() and heard_file.read_text() == "x\n")
        first.kill()
        processes._add(start())
        wait_until(lambda: heard_file.read_text().count("x") == 2)
        processes.leave()
        assert len(processes._draining) == 2
    finally:
        for process in (first, *processes._servers()):
            process.kill()


def test_a_server_that_scale_has_started_ends_with_the_job(folder: Path) -> None:
    processes = TaskProcesses(Task("scaled"), LaunchOptions())
    processes._own_folder(time.monotonic())
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as server:
        entry = state.ProcessEntry("s3", "server", server.pid, supervisor.started_at(server.pid) or "")
        state.update(processes.folder, lambda now: replace(now, processes=(*now.processes, entry)))
        processes.stop()
        assert server.wait(PATIENCE_S) == -signal.SIGINT


def test_what_a_command_leaves_running_ends_with_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elasticps.cli.launch._at_terminal", lambda: False)
    left = folder / "left"
    run_ = _Run(Task("groups"), LaunchOptions(), 0.0, 0.0)
    assert run_._run(["sh", "-c", f"sleep 600 & echo $! > {left}; exit 3"], "etcd://127.0.0.1:1/groups") == 3
    pid = int(left.read_text())
    wait_until(lambda: supervisor.started_at(pid) is None)


def test_sessions_of_a_command_that_somebody_else_kills_end_with_it(folder: Path) -> None:
    left = folder / "left"
    command = ["sh", "-c", f"setsid sleep 600 & echo $! > {left}; kill -9 $$"]  # as torchrun starts its ranks
    killed = _Run(Task("sessions"), LaunchOptions(), 0.0, 0.0)._run(command, "etcd://127.0.0.1:1/sessions")
    assert killed == 128 + signal.SIGKILL
    pid = int(left.read_text())
    wait_until(lambda: supervisor.started_at(pid) is None)


def test_signals_reach_the_command_and_a_second_one_ends_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elasticps.cli.launch._at_terminal", lambda: False)
    monkeypatch.setattr("elasticps.cli.launch._TWICE_S", 0.0)
    hung_up = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # as nohup would have it ignored
    heard_file = folder / "heard_file"
    say = "; ".join(f"trap 'echo {name} >> {heard_file}' {name}" for name in ("USR1", "USR2", "TERM"))
    run_ = _Run(Task("signals"), LaunchOptions(), 0.0, 0.0)
    run_._started = True

    heard = []

    def send() -> None:
        try:
            wait_until(heard_file.exists)
            for number, name in ((signal.SIGUSR1, "USR1"), (signal.SIGUSR2, "USR2"), (signal.SIGHUP, "TERM")):
                os.kill(os.getpid(), number)
                wait_until(partial(hears, name))
                heard.append(name)
            os.kill(os.getpid(), signal.SIGTERM)
        except BaseException:
            run_._at_once = True  # or the command would run for ever
            raise

    def hears(name: str) -> bool:
        return name in heard_file.read_text()

    sender = threading.Thread(target=send)
    command = ["bash", "-c", f"{say}; echo > {heard_file}; while :; do sleep 0.02; done"]
    try:
        with run_._signals():
            sender.start()
            with pytest.raises(_Stop):
                run_._run(command, "etcd://127.0.0.1:1/signals")
            sender.join()
    finally:
        signal.signal(signal.SIGHUP, hung_up)
    assert heard == ["USR1", "USR2", "TERM"]
    assert run_._command is None


def test_a_command_that_the_kernel_cannot_run_is_named(folder: Path) -> None:
    (file := folder / "train").write_text("no program")
    file.chmod(0o700)
    with pytest.raises(ConfigError, match="train cannot be executed: Exec format error"):
        _Run(Task("wrong"), LaunchOptions(), 0.0, 0.0)._run([str(file)], "etcd://127.0.0.1:1/wrong")


# -------------------------------------------------------------------------------------------------------- many machines


def wait_until(done: object) -> None:
    until = time.monotonic() + PATIENCE_S
    assert callable(done)
    while not done():
        assert time.monotonic() < until, "it did not happen in time"
        threading.Event().wait(0.05)


class Srun:
    """Gives orders to the stand-in for `srun`."""

    def __init__(self, folder: Path, process: subprocess.Popen[str]) -> None:
        self._folder = folder
        self._process = process

    def order(self, *words: str) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(shlex.join(words) + "\n")
        self._process.stdin.flush()
        return int(json.loads(self._process.stdout.readline()))

    def start(self, task: int, *options: str, command: Sequence[str]) -> None:
        self.order("start", str(task), *LAUNCH, *options, "--", *command)

    def says(self, task: int, text: str) -> None:
        """Waits until a task has printed this."""
        wait_until(lambda: text in self.output(task))

    def output(self, task: int) -> str:
        return (self._folder / f"{task}.out").read_text() + (self._folder / f"{task}.err").read_text()


@contextmanager
def srun(folder: Path, machines: int) -> Iterator[Srun]:
    if why := netns.refused():
        pytest.skip(f"network namespaces cannot be made here: {why}")
    command = [*netns._unshare(), "--", sys.executable, "-m", "tests.launch.fake_srun", str(folder), str(machines)]
    environment = {**os.environ, netns._INSIDE: "1"}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield Srun(folder, process)
        assert process.stdin is not None
        process.stdin.close()


def left_on_machines(folder: Path) -> list[str]:
    """Files that launches have left on any machine."""
    return [str(path) for path in folder.glob("machine*/elasticps*")]


@pytest.mark.slow
@pytest.mark.ci
def test_sums_are_exact_when_tasks_are_killed_and_started_again_the_first_one_among_them(folder: Path) -> None:
    steps, machines = 300, 3
    options = ["--servers", "3", "--patience", str(PATIENCE_S)]

    def command(task: int) -> list[str]:
        return [*WORKER, f"w{task}", str(steps), str(steps * machines), *(["--stop-at", "100"] if task < 2 else [])]

    with srun(folder, machines) as job:
        for task in range(machines):
            job.start(task, *options, command=command(task))
        for task in (1, 0):  # a task with servers; then the one with etcd and the coordinator
            job.says(task, f"w{task} stands at step 100")
            assert job.order("kill", str(task)) >= 4  # the launch, its command, servers
            job.start(task, *options, command=command(task))
            job.says(task, f"w{task} begins at step 100")
            if task == 1:
                assert "no TLS: whoever reaches the ports" in job.output(0)
        codes = [job.order("wait", str(task)) for task in range(machines)]
        outputs = [job.output(task) for task in range(machines)]
    assert codes == [0, 0, 0], outputs
    assert f"sums {steps * machines} to {steps * machines}" in outputs[0], outputs
    assert worker.ROWS == 100
    assert left_on_machines(folder) == []


@pytest.mark.slow
def test_a_task_that_is_preempted_hands_over_and_nothing_is_lost(folder: Path, tmp_path: Path) -> None:
    authority = tmp_path / "ca"
    done = subprocess.run(
        [sys.executable, "-m", "elasticps", "certificates", str(authority)], capture_output=True, text=True, check=True
    )
    assert "a new authority" in done.stderr
    options = ["--servers", "3", "--replicas", "1", "--patience", "0", "--tls", str(authority)]
    moved = tmp_path / "moved"
    late = f"while [ ! -e {moved} ]; do sleep 0.1; done; exec {shlex.join([*WORKER, 'w1', '200', '0'])}"
    with srun(folder, 3) as job:
        job.start(0, *options, command=[*WORKER, "w0", "200", "450"])
        job.start(1, *options, command=["sh", "-c", late])
        job.start(2, *options, command=[*WORKER, "w2", "100", "0", "--stop-at", "50"])
        job.says(2, "w2 stands at step 50")
        job.order("signal", "2")
        assert job.order("wait", "2") == 128 + signal.SIGTERM  # when others have the third of all rows that it had
        moved.touch()
        codes = [job.order("wait", str(task)) for task in range(2)]
        outputs = [job.output(task) for task in range(3)]
    assert codes == [0, 0], outputs
    assert "sums 450 to 450" in outputs[0], outputs
    assert "no TLS" not in outputs[0]
    assert left_on_machines(folder) == []


@pytest.mark.slow
def test_a_job_that_is_ended_as_a_whole_ends_though_etcd_gets_the_signal_first(folder: Path) -> None:
    with srun(folder, 2) as job:
        for task in range(2):
            job.start(task, "--servers", "2", command=[*WORKER, f"w{task}", "100", "0", "--stop-at", "50"])
        for task in range(2):
            job.says(task, f"w{task} stands at step 50")
        assert min(job.order("signal", str(task)) for task in range(2)) >= 4
        codes = [job.order("wait", str(task)) for task in range(2)]
        outputs = [job.output(task) for task in range(2)]
    assert codes == [128 + signal.SIGTERM] * 2, outputs
    assert left_on_machines(folder) == []


@pytest.mark.slow
@pytest.mark.ci
def test_an_elastic_restart_of_torchrun_goes_on_from_the_servers_and_sums_are_exact(folder: Path) -> None:
    pytest.importorskip("torch")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = run("--servers", "2", "--", *torchrun, "--max-restarts", "2", "-m", "tests.launch.elastic_worker")
    assert done.returncode == 0, done.stderr
    assert "rank 1 kills itself at step 50" in done.stdout
    assert "restart 1 of rank 1 begins at step 50" in done.stdout
    assert "sums 200 to 200" in done.stdout


@pytest.mark.slow
def test_ranks_of_a_torchrun_that_is_killed_end_with_it(folder: Path) -> None:
    pytest.importorskip("torch")
    script = folder / "rank.py"
    script.write_text(
        "import os, pathlib, signal, time\n"
        f"place = pathlib.Path({str(folder)!r})\n"
        "(place / f'rank{os.environ[\"RANK\"]}').write_text(str(os.getpid()))\n"
        "while os.environ['RANK'] == '0' and not (place / 'rank1').exists(): time.sleep(0.05)\n"
        "os.environ['RANK'] == '0' and os.kill(os.getppid(), signal.SIGKILL)\n"
        "time.sleep(600)\n"
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = run("--servers", "1", "--replicas", "1", "--", *torchrun)
    assert done.returncode == 128 + signal.SIGKILL, done.stderr
    ranks = [int((folder / f"rank{rank}").read_text()) for rank in range(2)]
    wait_until(lambda: not any(map(supervisor.started_at, ranks)))


@pytest.mark.slow
def test_a_job_of_a_real_slurm_trains_with_one_cluster_and_sums_are_exact(folder: Path) -> None:
    if why := slurm_cluster.missing() or netns.refused():
        pytest.skip(f"no SLURM can run here: {why}")
    script = folder / "task.sh"
    script.write_text(f"exec {shlex.join(WORKER)} w$SLURM_PROCID 100 200\n")
    apart = ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc", "--propagation", "private", "--"]
    inside = [*apart, sys.executable, "-m"]
    job = ["srun", "--nodes", "2", "--ntasks", "2", *LAUNCH, "--servers", "2", "--", "sh", str(script)]
    done = subprocess.run(
        [*inside, "tests.launch.slurm_cluster", str(folder), *job],
        capture_output=True, text=True, check=False, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "sums 200 to 200" in done.stdout
    assert "cluster: etcd://10.77.77.1:" in done.stderr
