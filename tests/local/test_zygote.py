"""Processes forked from one that has imported everything behave like directly started ones."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from elasticps import local
from elasticps.local import LocalCluster
from elasticps.local.process import Process
from elasticps.local.zygote import OURS, Forked, Zygote
from tests.conftest import NewCluster

Eventually = Callable[[Callable[[], bool]], None]

pytestmark = pytest.mark.skipif(not Zygote.possible(), reason="this system has no pidfd")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("zygote")


@pytest.fixture(scope="module")
def zygote(folder: Path) -> Iterator[Zygote]:
    made = Zygote(folder / "zygote.log", os.environ)
    yield made
    made.close()
    assert (folder / "zygote.log").read_text() == ""


def run(zygote: Zygote, folder: Path, name: str, *arguments: str, **environment: str) -> Forked:
    whole = {**os.environ, **environment}
    return zygote.start([*OURS, *arguments], folder / f"{name}.out", folder / f"{name}.log", whole)


def test_a_forked_process_behaves_and_ends_as_the_command_does(zygote: Zygote, folder: Path) -> None:
    (folder / "a.log").write_text("before\n")
    first = run(zygote, folder, "a", "--version")
    second = run(zygote, folder, "b", "server", "--url", "nowhere", "--name", "s0")
    third = run(zygote, folder, "c", "status", ELASTICPS_URL="etcd://127.0.0.1:1/elsewhere")
    plain = [
        subprocess.run([*OURS, *more], capture_output=True, text=True, env={**os.environ, **env})
        for more, env in (
            (["--version"], {}),
            (["server", "--url", "nowhere", "--name", "s0"], {}),
            (["status"], {"ELASTICPS_URL": "etcd://127.0.0.1:1/elsewhere"}),
        )
    ]
    assert [each.wait(60) for each in (first, second, third)] == [each.returncode for each in plain]
    assert len({each.returncode for each in plain}) == 3
    assert (folder / "a.out").read_text() == plain[0].stdout
    assert (folder / "a.log").read_text() == "before\n"
    for name, each in zip("bc", plain[1:], strict=True):
        assert re.sub(r"[\d.]+ s", "", (folder / f"{name}.log").read_text()) == re.sub(r"[\d.]+ s", "", each.stderr)
    assert first.poll() == 0
    first.kill()  # it has ended: nobody else is meant


def test_a_forked_process_can_be_signalled_and_waited_for(zygote: Zygote, folder: Path, eventually: Eventually) -> None:
    waits = ["server", "--url", "etcd://127.0.0.1:1/nobody", "--name", "a-long-name-of-a-server", "--wait", "600"]
    forked = run(zygote, folder, "d", *waits)
    assert forked.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        forked.wait(0.01)
    process = psutil.Process(forked.pid)
    assert process.ppid() == zygote.pid
    eventually(lambda: os.getsid(forked.pid) == forked.pid)  # the first thing that it does
    forked.send_signal(signal.SIGSTOP)
    assert forked.poll() is None
    forked.send_signal(signal.SIGCONT)
    forked.kill()
    assert forked.wait(60) == forked.poll() == -signal.SIGKILL
    assert not psutil.pid_exists(forked.pid)


def test_a_forked_process_works_in_the_folder_of_its_owner(
    zygote: Zygote, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    """Where it looks for plug-ins, as a process does that starts directly."""
    monkeypatch.chdir(tmp_path)
    waits = ["server", "--url", "etcd://127.0.0.1:1/nobody", "--name", "s0", "--wait", "600"]
    forked = run(zygote, folder, "k", *waits)
    eventually(lambda: os.readlink(f"/proc/{forked.pid}/cwd") == str(tmp_path))
    forked.kill()
    assert forked.wait(60) < 0


def test_a_forked_process_has_its_own_descriptors(zygote: Zygote, folder: Path, eventually: Eventually) -> None:
    """None of the zygote's: a socket that others hold open would never tell that its owner has gone."""
    waits = ["server", "--url", "etcd://127.0.0.1:1/nobody", "--name", "s1", "--wait", "600"]
    before, forked = run(zygote, folder, "e", *waits), run(zygote, folder, "f", *waits)

    def open_ones(pid: int) -> dict[str, str]:
        found = {}
        for n in os.listdir(f"/proc/{pid}/fd"):
            with suppress(FileNotFoundError):  # it was closed meanwhile
                found[n] = os.readlink(f"/proc/{pid}/fd/{n}")
        return found

    expected = {"0": "/dev/null", "1": str(folder / "f.out"), "2": str(folder / "f.log")}
    eventually(lambda: open_ones(forked.pid).items() >= expected.items())
    theirs = {link for link in open_ones(zygote.pid).values() if link.startswith("socket:")}
    assert len(theirs) == 1
    assert theirs.isdisjoint(open_ones(forked.pid).values())
    for each in (before, forked):
        each.kill()
        each.wait(60)


@pytest.mark.slow  # starts a zygote of its own
@pytest.mark.ci
def test_processes_start_directly_if_the_zygote_is_dead(folder: Path) -> None:
    made = Zygote(folder / "other.log", os.environ)
    forked = run(made, folder, "g", "server", "--url", "etcd://127.0.0.1:1/nobody", "--name", "s2", "--wait", "600")
    os.kill(made.pid, signal.SIGKILL)
    process = Process.start("h", "server", [*OURS, "--version"], folder, zygote=made)
    assert process.popen.wait(60) == 0
    assert process.output.read_text().startswith("elasticps")
    assert forked.poll() is None  # it lives on
    forked.kill()
    assert forked.wait(60) < 0
    made.close()


@pytest.mark.slow  # starts a zygote of its own
@pytest.mark.ci
def test_a_frozen_zygote_is_killed_and_the_process_starts_directly(
    folder: Path, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    """A start would wait for it for ever, and so would its end."""
    monkeypatch.setattr(local.zygote, "ANSWER_S", 0.3)
    made = Zygote(folder / "still.log", os.environ)
    zygote = psutil.Process(made.pid)
    os.kill(made.pid, signal.SIGSTOP)
    process = Process.start("i", "server", [*OURS, "--version"], folder, zygote=made)
    assert process.popen.wait(60) == 0
    assert process.output.read_text().startswith("elasticps")
    eventually(lambda: not zygote.is_running() or zygote.status() == psutil.STATUS_ZOMBIE)  # it might start one later
    made.close()
    assert not zygote.is_running()


@pytest.mark.slow  # starts a zygote of its own
@pytest.mark.ci
def test_a_process_whose_caller_gave_up_is_not_started(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the zygote still imports: what it was asked for would be started behind the cluster's end."""
    made = Zygote(folder / "asked.log", os.environ)
    os.kill(made.pid, signal.SIGSTOP)

    def interrupted() -> bytes:
        os.kill(made.pid, signal.SIGCONT)
        raise KeyboardInterrupt

    monkeypatch.setattr(made, "_lines", SimpleNamespace(readline=interrupted, close=made._lines.close))
    with pytest.raises(KeyboardInterrupt):
        run(made, folder, "j", "--version")
    made.close()
    assert (folder / "j.out").read_text() == ""
    assert made._popen.returncode == -signal.SIGKILL


@pytest.mark.slow  # starts a zygote of its own
@pytest.mark.ci
def test_a_zygote_frozen_at_the_end_of_its_cluster_is_killed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local.zygote, "END_S", 0.3)
    made = Zygote(folder / "stands.log", os.environ)
    os.kill(made.pid, signal.SIGSTOP)
    made.close()
    assert not psutil.pid_exists(made.pid)


def test_the_servers_of_a_cluster_are_forked(local_cluster: NewCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local.cluster, "Zygote", Zygote)  # one of its own
    cluster = local_cluster(servers=2)
    parents = {psutil.Process(server.pid).ppid() for server in cluster.servers}
    assert len(parents) == 1
    assert parents != {os.getpid()}
    (parent,) = parents
    assert [psutil.Process(server.pid).name() for server in cluster.servers] == ["elasticps s0", "elasticps s1"]
    os.kill(parent, signal.SIGKILL)  # whoever does that: the cluster goes on, and still grows
    assert all(server.running for server in cluster.servers)
    assert cluster.start_server("late").running
    cluster.kill("s0")
    assert not cluster.ended()  # it was asked for
    assert psutil.Process(cluster.server("late").pid).ppid() == os.getpid()


def test_a_zygote_ends_with_its_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local.cluster, "Zygote", Zygote)
    with LocalCluster(servers=1) as cluster:
        zygote = psutil.Process(psutil.Process(cluster.server("s0").pid).ppid())
        assert zygote.pid != os.getpid()
    assert not zygote.is_running()


@pytest.mark.slow  # starts a zygote of its own
@pytest.mark.ci
def test_a_frozen_zygote_does_not_hide_the_end_of_a_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killing a server took a minute, and then said that another one had ended by SIGKILL that had ended by itself."""
    monkeypatch.setattr("elasticps.local.zygote.REAPED_S", 0.05)
    zygote = Zygote(folder / "still.log", os.environ)
    try:
        alive = run(zygote, folder, "lives", "server", "--url", "etcd://127.0.0.1:1/x", "--name", "s0", "--wait", "600")
        wrong = run(zygote, folder, "wrong", "server", "--url", "nowhere", "--name", "s1")
        psutil.Process(zygote.pid).suspend()
        alive.kill()
        killing = threading.Thread(target=alive.wait)
        killing.start()
        killing.join(50)
        assert alive.returncode == -signal.SIGKILL
        assert wrong.wait(50) == 2
    finally:
        zygote.close()
