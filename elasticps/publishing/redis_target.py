"""Publishes rows into Redis, or whatever speaks its protocol: a key for each row, and one that describes each table."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elasticps.errors import ConfigError
from elasticps.publishing.core.batches import PublishBatch, TableBatch
from elasticps.publishing.core.layout import (
    check_dtype,
    check_prefix,
    description,
    meta_key,
    moment,
    parse_description,
    pattern,
    row_keys,
    sort_keys,
    words,
)
from elasticps.publishing.targets import PublishedSource, PublishError, shown

COMMAND_KEYS = 500  # of one command: others are answered between two
FLIGHT_BYTES = 8 << 20  # sent before their answers are read
SCANNED = 1000  # keys that Redis looks at for one answer
TIMEOUT_S = 10.0
META_S = 1.0  # how often a table's description is written while nothing changes
PASSWORD_VARIABLE = "REDISCLI_AUTH"  # as redis-cli takes it


class RedisTarget:
    """Rows in one database of Redis. See `PublishTarget`."""

    wants_listing = False

    def __init__(self, url: str, source: PublishedSource, dtype: str, prefix: str, pace_s: float) -> None:
        check_dtype(dtype)
        check_prefix(prefix)
        self.pace_s = pace_s
        self._source = source  # whose rows these are
        self._dtype = dtype  # of rows
        self._prefix = prefix  # of all keys
        self._connect = _connector(url)
        self._redis: Any = None  # the client, from `open` on
        self._metas: dict[str, dict[str, Any]] = {}  # of tables that are there
        self._listed: dict[str, list[NDArray[np.int64]]] = {}  # keys of the listing that has begun
        self._described_s = 0.0  # when descriptions were written last

    def open(self) -> None:
        """See `PublishTarget`."""
        self.close()
        with _explained("reached"):
            self._redis = self._connect()
            self._redis.ping()
            _check_no_cluster(self._redis)

    def close(self) -> None:
        """See `PublishTarget`."""
        if self._redis is not None:
            self._redis.close()

    def write(self, batch: PublishBatch) -> None:
        """See `PublishTarget`."""
        with _explained("written to"):
            if batch.begins:
                self._metas, self._listed = {}, {}
            for name, table in batch.tables.items():
                self._write(name, table, batch)
            if batch.complete:
                self._remove_others()
            overdue = time.monotonic() - self._described_s >= META_S
            if batch.tables or batch.complete or overdue:
                self._describe(batch)
                self._described_s = time.monotonic()

    def _write(self, name: str, table: TableBatch, batch: PublishBatch) -> None:
        if table.replaced or table.gone:
            self._remove(sort_keys(self._prefix, self._scan(f"{self._prefix}{name}:")).rows.get(name), name)
        if table.gone:
            self._redis.unlink(meta_key(self._prefix, name))
            self._metas.pop(name, None)
            self._listed.pop(name, None)
            return
        if name not in self._metas:  # before its rows: a later run finds by it what this one leaves
            self._metas[name] = {
                **description(table.spec, self._dtype),
                "cluster": self._source.cluster,
                "application": self._source.application,
            }
            if self._source.share:
                self._metas[name]["share"] = self._source.share
            there = parse_description(self._redis.get(meta_key(self._prefix, name)) or b"")
            if there.get("cluster") == self._source.cluster:
                self._source.check_share(there.get("share"), f"table {name!r} behind {self._prefix!r}")
            self._describe(batch, name)
        self._remove(table.deleted, name)
        self._set(name, table.keys, table.rows)
        if batch.listing or batch.complete:
            listed = self._listed.setdefault(name, [])
            if len(table.deleted):
                listed[:] = [keys[~np.isin(keys, table.deleted)] for keys in listed]
            listed.append(table.keys)

    def _set(self, name: str, keys: NDArray[np.int64], rows: NDArray[np.float32]) -> None:
        width = max(1, words(rows[:1], self._dtype).itemsize * rows.shape[1])
        flight = max(1, FLIGHT_BYTES // (width + 64))
        for start in range(0, len(keys), flight):
            some = slice(start, start + flight)
            names, data = row_keys(self._prefix, name, keys[some]), words(rows[some], self._dtype).tobytes()
            values = [data[i : i + width] for i in range(0, len(data), width)]
            pipe = self._redis.pipeline(transaction=False)
            for at in range(0, len(names), COMMAND_KEYS):
                part = zip(names[at : at + COMMAND_KEYS], values[at : at + COMMAND_KEYS], strict=True)
                pipe.execute_command("MSET", *(each for pair in part for each in pair))
            pipe.execute()

    def _remove(self, keys: NDArray[np.int64] | None, name: str) -> None:
        names = [] if keys is None else row_keys(self._prefix, name, keys)
        for start in range(0, len(names), 100 * COMMAND_KEYS):
            pipe = self._redis.pipeline(transaction=False)
            for at in range(start, min(len(names), start + 100 * COMMAND_KEYS), COMMAND_KEYS):
                pipe.execute_command("UNLINK", *names[at : at + COMMAND_KEYS])
            pipe.execute()

    def _describe(self, batch: PublishBatch, new: str = "") -> None:
        """Says what tables are, and how new; of all, or of a new one. complete: all rows are there; while False, some
        may be old, or missing. Raises PublishError where a description is gone: then rows may be gone, too."""
        state = {"as_of": moment(batch.as_of), "complete": not batch.listing}
        pipe = self._redis.pipeline(transaction=False)
        for name in [new] if new else self._metas:
            pipe.set(meta_key(self._prefix, name), json.dumps(self._metas[name] | state), xx=not new)
        if not all(pipe.execute()):
            raise PublishError("Redis has lost keys that were written: all are written again")

    def _remove_others(self) -> None:
        """Removes rows of this publisher's tables that the listing did not have: an earlier run has left them."""
        listed = {name: np.unique(np.concatenate(parts)) for name, parts in self._listed.items()}
        self._listed = {}
        owned: dict[str, bool] = {}
        for page in self._pages(self._prefix):
            found = sort_keys(self._prefix, page)
            for name, keys in found.rows.items():
                if name in self._metas:
                    self._remove(keys[~np.isin(keys, listed.get(name, keys[:0]))], name)
                elif self._owns(name, owned):
                    self._remove(keys, name)
            for name in found.described - self._metas.keys():
                self._owns(name, owned)
        gone = [meta_key(self._prefix, name) for name, ours in owned.items() if ours]
        if gone:
            self._redis.unlink(*gone)

    def _owns(self, name: str, owned: dict[str, bool]) -> bool:
        """Whether an earlier run of this publisher has left a table."""
        if name not in owned:
            described = parse_description(self._redis.get(meta_key(self._prefix, name)) or b"")
            owned[name] = self._source.owns(name, described.get("cluster"), described.get("application"))
        return owned[name]

    def _scan(self, prefix: str) -> Iterator[bytes]:
        for page in self._pages(prefix):
            yield from page

    def _pages(self, prefix: str) -> Iterator[list[bytes]]:
        """All keys with a prefix, a page at a time."""
        cursor = 0
        while True:
            cursor, page = self._redis.scan(cursor, match=pattern(prefix), count=SCANNED)
            yield page
            if not cursor:
                return


def _connector(url: str) -> Callable[[], Any]:
    """What makes a client. Raises ConfigError for a URL that names no Redis."""
    try:
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry
    except ImportError:
        raise ConfigError(
            "to publish into Redis its client has to be installed: pip install 'elasticps[redis]'"
        ) from None
    given: dict[str, Any] = {
        "socket_timeout": TIMEOUT_S,
        "socket_connect_timeout": TIMEOUT_S,
        "retry": Retry(NoBackoff(), 0),  # what failed is begun again from a listing: Redis may have lost rows meanwhile
        "decode_responses": False,
        "protocol": 2,  # which all that speak it know
        "single_connection_client": True,  # a pool would connect again unnoticed, to a Redis that has lost rows
    }
    if PASSWORD_VARIABLE in os.environ and "@" not in url.partition("://")[2].partition("/")[0]:
        given["password"] = os.environ[PASSWORD_VARIABLE]
    try:
        redis.ConnectionPool.from_url(url)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{shown(url)} is no URL of Redis: {error}") from None
    return lambda: redis.Redis.from_url(url, **given)


def _check_no_cluster(client: Any) -> None:
    """ConfigError for a node of a Redis cluster: one MSET names keys of many of its slots."""
    from redis.exceptions import ResponseError

    try:
        mode = client.info("cluster")
    except ResponseError:  # another server that speaks Redis, and has no INFO
        return
    if mode.get("cluster_enabled"):
        raise ConfigError(
            "this Redis is a node of a cluster, over whose slots rows cannot be written at once: publish to a Redis "
            "with `cluster-enabled no`, or to a folder"
        )


@contextmanager
def _explained(done: str) -> Iterator[None]:
    """Turns errors of the client into PublishError."""
    from redis.exceptions import AuthenticationError, AuthorizationError, NoPermissionError, RedisError

    try:
        yield
    except (AuthenticationError, AuthorizationError, NoPermissionError) as error:
        raise ConfigError(
            f"Redis refuses the password, or there is none: {error}; it belongs into ${PASSWORD_VARIABLE} or the URL"
        ) from None
    except (RedisError, OSError) as error:
        raise PublishError(f"Redis cannot be {done}: {error}") from None
