"""Readers, relays and publishers that are stopped, or whose network forgets them; tables that change under them."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import elasticps as eps
from elasticps.cli.status import look
from elasticps.readers.pull_server import PullServer
from elasticps.server.roles.readers import CREDIT_BYTES, JOURNAL_WORDS
from elasticps.store.journal import ENTRY_BYTES, FRAME_BYTES
from tests.e2e.test_readers import DIM, KEYS, followed, make_again, push, shows, table_of, training
from tests.e2e.test_readers_through_changes import equals
from tests.processes import process, reader_process
from tests.waiting import eventually

SLACK_BYTES = 48 << 20  # of a server's memory, for all but readers
STOPPED_S = 7.0  # longer than a lease, and than a silent server is waited for


class ForgetfulNetwork:
    """Stands between a relay and its readers. What it has forgotten passes nothing more, and ends no connection."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._to = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.accepted = 0
        self._forgotten = threading.Event()  # of the connections there are
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def forget(self) -> None:
        """Of all connections there are."""
        self._forgotten.set()
        self._forgotten = threading.Event()

    def close(self) -> None:
        for one in (self._listener, *self._open):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                outer, _ = self._listener.accept()
                inner = socket.create_connection(self._to)
                self._open += [outer, inner]
                self.accepted += 1
                for ends in ((outer, inner), (inner, outer)):
                    threading.Thread(target=self._pass, args=(*ends, self._forgotten), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, forgotten: threading.Event) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if not forgotten.is_set():
                    sink.sendall(data)
            if not forgotten.is_set():
                sink.shutdown(socket.SHUT_WR)


def test_a_reader_whose_network_forgets_its_connection_connects_again(own: eps.LocalCluster) -> None:
    """No end of the connection comes, and nothing else does."""
    rng = np.random.default_rng(21)
    with eps.connect(own.url, worker="w0") as ps:
        users = table_of(ps)
        push(ps, users, rng)
        with eps.reader(own.url, every=0.005) as first, PullServer(first, "127.0.0.1", 0) as relay:
            network = ForgetfulNetwork(relay.address)
            try:
                with eps.reader(f"reader://{network.address}", every=0.005) as second:
                    eventually(shows(second, users))
                    before = network.accepted
                    network.forget()
                    push(ps, users, rng)
                    users.delete(KEYS[:100])
                    eventually(shows(second, users))
                    eventually(lambda: equals(second, users))
                    assert network.accepted > before
                    assert second.age < STOPPED_S
            finally:
                network.close()


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_relay_and_a_publisher_that_are_stopped_go_on(own: eps.LocalCluster, tmp_path: Path) -> None:
    """For longer than any lease; a server dies meanwhile, and rows go."""
    rng = np.random.default_rng(22)
    with eps.connect(own.url, worker="w0") as ps:
        users = table_of(ps)
        push(ps, users, rng)
        publishing = ["publish", "--url", own.url, "--to", f"file://{tmp_path}/model", "--every", "0.1", "--json",
                      "--report", "0.1"]  # fmt: skip
        with (
            reader_process(own.url, "--every", "0.005") as (relay, ready),
            process(*publishing) as (publisher, _),
            eps.reader(f"reader://{ready['pulls']}", every=0.005) as outer,
            eps.remote_reader(ready["pulls"]) as remote,
        ):
            assert publisher.stdout is not None
            threading.Thread(target=publisher.stdout.read, daemon=True).start()
            eventually(shows(outer, users))
            held = outer.pull({"users": KEYS})["users"]
            with stopped(relay.pid), stopped(publisher.pid), training(ps, users) as count:
                own.kill("s1")
                until_s = time.monotonic() + STOPPED_S
                before = count()
                eventually(lambda: time.monotonic() > until_s and count() > before + 20, 60.0)
                users.delete(KEYS[:500])
                assert outer.age > STOPPED_S - 1
                assert outer.pull({"users": KEYS})["users"].shape == held.shape
                outer.check()
            users.delete(KEYS[500:600])
            expected = users.pull(KEYS)
            eventually(lambda: equals(outer, users), 60.0)
            eventually(lambda: outer.age < 2.0)
            eventually(lambda: bool((remote.pull({"users": KEYS})["users"] == expected).all()))
            model, there = eps.read_increments(tmp_path / "model"), np.sort(np.concatenate(list(users.keys())))
            rows = users.pull(there, exact=True)

            def published() -> bool:
                model.refresh()
                found = model.tables["users"]
                return np.array_equal(found.keys, there) and bool((found.pull(there) == rows).all())

            eventually(published, 60.0)


def unread_bytes(url: str) -> int:
    """The bytes that a server has sent to a reader which has not applied them: the most of any server."""
    servers = asyncio.run(look(url, 30.0))["servers"]
    return max(int(one["unread_bytes"]) for server in servers for one in server["readers"])


def private_bytes(pid: int) -> int:
    """Memory that a process has for itself."""
    found = re.search(r"RssAnon:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def test_a_stopped_reader_costs_tails_bounded_memory_and_gets_all_that_changed() -> None:
    """First rows of 16 KB change, many times the bytes that may be on their way to a reader and more than a frame can
    have; then more keys than the servers note."""
    rng, few, many = np.random.default_rng(25), np.arange(5000), np.arange(1 << 16)
    at_once = CREDIT_BYTES + FRAME_BYTES + 2 * ENTRY_BYTES
    with eps.LocalCluster(servers=1, replicas=1) as alone, eps.connect(alone.url, worker="w0") as ps:
        wide = ps.table("wide", dim=4096, optimizer=eps.SGD(lr=0.5))
        users = ps.table("users", dim=2, optimizer=eps.SGD(lr=0.5))

        def change(table: eps.SparseTable, keys: NDArray[np.int64], parts: int) -> None:
            for some in np.array_split(keys, parts):
                grads = rng.random((len(some), 1), np.float32).repeat(table.spec.dim, axis=1)
                ps.push({table: (some, grads)}).result()

        def shown() -> bool:
            there = remote.pull({"wide": few, "users": many})
            return bool((there["wide"] == expected[0]).all() and (there["users"] == expected[1]).all())

        change(wide, few, 3)
        change(users, many, 1)
        with (
            reader_process(alone.url, "--every", "0.005") as (reader, ready),
            eps.remote_reader(ready["pulls"]) as remote,
        ):
            expected = wide.pull(few), users.pull(many)
            eventually(shown)
            before = private_bytes(alone.servers[0].pid)
            often = 5 * JOURNAL_WORDS // (4 * len(many))
            for table, keys, parts, times in ((wide, few, 3, 1), (users, many, 1, often)):
                with stopped(reader.pid):
                    for _ in range(times):
                        change(table, keys, parts)
                    assert 0 < unread_bytes(alone.url) <= at_once
                    assert private_bytes(alone.servers[0].pid) - before < at_once + 8 * JOURNAL_WORDS + SLACK_BYTES
                expected = wide.pull(few), users.pull(many)
                eventually(shown, 60.0)


def test_pulls_go_on_when_a_table_is_made_again(own: eps.LocalCluster) -> None:
    """With wider rows, under the same name: nobody gets rows of the old shape, or hears that there is none."""
    rng = np.random.default_rng(23)
    with eps.connect(own.url, worker="w0") as ps:
        users = table_of(ps)
        push(ps, users, rng)
        with (
            eps.reader(own.url, every=0.005) as first,
            PullServer(first, "127.0.0.1", 0) as relay,
            eps.remote_reader(relay.address) as remote,
        ):
            assert remote.pull({"users": KEYS})["users"].shape == (len(KEYS), DIM)
            again = make_again(ps, 2 * DIM, rng)
            eventually(lambda: equals(first, again))
            expected = again.pull(KEYS)
            assert (remote.pull({"users": KEYS})["users"] == expected).all()
            assert remote.tables["users"].dim == 2 * DIM
            ps.drop_table("users")
            eventually(lambda: "users" not in first.tables)
            with pytest.raises(eps.UnknownTable, match="users"):
                remote.pull({"users": KEYS})


def test_a_checkpoint_of_other_shapes_is_shown_to_nobody_as_the_table_s_rows(
    own: eps.LocalCluster, tmp_path: Path
) -> None:
    """A table was made again, wider; a reader is pinned to the narrow one, and who pulls numbers is told so."""
    rng = np.random.default_rng(24)
    place = f"file://{tmp_path}/checkpoints"
    with followed(own.url, rng) as (ps, users, first):
        narrow = users.pull(KEYS)
        eventually(shows(first, users))
        made = [sys.executable, "-m", "elasticps", "checkpoint", "create", place, "--url", own.url]
        subprocess.run(made, check=True, capture_output=True)
        again = make_again(ps, DIM // 2, rng)
        eventually(lambda: first.tables.get("users", users.spec).dim == DIM // 2)
        with PullServer(first, "127.0.0.1", 0) as relay, eps.remote_reader(relay.address) as remote:
            first.pin(place)
            assert (first.pull({"users": KEYS})["users"] == narrow).all()
            with pytest.raises(eps.Error, match="numbers in table 'users'"):
                remote.pull({"users": KEYS})
            first.follow()
            eventually(lambda: equals(first, again))
            assert (remote.pull({"users": KEYS})["users"] == again.pull(KEYS)).all()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--every", "0"], "0.001"),
        (["--share", "9/8"], "there is no 9/8"),
        (["--share", "0/8"], "there is no 0/8"),
        (["--share", "two"], "two"),
        (["--tables", "nothing"], "has no table 'nothing'"),
        (["--dtype", "float64"], "float64"),
        (["--max-age", "soon"], "soon"),
        (["--listen", "here"], "here"),
    ],
)
def test_wrong_options_are_refused_with_what_was_wrong(
    cluster: eps.LocalCluster, options: list[str], text: str
) -> None:
    command = [sys.executable, "-m", "elasticps", "reader", "--url", cluster.url, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert text in done.stderr
    assert "Traceback" not in done.stderr


def test_what_is_no_relay_is_not_followed(cluster: eps.LocalCluster) -> None:
    """A server of the cluster, and a port at which nobody listens."""
    with pytest.raises(eps.Error, match="is no reader"):
        eps.reader(f"reader://{cluster.servers[0].address}", timeout=3)
    with socket.create_server(("127.0.0.1", 0)) as one:
        port = one.getsockname()[1]
    with pytest.raises(eps.ClusterUnreachable, match=str(port)):
        eps.reader(f"reader://127.0.0.1:{port}", timeout=1)
