"""The rights of the chaos Job against the calls that the code makes."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path

import kubernetes_validate
import yaml

from chaos.live.plan import parse
from tests.deploy.manifests import BUILDS, DEPLOY, ROOT, Manifest, named, of_kind, selects, workload, workloads
from tests.deploy.test_consistency import command
from tests.deploy.test_schemas import VERSIONS

VERBS = {"list": "list", "delete": "delete", "read": "get", "patch": "patch", "replace": "update", "create": "create",
         "connect_get": "get", "connect_post": "create"}  # fmt: skip
RESOURCES = {
    "pod": ("", "pods"),
    "pod_exec": ("", "pods/exec"),
    "node": ("", "nodes"),
    "stateful_set": ("apps", "statefulsets"),
    "stateful_set_scale": ("apps", "statefulsets/scale"),
}
_CALL = re.compile(rf"({'|'.join(VERBS)})_(?:namespaced_)?({'|'.join(sorted(RESOURCES, key=len, reverse=True))})")

Right = tuple[str, str, str]  # group, resource, verb
WITHOUT_A_CALL: dict[Right, str] = {
    ("", "pods/exec", "create"): "a websocket's request counts as one from Kubernetes 1.35 on",
}
CORDON = DEPLOY / "kubernetes/chaos/cordon.yaml"  # rights for plans with the fault `cordon`; applied by itself


def calls() -> Iterator[tuple[Right, Path]]:
    """The requests that code of the chaos Job sends to the API server."""
    for path in sorted((ROOT / "chaos").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and (found := _CALL.fullmatch(node.attr)):
                yield (*RESOURCES[found[2]], VERBS[found[1]]), path


def granted(role: Manifest) -> set[Right]:
    return {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def test_each_right_belongs_to_a_call_and_each_call_has_its_right() -> None:
    made = {right for right, _ in calls()}
    assert len(made) >= 5
    here, nodes = granted(named("chaos", "Role", "elasticps-chaos")), granted(cordon()[0])
    assert made - here == nodes == {("", "nodes", "get"), ("", "nodes", "patch")}
    assert here - made == set(WITHOUT_A_CALL)


def cordon() -> list[Manifest]:
    return list(yaml.safe_load_all(CORDON.read_text(encoding="utf-8")))


def test_the_right_to_cordon_is_granted_separately() -> None:
    for manifest in cordon():
        for version in VERSIONS:
            kubernetes_validate.validate(manifest, version, strict=True)
    role, binding = cordon()
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert [(s["name"], s["namespace"]) for s in binding["subjects"]] == [("elasticps-chaos", "elasticps")]


def test_the_plan_needs_only_the_granted_rights() -> None:
    text = named("chaos", "ConfigMap", "elasticps-chaos")["data"]["plan.yaml"]
    plan = parse(text, "plan", "plan.yaml")
    assert plan.cluster.kind == "kubernetes"
    assert all(fault.do != "cordon" for fault in plan.faults)
    assert plan.cluster.namespace == named("chaos", "Job", "elasticps-chaos")["metadata"]["namespace"]
    assert plan.cluster.url == named("overlays/dev", "ConfigMap", "elasticps")["data"]["url"]
    for component, labels in (
        ("server", plan.cluster.server_labels),
        ("coordinator", plan.cluster.coordinator_labels),
        ("etcd", plan.cluster.etcd_labels),
    ):
        expected = dict(label.split("=") for label in labels.split(","))
        assert [w.labels["app.kubernetes.io/component"] for w in workloads("base") if selects(expected, w.labels)] == [
            component
        ]
    named("base", "StatefulSet", plan.cluster.server_set)
    (stateful,) = (rule for rule in named("chaos", "Role", "elasticps-chaos")["rules"] if "resourceNames" in rule)
    assert stateful["resourceNames"] == [plan.cluster.server_set]


def test_the_autoscaler_may_read_and_change_how_many_servers_there_are_and_nothing_else() -> None:
    build = "overlays/autoscaled"
    (rule,) = named(build, "Role", "elasticps-autoscaler")["rules"]
    assert granted({"rules": [rule]}) == {("apps", "statefulsets/scale", verb) for verb in ("get", "patch")}
    coordinator = workload(build, "coordinator")
    name = next(p for p in command("coordinator").params if p.name == "autoscale_target").default
    assert rule["resourceNames"] == [name] == [workload(build, "server").name]
    (account,) = named(build, "RoleBinding", "elasticps-autoscaler")["subjects"]
    assert (account["name"], account["namespace"]) == (coordinator.spec["serviceAccountName"], "elasticps")
    assert coordinator.flag("autoscale") == "dry-run"
    least, _, most = coordinator.flag("autoscale-servers").partition("-")
    assert int(coordinator.flag("replicas")) < int(coordinator.flag("min-servers")) <= int(least) < int(most)
    tokens = {each.name for each in workloads(build) if each.spec["automountServiceAccountToken"]}
    assert tokens == {coordinator.name}


def test_the_documented_overlay_scales(tmp_path: Path) -> None:
    text = (ROOT / "docs/guides/kubernetes.md").read_text(encoding="utf-8")
    (block,) = (found for found in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL) if "--autoscale=on" in found)
    ours = os.path.relpath(DEPLOY / "kubernetes", tmp_path)
    (tmp_path / "kustomization.yaml").write_text(block.replace("github.com/you/elasticps/deploy/kubernetes", ours))
    coordinator, server = (workload(str(tmp_path), component) for component in ("coordinator", "server"))
    assert (coordinator.flag("autoscale"), coordinator.flag("autoscale-servers")) == ("on", "3-20")
    assert "replicas" not in server.manifest["spec"]


def test_no_other_account_has_rights_and_none_goes_beyond_the_namespace() -> None:
    for build in BUILDS:
        assert not of_kind(build, "ClusterRole", "ClusterRoleBinding")
        assert len(of_kind(build, "Role", "RoleBinding")) == (2 if build in ("chaos", "overlays/autoscaled") else 0)
    binding = named("chaos", "RoleBinding", "elasticps-chaos")
    assert [(s["name"], s["namespace"]) for s in binding["subjects"]] == [("elasticps-chaos", "elasticps")]
    assert binding["roleRef"]["name"] == "elasticps-chaos"
