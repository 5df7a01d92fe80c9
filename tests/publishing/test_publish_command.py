"""`elasticps publish` beside real training: Redis and a folder have what clients read, through a server's death."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import elasticps as eps
from elasticps.publishing.core.layout import sort_keys
from tests.publishing.test_redis import SERVER, RedisServer

KEYS = np.arange(400)


class Publishing:
    """A running `elasticps publish`."""

    def __init__(self, url: str, to: str, *options: str) -> None:
        command = [sys.executable, "-m", "elasticps", "publish", "--url", url, "--to", to, "--json", *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.first = json.loads(self.process.stdout.readline())

    def __enter__(self) -> Publishing:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=60)
        assert self.process.returncode == 130


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer | None]:
    pytest.importorskip("redis")
    running = RedisServer(tmp_path) if SERVER is not None else None
    yield running
    if running is not None:
        running.stop()


def test_both_targets_follow_training_and_a_server_that_dies(
    local_cluster: Callable[..., Any], redis_server: RedisServer | None, tmp_path: Path,
    eventually: Callable[[Callable[[], bool]], None],
) -> None:  # fmt: skip
    rng = np.random.default_rng(7)
    cluster = local_cluster(servers=3, replicas=2)
    folder = tmp_path / "rows"
    with eps.connect(cluster.url, worker="w0") as ps, ExitStack() as stack:
        users = ps.table("users", dim=4, optimizer=eps.Adagrad(lr=0.1), init=eps.Normal(std=0.1, seed=3))
        tower = ps.tensor("tower", init=rng.random((33, 7), np.float32), optimizer=eps.SGD(lr=0.1))
        other = ps.table("other", dim=4, optimizer=eps.SGD(lr=0.1))

        def train() -> None:
            keys = rng.choice(KEYS, 50, replace=False)
            grads = rng.random((50, 4), np.float32)
            ps.push({users: (keys, grads), other: (keys, grads), tower: np.ones((33, 7), np.float32)}).result()

        for _ in range(5):
            train()
        chosen = "--tables", "users,tower"
        running = [stack.enter_context(Publishing(cluster.url, f"file://{folder}", *chosen, "--every", "0.1"))]
        store = None
        if redis_server is not None:
            import redis

            store = redis.Redis.from_url(redis_server.url)
            stack.callback(store.close)
            running.append(stack.enter_context(Publishing(cluster.url, redis_server.url, *chosen)))
        published = eps.read_increments(folder)

        def rows_of_redis(table: str, dim: int) -> dict[int, list[float]]:
            assert store is not None
            found = sort_keys("elasticps:", store.scan_iter(match=f"elasticps:{table}:*", count=1000)).rows
            keys = found.get(table, KEYS[:0]).tolist()
            return {
                key: np.frombuffer(data, "<f4").tolist()
                for key in keys if (data := store.get(f"elasticps:{table}:{key}")) is not None
            }  # fmt: skip

        def same() -> bool:
            there = np.concatenate([KEYS[:0], *users.keys()])
            rows = dict(zip(there.tolist(), users.pull(there).tolist(), strict=True))
            published.refresh()
            shown = published.tables["users"]
            if dict(zip(shown.keys.tolist(), shown.pull(shown.keys).tolist(), strict=True)) != rows:
                return False
            if (published.tables["tower"].tensor() != tower.pull()).any() or "other" in published.tables:
                return False
            if store is None:
                return True
            blocks = rows_of_redis("tower", tower.spec.dim)
            flat = np.concatenate([blocks[i] for i in range(len(blocks))])[: 33 * 7].reshape(33, 7)
            return rows_of_redis("users", 4) == rows and (flat == tower.pull()).all()

        eventually(same)
        for step in range(20):
            train()
            if step == 5:
                users.delete(KEYS[:100])
            if step == 10:
                cluster.kill("s0")
        eventually(same)
        users.clear()
        train()
        eventually(same)
        for each in running:
            each.end()


def test_publish_once_ends_when_all_rows_are_there(local_cluster: Callable[..., Any], tmp_path: Path) -> None:
    cluster = local_cluster(servers=1, replicas=1)
    with eps.connect(cluster.url, worker="w0") as ps:
        users = ps.table("users", dim=4, optimizer=eps.SGD(lr=0.1))
        ps.push({users: (KEYS, np.ones((400, 4), np.float32))}).result()
        command = [
            sys.executable,
            "-m",
            "elasticps",
            "publish",
            "--url",
            cluster.url,
            "--to",
            f"file://{tmp_path}/rows",
        ]
        subprocess.run([*command, "--once"], check=True)
        assert (eps.read_increments(tmp_path / "rows").pull({"users": KEYS})["users"] == users.pull(KEYS)).all()
        for options in (["--to", "s3://bucket"], ["--to", f"file://{tmp_path}/r", "--dtype", "int8"]):
            done = subprocess.run([*command, *options], capture_output=True, text=True)
            assert done.returncode == 2
            assert "error: " in done.stderr


def test_publish_once_ends_when_its_target_stays_away(local_cluster: Callable[..., Any]) -> None:
    pytest.importorskip("redis")
    cluster = local_cluster(servers=1, replicas=1)
    with socket.socket() as nobody:  # bound, and not listening: connections are refused
        nobody.bind(("127.0.0.1", 0))
        to = f"redis://127.0.0.1:{nobody.getsockname()[1]}/0"
        command = [sys.executable, "-m", "elasticps", "publish", "--url", cluster.url, "--to", to, "--once"]
        done = subprocess.run([*command, "--timeout", "3"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 3
    assert f"error: {to} has not got all rows after 3." in done.stderr
    assert "Connection refused" in done.stderr
    assert "see that it runs" in done.stderr
    assert done.stderr.count("is tried again") == 1
    assert done.stdout == ""
