"""Threads of a worker that share a cache all get the servers' rows."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import cast

import numpy as np
import pytest

import elasticps as eps
from elasticps.client.cache_batches import CacheBatch, Keys, Rows
from elasticps.client.pull import PullPart, ServerPull
from elasticps.client.pull_layouts import Query
from elasticps.client.reads import Reads
from elasticps.client.row_cache import CachedPull, RowCache
from elasticps.errors import ClusterUnreachable, Timeout
from elasticps.kernels.hashing import table_salt
from elasticps.model.caching import Cache
from elasticps.model.spec import ServerOptimizer, TableSpec

DIM = 3
KEYS = np.arange(10, 18)


def rows_of(keys: Keys) -> Rows:
    """The servers' rows of these keys."""
    return (keys[:, None] * 10 + np.arange(DIM)).astype(np.float32)


class Servers:
    """What a cache asks, and gets at once. failing: so many questions cannot be sent; late: so many are answered by
    nothing, and waits for them end with `Timeout`."""

    begun = 1

    def __init__(self) -> None:
        self.late = self.failing = 0

    def lock(self) -> threading.Lock:
        return threading.Lock()

    def clock(self) -> int:
        return 1

    def start(self, read: ServerPull, cache_age: int = 0) -> ServerPull:
        if self.failing:
            self.failing -= 1
            raise ClusterUnreachable("nobody is there")
        read.clock = 1
        if self.late:
            self.late -= 1
            read.parts = cast(dict[int, PullPart], {1: None})
        else:
            read.value[:] = 0.5 if read.query.slots else rows_of(read.keys)
        return read

    def wait(self, read: ServerPull, timeout: float | None) -> None:
        if not read.done():
            raise Timeout("it took too long")

    def finish(self, read: ServerPull, timeout: float | None) -> None:
        self.wait(read, timeout)


class Cached(RowCache):
    """Before a batch asks, what is in `between` happens: another thread has the processor."""

    def __init__(self, servers: Servers, optimizer: ServerOptimizer | None = None) -> None:
        self.between: list[Callable[[], object]] = []
        spec, salt = TableSpec("t", DIM, optimizer or eps.SGD(0.1)), table_salt(1)

        def prepare(keys: Keys, any_replica: bool) -> ServerPull:
            out = np.empty((len(keys), DIM), np.float32)
            return ServerPull(servers.finish, Query(1, salt, DIM, "t", any_replica), keys, out)

        super().__init__(Cache(rows=64, staleness=2), spec, 1, cast(Reads, servers), prepare)

    def _ask(self, batch: CacheBatch) -> None:
        if self.between:
            self.between.pop()()
        super()._ask(batch)

    def pull(self, keys: Keys = KEYS) -> CachedPull:
        """Asks; what is not filled shows as NaN."""
        return self.start(keys, np.full((len(keys), DIM), np.nan, np.float32), False)


@pytest.fixture
def servers() -> Servers:
    return Servers()


@pytest.fixture
def cache(servers: Servers) -> Cached:
    return Cached(servers)


def test_a_batch_found_by_another_thread_before_its_request_is_sent(cache: Cached) -> None:
    theirs: list[Rows] = []
    cache.between.append(lambda: theirs.append(cache.pull().result()))
    mine = cache.pull().result()
    np.testing.assert_array_equal(theirs[0], rows_of(KEYS))
    np.testing.assert_array_equal(mine, rows_of(KEYS))


def test_a_batch_found_by_another_thread_whose_request_cannot_be_sent(servers: Servers, cache: Cached) -> None:
    theirs: list[Rows] = []

    def other() -> None:
        servers.failing = 1
        theirs.append(cache.pull().result())

    cache.between.append(other)
    mine = cache.pull().result()
    np.testing.assert_array_equal(theirs[0], rows_of(KEYS))
    np.testing.assert_array_equal(mine, rows_of(KEYS))


def test_a_result_can_be_awaited_again_after_its_timeout(servers: Servers, cache: Cached) -> None:
    servers.late = 1
    read = cache.pull()
    with pytest.raises(Timeout):
        read.result(0.1)
    np.testing.assert_array_equal(read.result(), rows_of(KEYS))


def test_a_short_timeout_of_one_thread_gives_up_no_rows_of_another(servers: Servers, cache: Cached) -> None:
    servers.late = 1
    mine = cache.pull()
    np.testing.assert_array_equal(cache.pull(KEYS[:3]).result(0.1), rows_of(KEYS[:3]))
    with pytest.raises(Timeout):
        mine.result(0.1)
    np.testing.assert_array_equal(mine.result(), rows_of(KEYS))


class Between(Servers):
    """What is in `after` happens when a wait has ended with a timeout, before whoever waited does more."""

    after: Callable[[], object] | None = None

    def finish(self, read: ServerPull, timeout: float | None) -> None:
        try:
            self.wait(read, timeout)
        except Timeout as error:
            read.error, read.parts = error, {}  # it is forgotten
            if self.after is not None:
                self.after()
            raise
        if read.error is not None:
            raise read.error


def test_a_result_whose_rows_another_thread_found_given_up_can_be_awaited_again() -> None:
    """Found in a review: it noted the error for whoever would ask, who was told of it each time."""
    servers = Between()
    cache = Cached(servers)
    servers.late, servers.after = 1, lambda: cache.settle(ask=True)
    read = cache.pull()
    with pytest.raises(Timeout):
        read.result(0.1)
    np.testing.assert_array_equal(read.result(), rows_of(KEYS))


def test_rows_that_arrive_after_a_timeout_are_not_written(servers: Servers, cache: Cached) -> None:
    out = np.full((len(KEYS), DIM), np.nan, np.float32)
    servers.late = 1
    read = cache.start(KEYS, out, False)
    batch = read._batch
    with pytest.raises(Timeout):
        read.result(0.1)
    checked = batch.rows
    assert checked is not None
    checked.value[:] = 7.0
    checked.parts = {}
    with cache._guarded():
        cache._keep(batch)  # by a thread that had found it before
    assert np.isnan(out).all()


def test_slots_whose_request_could_not_be_sent_are_forgotten(servers: Servers) -> None:
    """Of several questions one cannot be sent: no other one waits for ever for an answer."""
    cache = Cached(servers, eps.Adagrad(0.1))
    servers.late = 2
    cache.fetch(KEYS, 1)
    cache.fetch(KEYS + 100, 1)
    for batch in list(cache._batches.values()):
        assert batch.rows is not None
        batch.rows.value[:] = rows_of(batch.rows.keys)
        batch.rows.parts = {}
    cache.settle(ask=False)
    assert len(cache._slots) == 2
    servers.failing = 1
    with pytest.raises(ClusterUnreachable):
        cache.settle(ask=True)
    cache.settle(ask=True)
    assert cache._slots == []
    np.testing.assert_array_equal(cache.pull().result(), rows_of(KEYS))
