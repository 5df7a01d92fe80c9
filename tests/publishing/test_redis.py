"""Publishing into a real Redis: it has the rows, and no others, through restarts and what earlier runs have left."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elasticps.errors import ConfigError
from elasticps.publishing import Publisher
from elasticps.publishing.core.layout import META, floats, sort_keys
from elasticps.publishing.opening import target_of
from elasticps.publishing.redis_target import PASSWORD_VARIABLE
from elasticps.publishing.targets import PublishedSource, PublishError, PublishTarget
from elasticps.security.authority import Authority
from tests import waiting
from tests.publishing.fake_reader import DIM, FakeReader, row

redis = pytest.importorskip("redis")
SERVER = shutil.which("redis-server")
eventually = partial(waiting.eventually, seconds=60.0)
pytestmark = pytest.mark.skipif(SERVER is None, reason="no redis-server: apt-get install redis-server")

SOURCE = PublishedSource("fake", "default", None)
PREFIX = "p[1]:"


class RedisServer:
    """A real server on a free port of the loopback address, which forgets everything when it ends."""

    def __init__(self, folder: Path, *options: str, tls: bool = False) -> None:
        self._folder, self._options, self._tls = folder, options, tls
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/3"
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        assert SERVER is not None
        ports = ["--port", "0", "--tls-port", str(self.port)] if self._tls else ["--port", str(self.port)]
        command = [SERVER, *ports, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self._process = subprocess.Popen(
            [*command, "--dir", str(self._folder), *self._options], stdout=subprocess.DEVNULL
        )
        eventually(self._answers)

    def _answers(self) -> bool:
        with socket.socket() as probe:
            return not probe.connect_ex(("127.0.0.1", self.port))

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    running = RedisServer(tmp_path)
    yield running
    running.stop()


@pytest.fixture
def store(server: RedisServer) -> Iterator[Any]:
    client = redis.Redis.from_url(server.url)
    yield client
    client.close()


def target(server: RedisServer, source: PublishedSource = SOURCE, dtype: str = "float32") -> PublishTarget:
    return target_of(server.url, source, dtype, PREFIX, 0.0)


def content(store: Any, dtype: str = "float32") -> dict[str, dict[int, list[float]]]:
    names = list(store.scan_iter(count=1000))
    found = sort_keys(PREFIX, names)
    tables: dict[str, dict[int, list[float]]] = {table: {} for table in found.described}
    width = "<f4" if dtype == "float32" else "<f2" if dtype == "float16" else "<u2"
    for table, keys in found.rows.items():
        for key in keys.tolist():
            data = store.get(f"{PREFIX}{table}:{key}")
            if data is not None:
                tables.setdefault(table, {})[key] = floats(np.frombuffer(data, width), dtype).tolist()
    return tables


def test_redis_follows_changes_deletions_and_drops(server: RedisServer, store: Any) -> None:
    reader = FakeReader()
    reader.push("users", {1: 1, 2: 2, -(2**63): 3})
    reader.push("us:er", {})
    with Publisher(reader, target(server), server.url) as publisher:
        publisher.wait()
        assert content(store) == reader.expected()
        for step in range(200):
            reader.push("users", {step: step, 2: 50 + step}, (1,) if step == 5 else ())
            reader.push("us:er", {step: 1})
        reader.drop("us:er")
        reader.push("more", {1: 1})
        eventually(lambda: content(store) == reader.expected())
        reader.push("us:er", {7: 7})
        eventually(lambda: content(store) == reader.expected())
        meta = json.loads(store.get(f"{PREFIX}users:{META}"))
        assert (meta["dtype"], meta["dim"], meta["shape"], meta["complete"]) == ("float32", DIM, None, True)
        assert (meta["cluster"], meta["application"]) == ("fake", "default")
        assert set(meta["as_of"]) == {"time_s", "epoch", "steps"}
        assert publisher.stats().lag_s < 60


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rows_are_written_in_the_type_that_was_asked_for(server: RedisServer, store: Any, dtype: str) -> None:
    reader = FakeReader()
    reader.push("users", {1: 1, 2: 2})
    with Publisher(reader, target(server, dtype=dtype), server.url) as publisher:
        publisher.wait()
        assert content(store, dtype) == reader.expected()
        assert len(store.get(f"{PREFIX}users:1")) == 2 * DIM


def test_what_an_earlier_run_has_left_goes_and_what_is_others_stays(server: RedisServer, store: Any) -> None:
    reader = FakeReader()
    reader.push("users", dict.fromkeys(range(3000), 1))
    reader.push("gone", {1: 1})
    with Publisher(reader, target(server), server.url) as publisher:
        publisher.wait()
    others = {
        f"{PREFIX}users": b"of somebody else", f"{PREFIX}foreign:1": b"no table of ours", "users:1": b"outside",
        f"{PREFIX}theirs:1": b"of another cluster",
        f"{PREFIX}theirs:{META}": json.dumps({"cluster": "other", "application": "default"}).encode(),
    }  # fmt: skip
    store.mset(others)
    del reader.tables["gone"]
    reader.tables["users"] = {1: 5, 2: 6}
    with Publisher(reader, target(server), server.url) as publisher:
        publisher.wait()
    left = {name.decode() for name in store.scan_iter(count=1000)}
    assert left == {*others, f"{PREFIX}users:1", f"{PREFIX}users:2", f"{PREFIX}users:{META}"}


def test_a_publisher_of_some_tables_leaves_the_others_alone(server: RedisServer, store: Any) -> None:
    users, items = FakeReader(), FakeReader()
    users.push("users", {1: 1})
    items.push("items", {1: 1})
    for reader, name in ((users, "users"), (items, "items"), (users, "users")):
        source = PublishedSource("fake", "default", frozenset([name]))
        with Publisher(reader, target(server, source), server.url) as publisher:
            publisher.wait()
    assert content(store) == users.expected() | items.expected()


def test_a_restarted_redis_gets_everything_again(server: RedisServer, store: Any) -> None:
    reader = FakeReader()
    reader.push("users", {key: key for key in range(100)})
    with Publisher(reader, target(server), server.url) as publisher:
        publisher.wait()
        server.stop()
        for step in range(50):
            reader.push("users", {step: 1000 + step}, (99,))
        eventually(lambda: publisher.stats().retries > 0)
        server.start()
        eventually(lambda: publisher.stats().listings == 2)
        eventually(lambda: content(store) == reader.expected())
        reader.push("users", {5: 5})
        eventually(lambda: content(store) == reader.expected())


def test_rows_that_others_have_deleted_come_again(server: RedisServer, store: Any) -> None:
    reader = FakeReader()
    reader.push("users", {key: key for key in range(100)})
    with Publisher(reader, target(server), server.url) as publisher:
        publisher.wait()
        store.flushall()

        def listed_again() -> bool:
            reader.push("users", {1: 1})
            return publisher.stats().listings > 1

        eventually(listed_again)
        eventually(lambda: content(store) == reader.expected())


def refuses(server: RedisServer, match: str) -> None:
    """What is pushed is not written, and why is said."""
    reader = FakeReader()
    reader.push("users", {1: 1})
    with Publisher(reader, target(server), server.url) as publisher, pytest.raises(ConfigError, match=match):
        publisher.wait()


def test_a_password_is_needed_and_taken_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = RedisServer(tmp_path, "--requirepass", "open sesame")
    try:
        refuses(server, "password")
        reader = FakeReader()
        reader.push("users", {1: 1})
        monkeypatch.setenv(PASSWORD_VARIABLE, "open sesame")
        with Publisher(reader, target(server), server.url) as publisher:
            publisher.wait()
    finally:
        server.stop()


def test_a_node_of_a_cluster_is_refused(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        bus = free.getsockname()[1]
    server = RedisServer(tmp_path, "--cluster-enabled", "yes", "--cluster-port", str(bus))
    server.url = server.url.removesuffix("/3")
    try:
        refuses(server, "is a node of a cluster")
    finally:
        server.stop()


def test_a_url_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="no URL of Redis") as refused:
        target_of("redis://me:secret@127.0.0.1:port/1", SOURCE, "float32", PREFIX, 0)
    assert "secret" not in str(refused.value)


def test_the_sample_in_the_docs_reads_rows(server: RedisServer, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs/reference/published.md").read_text("utf-8")
    (sample,) = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    reader = FakeReader()
    reader.push("users", {1: 1, 2: 2})
    with Publisher(reader, target_of(server.url, SOURCE, "float32", "elasticps:", 0), server.url) as publisher:
        publisher.wait()
    monkeypatch.setattr(redis, "Redis", lambda: store)
    scope: dict[str, Any] = {}
    exec(sample, scope)
    assert [None if row is None else row.tolist() for row in scope["rows"]] == [row(1), row(2), None]


def test_rows_travel_with_tls(tmp_path: Path) -> None:
    authority = Authority.create(tmp_path / "authority")
    files = authority.issue_etcd(["127.0.0.1"])
    tls = ["--tls-cert-file", files.cert, "--tls-key-file", files.key, "--tls-ca-cert-file", files.ca]
    server = RedisServer(tmp_path, *tls, "--tls-auth-clients", "no", tls=True)
    try:
        reader = FakeReader()
        reader.push("users", {1: 1})
        url = f"rediss://127.0.0.1:{server.port}/0?ssl_ca_certs={files.ca}"
        with Publisher(reader, target_of(url, SOURCE, "float32", PREFIX, 0), "redis") as publisher:
            publisher.wait()
        with redis.Redis.from_url(url) as store:
            assert content(store) == reader.expected()
        stranger = Authority.create(tmp_path / "another").ca
        other = target_of(f"rediss://127.0.0.1:{server.port}/0?ssl_ca_certs={stranger}", SOURCE, "float32", PREFIX, 0)
        with pytest.raises(PublishError, match="certificate"):
            other.open()
        other.close()
    finally:
        server.stop()
