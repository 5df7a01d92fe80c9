"""Network policies of the rendered overlays, evaluated as Kubernetes does, against the connections of the processes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import pytest

from tests.deploy.manifests import CLUSTERS, COMPONENT, of_kind, selects, workloads

NAMESPACE = "elasticps"
BESIDE = {build: ["workers", "operator", "checkpoints", *(["chaos"] * ("chaos" in build))] for build in CLUSTERS}

Connection = tuple[str, str, str]  # component of the process that connects, of the one that listens, name of its port

EVERYWHERE: set[Connection] = {
    ("coordinator", "etcd", "client"),
    ("server", "etcd", "client"),
    ("worker", "etcd", "client"),
    ("etcd", "etcd", "peer"),
    ("coordinator", "server", "data"),  # views, reports
    ("server", "server", "data"),  # chains
    ("server", "server", "admin"),  # whether another process has its name; whether others leave, too
    ("worker", "server", "data"),
    ("worker", "server", "admin"),  # status, audit, checkpoints
}
ONLY: dict[str, set[Connection]] = {
    "overlays/dev": set(),
    "overlays/production": {
        ("protect", "etcd", "client"),
        ("reader", "etcd", "client"),
        ("reader", "server", "data"),
        ("front", "reader", "grpc"),
        *(("prometheus", component, "metrics") for component in ("etcd", "coordinator", "server", "worker", "reader")),
    },
    "overlays/restored": {("coordinator", "server", "admin")},  # it has servers bring rows back
    "overlays/autoscaled": {("coordinator", "server", "admin")},  # it asks what servers use
    "overlays/chaos": {("chaos", "etcd", "client"), ("chaos", "server", "data"), ("chaos", "server", "admin")},
}
"""What processes of that overlay do beside."""

OUTSIDE: dict[str, set[tuple[str, int, str]]] = {
    "overlays/restored": {(component, 443, "TCP") for component in ("coordinator", "server", "worker")},  # checkpoints
    "overlays/autoscaled": {("coordinator", 443, "TCP"), ("coordinator", 6443, "TCP")},  # the API server
    "overlays/chaos": {("chaos", 443, "TCP"), ("chaos", 6443, "TCP")},  # the API server
}


class Pod(NamedTuple):
    """What policies look at. `namespace` is that of one that selectors of this namespace do not find."""

    labels: dict[str, str]
    ports: dict[str, int]
    namespace: str = NAMESPACE


PROMETHEUS = Pod({"app": "prometheus"}, {}, "monitoring")
ELSEWHERE = Pod({}, {}, "somewhere-else")
STRANGER = Pod({"app": "stranger"}, {})
FRONT = Pod({"elasticps/reads": "true"}, {}, "somewhere-else")  # a service that asks readers


def pods(build: str) -> dict[str, Pod]:
    """By component; those that are applied beside an overlay too."""
    found: dict[str, Pod] = {}
    for each in (w for part in (build, *BESIDE[build]) for w in workloads(part)):
        known = found.setdefault(each.labels[COMPONENT], Pod(each.labels, {}))
        known.ports.update(each.ports)
    return found


def policies(build: str) -> list[dict[str, Any]]:
    return [p["spec"] for part in (build, *BESIDE[build]) for p in of_kind(part, "NetworkPolicy")]


def lets_through(specs: Iterable[dict[str, Any]], source: Pod, target: Pod, port: int, protocol: str = "TCP") -> bool:
    """Returns whether the policies of this namespace allow a connection."""
    specs = list(specs)
    egress = _allows(specs, "Egress", source, target, target, port, protocol)
    return egress and _allows(specs, "Ingress", target, source, target, port, protocol)


def _allows(
    specs: list[dict[str, Any]], direction: str, made: Pod, peer: Pod, target: Pod, port: int, protocol: str
) -> bool:
    """Returns whether the policies of a pod allow one direction of a connection."""
    if made.namespace != NAMESPACE:
        return True
    about = [s for s in specs if direction in s["policyTypes"] and selects(s["podSelector"], made.labels)]
    rules = [rule for spec in about for rule in spec.get(direction.lower(), ())]
    key = "from" if direction == "Ingress" else "to"
    return not about or any(
        (key not in rule or any(_finds(each, peer) for each in rule[key]))
        and ("ports" not in rule or any(_is(each, target, port, protocol) for each in rule["ports"]))
        for rule in rules
    )


def _finds(selector: dict[str, Any], peer: Pod) -> bool:
    assert selector.keys() <= {"podSelector", "namespaceSelector"}, "an address is not evaluated here"
    expected = selector.get("namespaceSelector")
    there = peer.namespace == NAMESPACE if expected is None else selects(expected, _labels_of(peer.namespace))
    return there and selects(selector.get("podSelector", {}), peer.labels)


def _labels_of(namespace: str) -> dict[str, str]:
    return {"kubernetes.io/metadata.name": namespace}


def _is(expected: dict[str, Any], target: Pod, port: int, protocol: str) -> bool:
    assert "endPort" not in expected
    number = expected["port"] if isinstance(expected["port"], int) else target.ports.get(expected["port"])
    return number == port and expected.get("protocol", "TCP") == protocol


@pytest.mark.parametrize("build", CLUSTERS)
def test_policies_allow_exactly_the_connections_of_the_processes(build: str) -> None:
    there, specs = pods(build), policies(build)
    sources = there | {"prometheus": PROMETHEUS, "elsewhere": ELSEWHERE, "stranger": STRANGER, "front": FRONT}
    allowed = {
        (source, target, name)
        for source, one in sources.items()
        for target, other in there.items()
        for name, port in other.ports.items()
        if lets_through(specs, one, other, port)
    }
    assert allowed == EVERYWHERE | ONLY[build]


@pytest.mark.parametrize("build", CLUSTERS)
def test_pods_reach_dns_and_few_ports_outside(build: str) -> None:
    specs = policies(build)
    tried = [(port, protocol) for port in (22, 80, 443, 2379, 6443, 7000) for protocol in ("TCP", "UDP")]
    found = {
        (component, port, protocol)
        for component, pod in pods(build).items()
        for port, protocol in tried
        if lets_through(specs, pod, ELSEWHERE, port, protocol)
    }
    assert found == OUTSIDE.get(build, set())
    for pod in pods(build).values():
        assert lets_through(specs, pod, ELSEWHERE, 53, "UDP")
        assert lets_through(specs, pod, ELSEWHERE, 53, "TCP")
    assert not lets_through(specs, STRANGER, ELSEWHERE, 53, "UDP")


@pytest.mark.parametrize("build", CLUSTERS)
def test_the_evaluation_of_policies_denies_by_default(build: str) -> None:
    """The evaluation itself: a policy without rules isolates a pod, and without policies everything is open."""
    there = pods(build)
    source, target = there["worker"], there["server"]
    closed: list[dict[str, Any]] = [{"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}]
    assert not lets_through(closed, source, target, 7000)
    assert lets_through([], source, target, 7000)
    only_in: list[dict[str, Any]] = [*closed, {"podSelector": {}, "policyTypes": ["Ingress"], "ingress": [{}]}]
    assert not lets_through(only_in, source, target, 7000)
    out: dict[str, Any] = {"podSelector": {}, "policyTypes": ["Egress"], "egress": [{}]}
    assert lets_through([*only_in, out], source, target, 7000)
