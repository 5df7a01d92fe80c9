from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import pytest

import elasticps as eps


class Connect(Protocol):
    """Connects a worker; every worker of one test shares its tables with no other test."""

    def __call__(self, worker: str = "w0", **arguments: Any) -> eps.Client: ...


def wait_for_others(ps: eps.Client, seconds: float) -> None:
    """For so long the pulls of a worker wait for others from now on; for servers, and all else, as it was connected."""
    ps._parts.reads._wait_ms = int(1000 * seconds)


_shared = ExitStack()
_running: list[eps.LocalCluster] = []


def _end() -> None:
    _running.clear()
    _shared.close()


@pytest.fixture(scope="session")
def ended() -> Iterator[None]:
    """At the latest with the session, before it looks for what was left behind."""
    yield
    _end()


@pytest.fixture(scope="module")
def cluster(ended: None) -> eps.LocalCluster:
    """A cluster shared by all modules that leave it running: starting it costs more than most of their tests."""
    if not _running:
        _running.append(_shared.enter_context(eps.LocalCluster(servers=3)))
    return _running[0]


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """After the last test of this folder it ends: also what does nothing takes a tenth of a core."""
    if nextitem is None or nextitem.path.parent != Path(__file__).parent:
        _end()


_apps = itertools.count()


@pytest.fixture
def connect(cluster: eps.LocalCluster) -> Iterator[Connect]:
    """Afterwards its tables are dropped: audits and listings read all that there are."""
    own = f"app{next(_apps)}"
    apps = {own: None}
    with ExitStack() as clients:

        def new(worker: str = "w0", **arguments: Any) -> eps.Client:
            options: dict[str, Any] = {"app": own, "timeout": 20.0} | arguments
            client = eps.connect(cluster.url, worker=worker, **options)
            clients.callback(client.close)
            apps[client.app] = None
            return client

        yield new
    for app in apps:
        with eps.connect(cluster.url, worker="sweeper", app=app, timeout=20.0) as ps:
            for name in ps.tables():
                ps.drop_table(name)
