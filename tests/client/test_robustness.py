"""Changed arguments, forks and internal failures neither end nor mislead a client."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

import elasticps as eps
from elasticps.client.dispatcher import Dispatcher
from elasticps.client.pull import ServerPull
from elasticps.client.transport import Link
from elasticps.wire.frames import Kind
from tests.client.fake_cluster import KEYS, ONES, Cluster

Eventually = Callable[[Callable[[], bool]], None]


def as_tensor(keys: np.ndarray) -> object:
    return pytest.importorskip("torch").from_numpy(keys)


@pytest.mark.parametrize(
    "wrap", [np.asarray, lambda a: a[:], memoryview, lambda a: a.view(np.memmap), as_tensor],
    ids=["array", "view", "memoryview", "memmap", "tensor"],
)  # fmt: skip
def test_keys_of_a_pull_are_copied(cluster: Cluster, wrap: Callable[[np.ndarray], object]) -> None:
    table = cluster.table(cluster.connect())
    keys = KEYS.copy()
    for server in cluster.servers:
        server.silent.add(Kind.PULL)
    read = table.pull_async(wrap(keys))
    assert isinstance(read, ServerPull)
    keys[:] = 7
    assert read.keys.tolist() == KEYS.tolist()


def test_initial_values_are_copied(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    ps = cluster.connect()
    init = np.zeros(8, np.float32)
    given: list[Any] = []
    ask_all = Dispatcher.ask_all

    def look(
        self: Dispatcher, questions: Callable[..., Iterable[Any]], timeout_s: float, what: str, **more: bool
    ) -> Any:
        if what.startswith("filling"):
            given.extend(b for _, _, body in questions(self.routes) for b in body)
        return ask_all(self, questions, timeout_s, what, **more)

    monkeypatch.setattr(Dispatcher, "ask_all", look)
    ps.tensor("w", init=init, optimizer=eps.SGD(lr=1.0))
    assert given
    assert not any(np.shares_memory(np.frombuffer(b, np.uint8), init) for b in given)


def in_child(action: Callable[[], object]) -> str:
    """The error that an action raises in a forked child, as text."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            action()
            outcome = "nothing"
        except BaseException as error:
            outcome = f"{type(error).__name__}: {error}"
        os.write(writer, outcome.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        outcome = answer.read()
    os.waitpid(pid, 0)
    return outcome


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_is_refused_at_once_and_does_the_parent_no_harm(cluster: Cluster) -> None:
    ps = cluster.connect()
    table = cluster.table(ps)
    shards = ps.shards(8, 4)
    ps.push({table: (KEYS, ONES)}).result()
    for server in cluster.servers:
        server.silent |= {Kind.PUSH, Kind.PULL}
    read, step = table.pull_async(KEYS), ps.push({table: (KEYS, ONES)})
    calls: list[Callable[[], object]] = [
        lambda: table.pull(KEYS),
        lambda: ps.push({table: (KEYS, ONES)}),
        lambda: ps.step().push({table: (KEYS, ONES)}),
        lambda: ps.table("other", dim=1, optimizer=eps.SGD(lr=1.0)),
        lambda: next(shards),
        ps.flush,
        ps.resume,
        read.result,
        step.result,
    ]
    for call in calls:
        assert in_child(call).startswith("Closed: this client belongs to process")

    def leave() -> None:
        with ps:
            pass

    assert in_child(ps.close) == in_child(leave) == "nothing"
    assert ps.table("t", dim=4, optimizer=eps.Accumulate()) is table  # over the same connections
    assert len(cluster.a.got(Kind.HELLO)) == 1


def test_a_failure_in_the_thread_that_reads_is_reported_to_all_waiting_threads(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    ps = cluster.connect()
    table = cluster.table(ps)
    for server in cluster.servers:
        server.silent |= {Kind.PULL, Kind.PUSH}
    read, step = table.pull_async(KEYS), ps.push({table: (KEYS, ONES)})

    def fail(self: Link) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(Link, "receive", fail)
    cluster.a.tell(cluster.before)  # something to read
    pending: list[BaseException] = []

    def wait() -> None:
        try:
            read.result()
        except Exception as error:
            pending.append(error.__cause__ or error)

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join(60)
    assert isinstance(pending[0], ZeroDivisionError)
    with pytest.raises(eps.Closed, match="ZeroDivisionError"):
        step.result()


def test_the_end_of_the_background_thread_is_reported(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    ps = cluster.connect()
    table = cluster.table(ps)

    def fail(self: object, *_: object) -> object:
        raise MemoryError("no memory")

    monkeypatch.setattr("elasticps.client.core.new_views.ViewRefresh.turn", fail)
    eventually(lambda: ps._dispatcher.error is not None)
    with pytest.raises(eps.Closed, match="MemoryError"):
        table.pull(KEYS)
