"""Servers on Ray, without running Ray: what errors lead to, where room is set aside, which machine is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.core.autoscale import AutoscalePolicy, ScaleDecision
from elasticps.errors import ClusterUnreachable, ConfigError, ServerError

ray = pytest.importorskip("ray")

Eventually = Callable[[Callable[[], bool]], None]


@pytest.mark.parametrize(
    ("error", "serves"),
    [(ServerError("refused"), True), (ConfigError("forked"), True), (ClusterUnreachable("silent"), False)],
)
def test_only_silence_counts_against_a_server(error: Exception, serves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from elasticps.ray import host

    async def fetch_health(*given: Any, **more: Any) -> str:
        raise error

    monkeypatch.setattr(host, "fetch_health", fetch_health)
    assert host._serves("127.0.0.1:1", None) is serves


@pytest.mark.parametrize("closing", [False, True])
def test_an_actor_whose_watch_fails_ends_unless_it_is_closed(closing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from elasticps.ray import host

    def watch(running: Any) -> None:
        raise OSError("no more files")

    ended: list[int] = []
    actor: Any = object.__new__(host.ProcessHost)
    actor._spec = host.HostedProcess("s0", "server", "folder")
    actor._begun, actor._closing = threading.Event(), threading.Event()
    actor._start, actor._watch = (lambda: None), watch
    if closing:
        actor._closing.set()
    monkeypatch.setattr(host, "os", SimpleNamespace(_exit=ended.append))
    actor._run()
    assert ended == ([] if closing else [1])


def test_a_process_found_over_loopback_is_refused_on_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    from elasticps.ray import cluster, host

    one = host.HostedProcess("s1", "server", "folder", machine="10.0.0.1")
    host.check_machine(one, "10.0.0.1")
    host.check_machine(host.HostedProcess("s1", "server", "folder"), "10.0.0.2")
    with pytest.raises(ConfigError, match=r"server s1 cannot run on the machine 10\.0\.0\.2.*insecure=True"):
        host.check_machine(one, "10.0.0.2")

    nodes = [{"NodeID": n, "NodeManagerAddress": f"10.0.0.{n}", "Alive": True} for n in "12"]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    assert cluster._machine("2") == "10.0.0.2"
    begun: Any = object.__new__(cluster.Cluster)
    begun._network = False
    with pytest.raises(ConfigError, match="cannot grow: begin another"):
        begun._check_network()
    begun._network = True
    begun._check_network()


def test_scaling_goes_on_after_any_error(monkeypatch: pytest.MonkeyPatch, eventually: Eventually) -> None:
    from elasticps.ray import autoscaling

    counts = iter([3])

    def client(url: str) -> Any:
        raise KeyError("x")

    monkeypatch.setattr(autoscaling, "OperatorClient", client)
    loop = autoscaling.AutoscaleThread("etcd://x/y", AutoscalePolicy(1, 4), 1, lambda: next(counts), lambda n: None)
    loop.start(0.001)
    try:
        eventually(lambda: len(loop.decisions) == 2)
    finally:
        loop.stop()
    assert list(loop.decisions) == [
        ScaleDecision(3, "cannot scale: KeyError: 'x'"),
        ScaleDecision(3, "cannot scale: StopIteration: "),
    ]


class Group:
    """A placement group on nodes that are given."""

    def __init__(self, nodes: list[str], options: dict[str, Any]) -> None:
        self.nodes = nodes
        self.options = options
        self.bundle_count = len(nodes)

    def ready(self) -> None:
        """Nothing to wait for."""


def test_new_servers_avoid_every_node_with_room_used_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    from elasticps.ray import placement

    made: list[Group] = []
    removed: list[Group] = []

    def placement_group(bundles: list[Any], **options: Any) -> Group:
        first = sum(group.bundle_count for group in made)
        made.append(Group([f"n{first + i}" for i in range(len(bundles))], options))
        return made[-1]

    def table(group: Group) -> dict[str, Any]:
        return {"bundles_to_node_id": dict(enumerate([*group.nodes, ""]))}

    monkeypatch.setattr(placement, "placement_group", placement_group)
    monkeypatch.setattr(placement, "placement_group_table", table)
    monkeypatch.setattr(placement, "remove_placement_group", removed.append)
    monkeypatch.setattr(placement, "ray", SimpleNamespace(get=lambda reference, timeout: None))

    bundles = placement.Bundles(1.0, share_nodes=False)
    bundles.reserve(2, 1.0)
    first = [bundles.take(), bundles.take()]
    bundles.give_back(first[1])
    bundles.reserve(3, 1.0)  # one is free
    assert [group.options["bundle_label_selector"] for group in made] == [None, [{"ray.io/node-id": "!in(n0,n1)"}] * 2]
    assert {group.options["strategy"] for group in made} == {"STRICT_SPREAD"}
    later = [bundles.take(), bundles.take(), bundles.take()]
    assert [(each.group, each.index) for each in later] == [(made[0], 1), (made[1], 0), (made[1], 1)]
    bundles.give_back(later[1])
    assert not removed
    bundles.give_back(later[2])
    assert removed == [made[1]]
    bundles.reserve(1, 1.0)
    assert made[2].options["bundle_label_selector"] == [{"ray.io/node-id": "!in(n0,n1)"}]
    bundles.remove()
    assert removed == [made[1], made[0], made[2]]


def test_an_actor_that_cannot_be_called_does_not_keep_others_from_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    from elasticps.ray import cluster

    def fails() -> None:
        raise RuntimeError("Ray has ended")

    stopped: list[str] = []
    actors = [SimpleNamespace(stop=SimpleNamespace(remote=call)) for call in (fails, lambda: stopped.append("second"))]
    monkeypatch.setattr(ray, "wait", lambda *given, **more: None)
    killed: list[Any] = []
    monkeypatch.setattr(ray, "kill", killed.append)
    cluster._end(actors)
    assert stopped == ["second"]
    assert killed == actors


def test_a_cluster_is_closed_after_ray_without_starting_it_again() -> None:
    from elasticps.ray import cluster, placement

    closed: Any = object.__new__(cluster.Cluster)
    closed.name, closed._autoscale, closed._lock = "ray", None, threading.RLock()
    closed._others, closed._servers, closed._bundles = {"etcd": object()}, {}, placement.Bundles(1.0, False)
    assert not ray.is_initialized()
    closed.close()
    assert not ray.is_initialized()
    assert (closed._others, closed._bundles) == ({}, None)
