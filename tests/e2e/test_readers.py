"""Readers beside training: every row they show is what the servers have, through deaths, moves and stops."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from numpy.typing import NDArray

import elasticps as eps
from elasticps.readers import AppliedWindow
from elasticps.readers.pull_server import PullServer
from elasticps.security.identity import Role
from tests.processes import reader_process
from tests.waiting import eventually

KEYS = np.arange(3000)
DIM = 8


def table_of(ps: eps.Client, name: str = "users") -> eps.SparseTable:
    return ps.table(name, dim=DIM, optimizer=eps.Adagrad(lr=0.1), init=eps.Normal(std=0.1, seed=3))


def shows(reader: eps.Reader, table: eps.SparseTable, keys: NDArray[np.int64] = KEYS) -> Callable[[], bool]:
    """Whether the reader shows what the servers have now."""
    expected = table.pull(keys)
    return lambda: bool((reader.pull({table.name: keys})[table.name] == expected).all())


def push(ps: eps.Client, table: eps.SparseTable, rng: np.random.Generator, n: int = 500) -> None:
    keys = rng.integers(0, len(KEYS), n)
    ps.push({table: (keys, rng.random((n, DIM), np.float32))}).result()


def make_again(ps: eps.Client, dim: int, rng: np.random.Generator) -> eps.SparseTable:
    """Drops the table and makes one of its name with rows of other lengths, of which all keys have one."""
    ps.drop_table("users")
    again = ps.table("users", dim=dim, optimizer=eps.SGD(lr=0.5))
    ps.push({again: (KEYS, rng.random((len(KEYS), dim), np.float32))}).result()
    return again


@contextmanager
def followed(url: str, rng: np.random.Generator) -> Iterator[tuple[eps.Client, eps.SparseTable, eps.Reader]]:
    """A worker, the table that it has pushed to, and a reader beside it that knows the table."""
    with eps.connect(url, worker="w0") as ps, eps.reader(url, every=0.005) as reader:
        users = table_of(ps)
        push(ps, users, rng)
        eventually(lambda: "users" in reader.tables)
        yield ps, users, reader


@contextmanager
def training(ps: eps.Client, table: eps.SparseTable) -> Iterator[Callable[[], int]]:
    """Pushes all the time; how often so far."""
    count, stop, failed = [0], threading.Event(), list[Exception]()

    def train() -> None:
        rng = np.random.default_rng(7)
        try:
            while not stop.is_set():
                push(ps, table, rng)
                count[0] += 1
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    try:
        yield lambda: count[0]
    finally:
        stop.set()
        thread.join()
    assert not failed


def test_a_reader_shows_what_servers_have_and_what_they_compute(own: eps.LocalCluster) -> None:
    rng = np.random.default_rng(1)
    with eps.connect(own.url, worker="w0") as ps:
        users = table_of(ps)
        weights = ps.tensor("w", init=rng.random((33, 7), np.float32), optimizer=eps.SGD(lr=0.1))
        push(ps, users, rng)
        with eps.reader(own.url, every=0.005) as reader:
            assert reader.age < 60  # it is known of all ranges, as soon as they are here
            assert set(reader.tables) == {"users", "w"}
            assert shows(reader, users)()  # rows that were there, and of keys that were never pushed
            assert (reader.pull({"w": None})["w"] == weights.pull()).all()
            for _ in range(20):
                push(ps, users, rng)
            eventually(shows(reader, users))
            ps.push({weights: np.ones((33, 7), np.float32)}).result()
            expected = weights.pull()
            eventually(lambda: bool((reader.pull({"w": None})["w"] == expected).all()))
            users.delete(KEYS[:700])
            eventually(shows(reader, users))
            rows = reader.stats().rows
            users.clear()
            eventually(shows(reader, users))
            assert reader.stats().rows < rows
            users.load(KEYS, rng.random((len(KEYS), DIM), np.float32))
            eventually(shows(reader, users))
            items = table_of(ps, "items")
            push(ps, items, rng)
            eventually(lambda: "items" in reader.tables)
            eventually(shows(reader, items))
            ps.drop_table("users")
            eventually(lambda: "users" not in reader.tables)
            with pytest.raises(eps.UnknownTable, match="has no table 'users'"):
                reader.pull({"users": KEYS})
            users = table_of(ps)
            push(ps, users, rng)
            eventually(lambda: "users" in reader.tables)
            eventually(shows(reader, users))
            assert reader.age < 5
            assert reader.as_of.steps.popitem()[1] == ps.clock


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8"])
def test_a_reader_keeps_rows_in_a_shorter_type(cluster: eps.LocalCluster, dtype: str) -> None:
    rng, app = np.random.default_rng(2), f"short-{dtype}"
    with eps.connect(cluster.url, worker="w0", app=app) as ps:
        users = table_of(ps)
        half = ps.table("half", dim=5, optimizer=eps.SGD(lr=0.1), init=eps.Normal(std=1.0, seed=5), dtype="bfloat16")
        push(ps, users, rng)
        ps.push({half: (KEYS[:100], rng.random((100, 5), np.float32))}).result()
        with eps.reader(cluster.url, application=app, dtype=dtype, every=0.005) as reader:
            push(ps, users, rng)
            expected = users.pull(KEYS)
            step = np.abs(expected).max() * {"float32": 0, "float16": 1e-3, "bfloat16": 8e-3, "int8": 8e-3}[dtype]
            eventually(lambda: bool((np.abs(reader.pull({"users": KEYS})["users"] - expected) <= step).all()))
            found = reader.pull({"half": KEYS})["half"]
            if dtype in ("float32", "bfloat16"):
                assert (found == half.pull(KEYS)).all()
            assert (found[100:] == half.pull(KEYS)[100:]).all()  # of keys without a row, as servers compute them


def test_listeners_get_all_rows_and_then_each_window(cluster: eps.LocalCluster) -> None:
    rng, app = np.random.default_rng(3), "listeners"
    with eps.connect(cluster.url, worker="w0", app=app) as ps:
        users = table_of(ps)
        push(ps, users, rng)
        with eps.reader(cluster.url, ["users"], application=app, every=0.005) as reader:
            twin: dict[int, bytes] = {}
            listed = list[AppliedWindow]()

            def note(window: AppliedWindow) -> None:
                if window.listing:
                    listed.append(window)
                for change in window.changes:
                    assert change.table == "users"
                    for key in change.deleted.tolist():
                        del twin[key]  # each was there
                    twin.update(zip(change.keys.tolist(), map(bytes, change.rows), strict=True))

            reader.subscribe(note)
            for _ in range(10):
                push(ps, users, rng)
            users.delete(KEYS[:1000])
            push(ps, users, rng)
            eventually(shows(reader, users))

            def same() -> bool:
                rows = reader.pull({"users": KEYS})["users"]
                return len(twin) == reader.stats().rows and all(twin[k] == bytes(rows[k]) for k in list(twin))

            eventually(same)
            assert listed[-1].complete
            reader.unsubscribe(note)
            reader.check()


def test_a_reader_goes_on_when_a_tail_dies_and_when_ranges_move(own: eps.LocalCluster) -> None:
    rng = np.random.default_rng(4)
    with followed(own.url, rng) as (ps, users, reader):
        with training(ps, users) as count:
            eventually(lambda: count() > 20)
            own.kill("s1")
            before = count()
            eventually(lambda: count() > before + 50)
        eventually(shows(reader, users))
        fills = reader.stats().fills
        with training(ps, users) as count:
            own.scale(3)
            before = count()
            eventually(lambda: count() > before + 50)
        eventually(shows(reader, users))
        assert reader.as_of.epoch > 1
        assert fills >= 0


def test_a_reader_that_is_stopped_holds_nobody_up(own: eps.LocalCluster) -> None:
    rng = np.random.default_rng(5)
    program = (
        "import sys, elasticps as eps\n"
        "with eps.reader(sys.argv[1], every=0.005) as reader:\n"
        "    print('ready', flush=True)\n"
        "    for line in sys.stdin:\n"
        "        print(reader.pull({'users': range(3000)})['users'].tobytes().hex(), flush=True)\n"
    )
    with eps.connect(own.url, worker="w0") as ps:
        users = table_of(ps)
        push(ps, users, rng)
        with subprocess.Popen(
            [sys.executable, "-c", program, own.url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            commands, answers = process.stdin, process.stdout
            assert commands is not None
            assert answers is not None
            assert answers.readline() == "ready\n"
            os.kill(process.pid, signal.SIGSTOP)
            for _ in range(300):
                push(ps, users, rng, 3000)
            os.kill(process.pid, signal.SIGCONT)
            expected = users.pull(KEYS).tobytes().hex()

            def shown() -> bool:
                commands.write("\n")
                commands.flush()
                return answers.readline().strip() == expected

            eventually(shown)


def test_what_cannot_be_followed_is_refused(cluster: eps.LocalCluster) -> None:
    with pytest.raises(eps.UnknownTable, match="has no table 'nothing'"):
        eps.reader(cluster.url, ["nothing"], application="none-there")
    with pytest.raises(eps.ConfigError, match="dtype= is one of"):
        eps.reader(cluster.url, dtype="float64")
    with pytest.raises(eps.ConfigError, match=r"every= is from 0\.001"):
        eps.reader(cluster.url, every=0.0001)
    with pytest.raises(eps.ConfigError, match="tables= is a list of names"):
        eps.reader(cluster.url, "users")


def test_a_reader_that_holds_shows_one_moment_of_all_ranges(own: eps.LocalCluster) -> None:
    """Each worker's step adds one to its column of the same rows, few or all: what is held is what a whole number of
    steps of each has made."""
    keys, few = np.arange(400), 7
    touched = [np.random.default_rng([i, 9]).integers(0, len(keys), (5000, few)) for i in range(2)]
    starts = [0, 0]  # a worker starts at the clock of the slowest one that is there

    def work(i: int, stop: threading.Event, failed: list[BaseException]) -> None:
        try:
            with eps.connect(own.url, worker=f"w{i}") as ps:
                table = ps.table("sums", dim=2, optimizer=eps.Accumulate())
                one = np.zeros((len(keys), 2), np.float32)
                one[:, i] = 1
                starts[i] = ps.resume().clock
                for step in range(5000):
                    if stop.is_set():
                        return
                    some = keys if step % 3 == 0 else np.unique(touched[i][step])
                    ps.push({table: (some, one[: len(some)])}).result()
                    time.sleep(0.003)
        except BaseException as error:
            failed.append(error)

    def model(i: int, steps: int) -> NDArray[np.float32]:
        sums = np.zeros(len(keys), np.float32)
        for step in range(steps):
            sums[keys if step % 3 == 0 else np.unique(touched[i][step])] += 1
        return sums

    stop, failed = threading.Event(), list[BaseException]()
    threads = [threading.Thread(target=work, args=(i, stop, failed)) for i in range(2)]
    with eps.connect(own.url, worker="observer") as ps:
        ps.table("sums", dim=2, optimizer=eps.Accumulate())
        with eps.reader(own.url, every=0.005) as reader:
            for thread in threads:
                thread.start()
            try:
                ids = None
                eventually(lambda: len(reader.as_of.steps) == 2)
                for _ in range(4):
                    as_of = reader.hold(timeout=60)
                    first = reader.pull({"sums": keys})["sums"]
                    time.sleep(0.05)
                    assert (reader.pull({"sums": keys})["sums"] == first).all()
                    ids = sorted(as_of.steps)
                    base = {w: int(of.max()) for w, of in as_of.clocks.items()}
                    for column in range(2):
                        candidates = [model(column, base[w] - starts[column]) for w in ids]
                        assert any((first[:, column] == one).all() for one in candidates), (column, base, starts)
                    reader.release()
                    eventually(lambda before=as_of: reader.as_of.steps != before.steps)  # type: ignore[misc]
            finally:
                stop.set()
                for thread in threads:
                    thread.join()
            assert not failed
            sums = ps.open("sums")
            assert isinstance(sums, eps.SparseTable)
            eventually(shows(reader, sums, keys))


def test_a_reader_proves_its_role_and_reads_its_application_only() -> None:
    rng = np.random.default_rng(6)
    with eps.LocalCluster(servers=2, tls=True) as secure, eps.connect(secure.url, worker="w0") as ps:
        users = table_of(ps)
        push(ps, users, rng)
        with eps.reader(secure._url_of(Role.READER)) as reader, eps.reader(secure.url) as beside:
            for one in (reader, beside):
                eventually(shows(one, users))
        with pytest.raises(eps.ConfigError, match=r"this is .*coordinator"):
            eps.reader(secure._url_of(Role.COORDINATOR), timeout=10)
        remedy = (
            r"role reader, which may only read: .*Use elasticps\.reader\(url\) .*`elasticps certificates AUTHORITY "
        )
        with pytest.raises(eps.ConfigError, match=remedy + r"'\w+/worker/default/\*'`"):
            eps.connect(secure._url_of(Role.READER), worker="w1", timeout=10)


def test_others_pull_from_a_reader_s_process(own: eps.LocalCluster) -> None:
    rng = np.random.default_rng(8)
    with eps.connect(own.url, worker="w0") as ps:
        users = table_of(ps)
        weights = ps.tensor("w", init=rng.random((5, 7), np.float32), optimizer=eps.SGD(lr=0.1))
        push(ps, users, rng)
        with reader_process(own.url) as (_, ready):
            address = ready["pulls"]
            with eps.remote_reader(address) as remote:
                assert set(remote.tables) == {"users", "w"}
                push(ps, users, rng)
                expected = users.pull(KEYS)
                eventually(lambda: bool((remote.pull({"users": KEYS})["users"] == expected).all()))
                assert (remote.pull({"w": None})["w"] == weights.pull()).all()
                assert remote.pull({"users": KEYS[:0]})["users"].shape == (0, DIM)
                assert remote.age < 5
                assert max(remote.steps.values()) == ps.clock
                with pytest.raises(eps.UnknownTable, match="has no table 'items'"):
                    remote.pull({"items": KEYS})
                table_of(ps, "items")

                def has_the_new_table() -> bool:
                    remote.refresh()
                    return "items" in remote.tables

                eventually(has_the_new_table)
                assert (remote.pull({"items": KEYS})["items"] == ps.open("items").pull(KEYS)).all()  # type: ignore[arg-type]
        with pytest.raises(eps.ClusterUnreachable, match="the reader at 127"):
            eps.remote_reader(address, timeout=1)
    with pytest.raises(eps.ConfigError, match="listens at host:port"):
        eps.remote_reader("nowhere")


def test_a_relay_feeds_readers(own: eps.LocalCluster) -> None:
    rng = np.random.default_rng(9)
    with eps.connect(own.url, worker="w0") as ps:
        users = table_of(ps)
        push(ps, users, rng)
        with eps.reader(own.url, every=0.005) as first, PullServer(first, "127.0.0.1", 0) as relay:
            with eps.reader(f"reader://{relay.address}", every=0.005) as second:
                eventually(shows(second, users))
                with training(ps, users) as count:
                    eventually(lambda: count() > 30)
                    own.kill("s1")
                    before = count()
                    eventually(lambda: count() > before + 30)
                    second.hold(timeout=60)
                    held = second.pull({"users": KEYS})["users"]
                    eventually(lambda: count() > before + 60)
                    assert (second.pull({"users": KEYS})["users"] == held).all()
                    second.release()
                users.delete(KEYS[:500])
                eventually(shows(second, users))
                eventually(lambda: second.as_of.steps == first.as_of.steps)
                items = table_of(ps, "items")
                push(ps, items, rng)
                eventually(lambda: "items" in second.tables)
                eventually(shows(second, items))
                ps.drop_table("users")
                eventually(lambda: "users" not in second.tables)
                address, host_port = relay.address, relay.address.rpartition(":")
                relay.close()
                push(ps, items, rng)
                with PullServer(first, host_port[0], int(host_port[2])) as again:  # started again: another journal
                    assert again.address == address
                    eventually(shows(second, items))
            with (
                PullServer(first, "127.0.0.1", 0) as other,
                pytest.raises(eps.ConfigError, match="the same dtype"),
            ):
                eps.reader(f"reader://{other.address}", dtype="int8", timeout=10)
