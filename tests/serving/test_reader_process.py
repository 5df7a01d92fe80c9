"""`elasticps reader` beside real training: rows by gRPC, health by age, pinned to checkpoints, and on again."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import elasticps as eps
from coordinator.core.url import parse
from elasticps.admin.client import fetch_health
from elasticps.errors import ClusterUnreachable, InputError, ServerError, UnknownTable
from elasticps.security import credentials_of
from elasticps.security.authority import Authority
from elasticps.security.identity import Identity
from elasticps.serving.client import FoundRows, lookup

KEYS = np.arange(300)
Wait = Callable[[Callable[[], bool]], None]


class Running(NamedTuple):
    process: subprocess.Popen[str]
    grpc: str
    metrics: int

    def http(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics}{path}", timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def lookup(self, keys: dict[str, Any], url: str | None = None, *, hold: bool = False) -> FoundRows:
        return asyncio.run(lookup(self.grpc, keys, 30, credentials_of(url) if url else None, hold=hold))


@contextmanager
def running_reader(url: str, *options: str) -> Iterator[Running]:
    command = [sys.executable, "-m", "elasticps", "reader", "--url", url, "--name", "r0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        yield Running(process, ready["grpc"], ready["metrics"])
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        assert process.returncode == 0
    finally:
        process.kill()
        process.communicate()


def ask(*arguments: str, code: int = 0) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-m", "elasticps", *arguments], capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout) if done.stdout.startswith("{") else {"error": done.stderr}


def test_a_reader_serves_what_is_trained_and_checkpoints_it_is_pinned_to(
    local_cluster: Callable[..., Any], tmp_path: Path, eventually: Wait
) -> None:
    cluster = local_cluster(servers=3, replicas=2)
    place = f"file://{tmp_path}/checkpoints"
    rng = np.random.default_rng(3)
    with eps.connect(cluster.url, worker="w0") as ps, running_reader(cluster.url, "--max-age", "5s") as reader:
        users = ps.table("users", dim=4, optimizer=eps.Adagrad(lr=0.1), init=eps.Normal(std=0.1, seed=3))
        tower = ps.tensor("tower", init=rng.random((33, 7), np.float32), optimizer=eps.SGD(lr=0.1))

        ps.table("wide", dim=64, optimizer=eps.SGD(lr=0.1))

        def train() -> None:
            grads = rng.random((200, 4), np.float32)
            ps.push({users: (KEYS[:200], grads), tower: np.ones((33, 7), np.float32)}).result()

        def shows(rows: np.ndarray, whole: np.ndarray) -> bool:
            try:
                found = reader.lookup({"users": KEYS, "tower": None}).rows
            except UnknownTable:  # it hears of tables a moment later
                return False
            return bool((found["users"] == rows).all() and (found["tower"] == whole).all())

        def follows() -> bool:
            return shows(users.pull(KEYS), tower.pull())

        states = {}
        for cut in (1, 2, 3):
            train()
            states[cut] = users.pull(KEYS), tower.pull()
            made = ask("checkpoint", "create", place, "--url", cluster.url, "--json")
            assert made["cut"] == cut
        cluster.kill("s1")
        train()
        eventually(follows)
        held = reader.lookup({"users": KEYS}, hold=True)
        assert (held.rows["users"] == users.pull(KEYS)).all()
        assert held.shown.steps[ps.worker.id] == 4

        pinned = ask("readers", "pin", reader.grpc, f"{place}/000002", "--json")
        assert pinned["pinned"] == f"{place}/000002"
        wrong = ask("readers", "pin", reader.grpc, f"{place}/2", code=1)["error"]
        assert f"six digits: {place}/000002?" in wrong
        with pytest.raises(InputError, match="keys must be int64, got float64"):
            reader.lookup({"users": KEYS + 0.5})
        with pytest.raises(InputError, match="ask in parts"):
            reader.lookup({"users": np.arange(3_000_000) + 2**62})
        assert list(pinned["steps"].values()) == [2]
        assert shows(*states[2])
        train()
        assert ask("readers", "roll-back", reader.grpc, place, "--json")["pinned"] == f"{place}/000001"
        assert shows(*states[1])
        assert (reader.lookup({"users": KEYS}, hold=True).rows["users"] == states[1][0]).all()
        assert "no checkpoint before 1" in ask("readers", "roll-back", reader.grpc, place, code=1)["error"]
        assert "no checkpoint 9" in ask("readers", "pin", reader.grpc, f"{place}/000009", code=1)["error"]
        assert shows(*states[1])
        assert "elasticps_reader_pinned 1.0" in reader.http("/metrics")[1]
        assert ask("readers", "pin", reader.grpc, place, "--json")["pinned"] == f"{place}/000003"
        assert shows(*states[3])
        assert ask("readers", "follow", reader.grpc, "--json")["pinned"] == ""
        eventually(follows)

        status = ask("readers", "status", reader.grpc, "--json")
        assert (status["name"], status["tables"], status["pinned"]) == ("r0", ["tower", "users", "wide"], "")
        with pytest.raises(UnknownTable, match="items"):
            reader.lookup({"items": KEYS})
        with pytest.raises(InputError, match="an answer has at most"):
            reader.lookup({"wide": np.zeros(300_000, np.int64)})


def test_a_reader_is_ready_while_its_rows_are_new_enough(local_cluster: Callable[..., Any], eventually: Wait) -> None:
    cluster = local_cluster(servers=1, replicas=1)
    with eps.connect(cluster.url, worker="w0") as ps:
        users = ps.table("users", dim=4, optimizer=eps.SGD(lr=0.1))
        ps.push({users: (KEYS, np.ones((300, 4), np.float32))}).result()
        rows = users.pull(KEYS)
        with running_reader(cluster.url, "--max-age", "1s", "--tables", "users") as reader:
            eventually(lambda: reader.http("/readyz")[0] == 200)
            assert reader.http("/healthz")[0] == 200
            metrics = reader.http("/metrics")[1]
            assert "elasticps_reader_rows 300.0" in metrics
            assert 'elasticps_reader_window_age_seconds{quantile="0.99"}' in metrics
            (server,) = cluster.servers
            os.kill(server.pid, signal.SIGSTOP)
            try:
                eventually(lambda: reader.http("/readyz")[0] == 503)
                assert reader.http("/healthz")[0] == 200
                assert asyncio.run(fetch_health(reader.grpc, 10)) == "NOT_SERVING"
                assert (reader.lookup({"users": KEYS}).rows["users"] == rows).all()
            finally:
                os.kill(server.pid, signal.SIGCONT)
            eventually(lambda: reader.http("/readyz")[0] == 200)
            assert asyncio.run(fetch_health(reader.grpc, 10)) == "SERVING"

            def attached() -> dict[str, Any]:
                (seen,) = ask("status", "--url", cluster.url, "--json")["readers"]
                assert (seen["name"], seen["app"]) == ("r0", "default")
                return dict(seen)

            eventually(lambda: attached()["age_s"] is not None)  # it may just have connected again
            shown = subprocess.run(
                [sys.executable, "-m", "elasticps", "status", "--url", cluster.url], capture_output=True, text=True
            ).stdout
            assert "readers: r0 (" in shown

            taken = ask("reader", "--url", cluster.url, "--listen", reader.grpc, code=2)["error"]
            assert f"--listen {reader.grpc} cannot be had: Address already in use; take another port" in taken
            assert "Traceback" not in taken


def test_other_machines_are_served_with_certificates_only() -> None:
    done = ask("reader", "--url", "etcd://127.0.0.1:1/none", "--host", "0.0.0.0", code=2)
    assert "--insecure" in done["error"]


def test_a_reader_with_tls_reads_its_application_and_changes_nothing(local_cluster: Callable[..., Any]) -> None:
    cluster = local_cluster(servers=1, replicas=1, tls=True)
    files = parse(cluster.url).tls
    assert files is not None
    authority = Authority(Path(files.ca).parent)

    def url_of(who: str) -> str:
        identity = Identity.parse(f"spiffe://elasticps/local/{who}")
        return str(replace(parse(cluster.url), tls=authority.issue(identity)))

    with eps.connect(url_of("worker/ads/*"), worker="w0", app="ads") as ps:
        users = ps.table("users", dim=4, optimizer=eps.SGD(lr=0.1))
        ps.push({users: (KEYS, np.ones((300, 4), np.float32))}).result()
        rows = users.pull(KEYS)
    with running_reader(url_of("reader/ads/r0"), "--app", "ads") as reader:
        for who in ("reader/ads/front", "worker/ads/*"):
            assert (reader.lookup({"users": KEYS}, url_of(who)).rows["users"] == rows).all()
        for who in ("reader/shop/front", "operator/me", "server/s0"):
            with pytest.raises(ServerError, match="may not"):
                reader.lookup({"users": KEYS}, url_of(who))
        with pytest.raises(ClusterUnreachable):
            reader.lookup({"users": KEYS})
        refused = ask("readers", "follow", reader.grpc, "--url", url_of("reader/ads/front"), code=1)
        assert "takes an operator" in refused["error"]
        assert ask("readers", "follow", reader.grpc, "--url", url_of("operator/me"), "--json")["pinned"] == ""
    other = ask("reader", "--url", url_of("reader/shop/r0"), "--app", "ads", code=2)
    assert "reader/shop/r0" in other["error"]
    mends = "cert= and key= in the URL; elasticps certificates"
    with pytest.raises(eps.ConfigError, match=r"reader/ads/r0, not .*worker/ads/w0"):  # it trains nothing
        eps.connect(url_of("reader/ads/r0"), worker="w0", app="ads", timeout=5)
    for who in ("reader/shop/r0", "worker/shop/*"):  # nor reads what is not its application's
        with pytest.raises(eps.ConfigError, match=rf"s0 does not let this reader in: .*{re.escape(who)}, .*{mends}"):
            eps.reader(url_of(who), application="ads", timeout=5)
    with eps.reader(url_of("worker/ads/*"), application="ads", timeout=5) as mine:  # a worker may read what it trains
        assert (mine.pull({"users": KEYS})["users"] == rows).all()
