"""Servers whose processes may have few files open, or little memory, by what `ulimit` says."""

from __future__ import annotations

import resource
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import elasticps as eps
from elasticps.cli.status import look
from elasticps.local import LocalCluster
from elasticps.system import background

FILES = 200
ADDRESS_BYTES = 1536 << 20  # an empty server has 1.1 GB of addresses, and 140 MB in memory
STRANGERS = 3 * FILES
NAMES = ("x0", "x1")


@dataclass
class Limited:
    """Two servers that run under a limit, and have everything."""

    cluster: LocalCluster
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    logs: list[Path] = field(default_factory=list)

    def check_alive(self) -> None:
        for process, log in zip(self.processes, self.logs, strict=True):
            assert process.poll() is None, log.read_text()[-4000:]


@contextmanager
def limited(folder: Path, which: int, soft: int, hard: int) -> Iterator[Limited]:
    with LocalCluster(servers=1, replicas=2, ranges=16) as cluster, ExitStack() as stack:
        found = Limited(cluster)
        for name in NAMES:
            errors = stack.enter_context((folder / f"{name}.log").open("wb"))
            process = subprocess.Popen(
                [sys.executable, "-m", "elasticps", "server", "--url", cluster.url, "--name", name],
                stdout=subprocess.PIPE, stderr=errors, preexec_fn=partial(resource.setrlimit, which, (soft, hard)),
            )  # fmt: skip
            stack.enter_context(process)
            stack.callback(process.send_signal, signal.SIGINT)
            found.processes.append(process)
            found.logs.append(folder / f"{name}.log")
        for process, log in zip(found.processes, found.logs, strict=True):
            assert process.stdout is not None
            assert b'"ready": true' in process.stdout.readline(), log.read_text()[-4000:]
        cluster.drain("s0")
        yield found


def address_of(url: str, name: str) -> tuple[str, int]:
    found = background.run(look(url, 30.0))
    (address,) = (server["address"] for server in found["servers"] if server["id"] == name)
    host, _, port = address.rpartition(":")
    return host, int(port)


def test_a_server_out_of_file_descriptors_refuses_strangers_and_serves_on(tmp_path: Path) -> None:
    """A look at its own memory ended each a second after the last descriptor was taken, and all data were lost."""
    with (
        limited(tmp_path, resource.RLIMIT_NOFILE, 100, FILES) as servers,
        eps.connect(servers.cluster.url, worker="w0", timeout=100.0) as ps,
        ExitStack() as stack,
    ):
        assert [_files(process.pid) for process in servers.processes] == [FILES, FILES], "as many as it may have"
        table = ps.table("t", dim=2, optimizer=eps.SGD(lr=1.0), init=eps.Zeros())
        keys, ones = np.arange(1000), np.ones((1000, 2), np.float32)
        ps.push({table: (keys, ones)}).result()
        strangers = [
            [stack.enter_context(socket.create_connection(address, timeout=60)) for _ in range(STRANGERS)]
            for address in (address_of(servers.cluster.url, name) for name in NAMES)
        ]
        for some in strangers:  # who came first makes room
            assert b"its limit of open files (`ulimit -n`), 200, has room for no more" in some[0].recv(4096)
        for _ in range(20):  # longer than until the next look at memory
            ps.push({table: (keys, ones)}).result()
            select.select([], [], [], 0.1)
        servers.check_alive()
        with eps.connect(servers.cluster.url, worker="w1", timeout=100.0) as other:
            late = other.table("t", dim=2, optimizer=eps.SGD(lr=1.0), init=eps.Zeros())
            assert (late.pull(keys) == -21.0).all()


def _files(pid: int) -> int:
    (line,) = (line for line in Path(f"/proc/{pid}/limits").read_text().splitlines() if "open files" in line)
    return int(line.split()[3])


@pytest.mark.slow
def test_an_address_space_limit_counts_as_a_memory_limit(tmp_path: Path) -> None:
    with (
        limited(tmp_path, resource.RLIMIT_AS, ADDRESS_BYTES, ADDRESS_BYTES) as servers,
        eps.connect(servers.cluster.url, worker="w0", timeout=100.0) as ps,
    ):
        found = background.run(look(servers.cluster.url, 30.0))
        assert [server["memory_limit"] for server in found["servers"]] == [ADDRESS_BYTES] * 2
        table = ps.table("t", dim=64, optimizer=eps.SGD(lr=1.0), init=eps.Zeros())
        ones = np.ones((20_000, 64), np.float32)

        def fill() -> None:
            for step in range(200):
                ps.push({table: (np.arange(20_000) + 20_000 * step, ones)}).result()

        with pytest.raises(eps.ServerFull):
            fill()
        servers.check_alive()
        there = np.arange(20_000)
        ps.push({table: (there, ones)}).result()
        assert (table.pull(there) == -2.0).all()
