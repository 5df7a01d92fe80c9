"""`elasticps cluster adopt`: the servers it contacts and how it uses their answers; servers and etcd are fakes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from coordinator.core.view import Roster, ServerInfo, View
from coordinator.memory import MemoryStore
from elasticps.admin.client import Known
from elasticps.cli import cluster
from elasticps.cli.app import app
from elasticps.errors import ClusterUnreachable
from elasticps.system import background
from tests.coordinator import test_adoption

A, B, C = (replace(server, admin=f"{server.name}:1") for server in (*test_adoption.SERVERS, ServerInfo("c", 1, "h:3")))


def view(epoch: int, *servers: ServerInfo) -> View:
    return replace(test_adoption.view(epoch), servers=servers)


class Scene:
    """Servers by their admin addresses, and etcd."""

    def __init__(self) -> None:
        self.store = MemoryStore("test")
        self.known: dict[str, Known] = {}

    def serve(self, server: ServerInfo, view: View) -> None:
        roster = test_adoption.witness("a").roster
        self.known[server.admin] = Known(server.name, server.incarnation, view, roster, 40)

    def adopt(self, *options: str) -> str:
        """Runs the command; its output."""
        requests = ["cluster", "adopt", "--url", "etcd://nowhere/test", "--server", "a:1", *options]
        return " ".join(CliRunner().invoke(app, requests).output.split())

    async def fetch_cluster(self, address: str, *_: Any) -> Known:
        if address not in self.known:
            raise ClusterUnreachable(f"{address} does not answer")
        return self.known[address]

    async def fetch_tables(self, *_: Any) -> list[dict[str, Any]]:
        return []

    async def open_store(self, *_: Any, **options: Any) -> MemoryStore:
        return self.store.client()


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    made = Scene()
    for name in ("fetch_cluster", "fetch_tables", "open_store"):
        monkeypatch.setattr(cluster, name, getattr(made, name))
    return made


def test_servers_that_the_first_server_does_not_know_are_contacted_too(scene: Scene) -> None:
    """It had been cut off. They seemed not to answer, and whoever gave them up lost what they had."""
    scene.serve(A, view(7, A, B))
    for server in (B, C):
        scene.serve(server, view(9, A, B, C))
    assert "adopted: " in scene.adopt()
    entry = background.run(scene.store.get("view"), 30.0)
    assert entry is not None
    assert View.decode(entry.value).servers == (A, B, C)


def test_a_server_that_does_not_answer_is_named_and_can_be_given_up(scene: Scene) -> None:
    for server in (A, B):
        scene.serve(server, view(9, A, B, C))
    assert "no answer from c: bring them back" in scene.adopt()
    assert "adopted: " in scene.adopt("--without", "c")


def test_a_cluster_that_no_worker_has_come_to_is_adopted_too(scene: Scene) -> None:
    """As one that has just come back from a checkpoint. The leader writes no roster before there is a worker."""
    for server in (A, B):
        scene.serve(server, view(3, A, B))
        scene.known[server.admin] = scene.known[server.admin]._replace(roster=None)
    assert "adopted: " in scene.adopt()
    entry = background.run(scene.store.get("roster"), 30.0)
    assert entry is not None
    assert Roster.decode(entry.value).workers == ()
    assert Roster.decode(entry.value).cluster == view(3, A, B).cluster
