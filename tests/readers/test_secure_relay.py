"""Relays with TLS: who feeds and who is fed prove it with certificates that the command makes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import elasticps as eps
from coordinator.core.url import parse
from elasticps.readers.peers import parse_relay
from tests import waiting
from tests.processes import reader_process

KEYS = np.arange(2000)
eventually = partial(waiting.eventually, seconds=60.0)


@pytest.fixture(scope="module")
def secure() -> Iterator[eps.LocalCluster]:
    with eps.LocalCluster(servers=2, tls=True) as cluster:
        yield cluster


def certificate(cluster: eps.LocalCluster, who: str) -> str:
    """What the command prints for a URL."""
    files = parse(cluster.url).tls
    assert files is not None
    done = subprocess.run(
        [sys.executable, "-m", "elasticps", "certificates", str(Path(files.ca).parent), f"local/{who}", "--json"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    (made,) = json.loads(done.stdout).values()
    return f"?ca={made['ca']}&cert={made['cert']}&key={made['key']}"


def test_a_relay_with_tls_feeds_those_of_its_application(secure: eps.LocalCluster) -> None:
    rng, plain = np.random.default_rng(1), secure.url.partition("?")[0]
    readers = certificate(secure, "reader/default/r0"), certificate(secure, "reader/default/r1")
    with eps.connect(secure.url, worker="w0") as ps:
        users = ps.table("users", dim=8, optimizer=eps.Adagrad(lr=0.1))

        def push() -> None:
            ps.push({users: (KEYS, rng.random((len(KEYS), 8), np.float32))}).result()

        def shows(reader: Any) -> Callable[[], bool]:
            expected = users.pull(KEYS)
            return lambda: bool((reader.pull({"users": KEYS})["users"] == expected).all())

        push()
        with reader_process(plain + readers[0]) as (_, relay):
            place = f"reader://{relay['pulls']}/local"
            with eps.reader(place + readers[1], every=0.005) as follower:
                for _ in range(30):
                    push()
                eventually(shows(follower))
                follower.hold(timeout=60)
                follower.release()
                # One behind the first is stopped: nobody waits for it.
                with reader_process(place + readers[1]) as (stopped, beside):
                    os.kill(stopped.pid, signal.SIGSTOP)
                    for _ in range(300):
                        push()
                    eventually(shows(follower))
                    os.kill(stopped.pid, signal.SIGCONT)
                    with eps.remote_reader(beside["pulls"], plain + readers[0]) as remote:
                        eventually(shows(remote))
            with eps.reader(place + certificate(secure, "worker/default/w7")) as follower:
                assert shows(follower)()
            for stranger in ("reader/shop/r0", "server/s9", "coordinator/c9"):
                with pytest.raises(eps.Error):
                    eps.reader(place + certificate(secure, stranger), timeout=3)
            with pytest.raises(eps.Error):
                eps.reader(f"reader://{relay['pulls']}", timeout=3)


@pytest.mark.parametrize("who", ["worker/default/w8", "server/s8", "reader/shop/r8", "reader/default/r8"])
def test_who_is_no_reader_of_the_application_feeds_nobody(secure: eps.LocalCluster, who: str) -> None:
    from elasticps.readers.pull_server import PullServer
    from elasticps.security import credentials_of

    plain, mine = secure.url.partition("?")[0], certificate(secure, "reader/default/r2")
    credentials = credentials_of(plain + certificate(secure, who))
    with eps.reader(plain + mine) as source, PullServer(source, "127.0.0.1", 0, credentials) as relay:
        place = f"reader://{relay.address}/local{mine}"
        if who == "reader/default/r8":
            eps.reader(place, timeout=30).close()
        else:
            with pytest.raises(eps.Error, match=r"no reader of this cluster|unsuitable certificate"):
                eps.reader(place, timeout=5)


def test_urls_of_relays_are_checked() -> None:
    assert parse_relay("reader://10.0.0.7:9100", "default") == (("10.0.0.7:9100",), None)
    assert parse_relay("reader://a:1,b:2", "default").addresses == ("a:1", "b:2")
    for wrong in ("reader://", "reader://a:1,a:1", "reader://a:1/x?cert=c", "reader://a:1/x?nothing=1", "reader://a:x"):
        with pytest.raises(eps.ConfigError, match="relay"):
            parse_relay(wrong, "default")
