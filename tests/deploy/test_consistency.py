"""Names, ports, labels, probes and times of the manifests against each other and against the command line."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.core import TyperCommand, TyperGroup

from coordinator.core.url import parse
from coordinator.core.view import ClusterConfig
from coordinator.etcd_rights import ROOT
from elasticps.cli.app import app
from elasticps.security.identity import Role, host_name, identity_among
from tests.deploy.manifests import (
    BUILDS,
    CLUSTERS,
    COMPONENT,
    DEPLOY,
    Workload,
    environment,
    expanded,
    manifests,
    mentions,
    named,
    of_kind,
    selects,
    workload,
    workloads,
)

DOCS = DEPLOY.parent / "docs"
POD = {
    "POD_NAME": "elasticps-x-0", "POD_IP": "10.0.0.1", "ZONE": "", "WEIGHT": "1.0", "INDEX": "3",
    "ELASTICPS_URL": "etcd://elasticps-etcd-client:2379/train",
}  # fmt: skip
_ALL = [(build, each) for build in BUILDS for each in workloads(build)]
ANY_WORKLOAD = [pytest.param(b, w, id=f"{b}-{w.name}") for b, w in _ALL]
OWN_COMMAND = [pytest.param(b, w, id=f"{b}-{w.name}") for b, w in _ALL if "command" not in w.container]
EVERYWHERE = {each.labels[COMPONENT]: each for build in (CLUSTERS[1], "workers", "chaos") for each in workloads(build)}


# --------------------------------------------------------------------------------------------------- command lines


@pytest.mark.parametrize(("build", "each"), OWN_COMMAND)
def test_the_command_accepts_each_flag_and_value(build: str, each: Workload) -> None:
    name, *arguments = [expanded(arg, environment(each, POD)) for arg in each.args]
    if name == "cluster":
        name = f"{name} {arguments.pop(0)}"
    context = command(name).make_context(name, arguments)  # parses and checks everything, runs nothing
    given = {arg.partition("=")[0] for arg in arguments if arg.startswith("--")}
    assert len(given) == sum(arg.startswith("--") for arg in arguments), "a flag is given twice"
    assert context.params


def test_an_unknown_flag_would_be_found() -> None:
    with pytest.raises(Exception, match="No such option"):
        command("server").make_context("server", ["--url=x", "--name=x", "--prot=1"])


def command(name: str) -> TyperCommand:
    """A command of `elasticps`; `chaos` also where the package was installed before it had that entry point."""
    commands = typer.main.get_command(app)
    assert isinstance(commands, TyperGroup)
    group, _, name = name.rpartition(" ")
    if group:
        commands = commands.commands[group]
        assert isinstance(commands, TyperGroup)
    found = commands.commands.get(name)
    if found is None and name == "chaos":
        alone = typer.Typer()
        alone.command(name)(pytest.importorskip("chaos.live.cli").chaos)
        found = typer.main.get_command(alone)
    assert isinstance(found, TyperCommand), f"there is no command {name}"
    return found


@pytest.mark.parametrize(("build", "each"), ANY_WORKLOAD)
def test_each_variable_is_defined_before_it_is_used(build: str, each: Workload) -> None:
    variables = environment(each, POD)
    for text in mentions([each.container.get("args", []), each.container.get("command", [])]):
        expanded(text, variables)


def scalers_of_servers(build: str) -> list[dict[str, Any]]:
    """The autoscalers whose target is the servers' StatefulSet."""
    scalers = of_kind(build, "HorizontalPodAutoscaler")
    return [each for each in scalers if each["spec"]["scaleTargetRef"]["name"] == "elasticps-server"]


@pytest.mark.parametrize("build", CLUSTERS)
def test_numbers_of_servers_fit_each_other(build: str) -> None:
    coordinator, server = workload(build, "coordinator"), workload(build, "server")
    config = ClusterConfig(*(int(coordinator.flag(name)) for name in ("ranges", "replicas", "min-servers")))
    scalers = scalers_of_servers(build)
    assert len(scalers) == (0 if "replicas" in server.manifest["spec"] else 1)
    least = scalers[0]["spec"]["minReplicas"] if scalers else server.manifest["spec"]["replicas"]
    assert config.replicas < config.min_servers <= least  # one may drain, or die, and every chain stays whole


@pytest.mark.parametrize("build", CLUSTERS)
def test_times_fit_each_other(build: str) -> None:
    server, coordinator = workload(build, "server"), workload(build, "coordinator")
    drain_s = float(server.flag("drain-timeout"))
    # A server with the last copy of a range stays beyond its time; Kubernetes kills it none the less after its own.
    assert server.spec["terminationGracePeriodSeconds"] >= 5 * drain_s
    for each, wait_s in ((server, server.flag("wait")), (coordinator, coordinator.flag("timeout"))):
        startup, liveness = each.container["startupProbe"], each.container["livenessProbe"]
        assert startup["periodSeconds"] * startup["failureThreshold"] >= float(wait_s) + 30
        assert liveness["periodSeconds"] * liveness["failureThreshold"] >= 60
    for scaler in scalers_of_servers(build):
        down = scaler["spec"]["behavior"]["scaleDown"]
        assert down["policies"] == [{"type": "Pods", "value": 1, "periodSeconds": 900}]
        assert down["policies"][0]["periodSeconds"] >= drain_s
        assert down["stabilizationWindowSeconds"] >= drain_s


# --------------------------------------------------------------------------------------------------- ports and probes


@pytest.mark.parametrize("build", CLUSTERS)
def test_ports_match_the_flags(build: str) -> None:
    server, coordinator, etcd = (workload(build, name) for name in ("server", "coordinator", "etcd"))
    flags = {"data": "port", "admin": "admin-port", "metrics": "metrics-port"}
    assert server.ports == {name: int(server.flag(flag)) for name, flag in flags.items()}
    assert coordinator.ports == {"metrics": int(coordinator.flag("metrics-port"))}
    urls = {"client": "listen-client-urls", "peer": "listen-peer-urls", "metrics": "listen-metrics-urls"}
    assert etcd.ports == {name: int(etcd.flag(flag).rpartition(":")[2]) for name, flag in urls.items()}
    for each in (server, coordinator):
        assert each.flag("host") == "0.0.0.0"
    assert server.flag("advertise") == "$(POD_IP)"


@pytest.mark.parametrize(("build", "each"), ANY_WORKLOAD)
def test_probes_ask_declared_ports(build: str, each: Workload) -> None:
    probes = {name: each.container[name] for name in ("startupProbe", "readinessProbe", "livenessProbe")
              if name in each.container}  # fmt: skip
    for probe in probes.values():
        assert probe["httpGet"]["port"] == "metrics"  # which has no TLS
    assert len(probes) == (0 if "Job" in each.manifest["kind"] else 3)


def test_probes_ask_whether_a_server_serves_and_never_etcds_quorum() -> None:
    for build in CLUSTERS:
        probes = {p: workload(build, "server").container[f"{p}Probe"] for p in ("startup", "readiness", "liveness")}
        paths = {name: probe["httpGet"]["path"] for name, probe in probes.items()}
        assert paths == {"startup": "/readyz", "readiness": "/readyz", "liveness": "/healthz"}
        etcd = workload(build, "etcd").container["livenessProbe"]["httpGet"]["path"]
        assert "serializable=true" in etcd  # answered by the member alone, without a quorum


@pytest.mark.parametrize("build", CLUSTERS)
def test_services_find_their_pods_and_ports(build: str) -> None:
    services = {m["metadata"]["name"]: m["spec"] for m in of_kind(build, "Service")}
    for spec in services.values():
        (target,) = (each for each in workloads(build) if selects(spec["selector"], each.labels))
        for port in spec["ports"]:
            assert target.ports[port["targetPort"]] == port["port"]
    for each in workloads(build):
        if each.manifest["kind"] == "StatefulSet":
            spec = services[each.manifest["spec"]["serviceName"]]
            assert spec["clusterIP"] == "None"
            assert spec["publishNotReadyAddresses"] is True
            assert selects(spec["selector"], each.labels)


@pytest.mark.parametrize(("build", "each"), ANY_WORKLOAD)
def test_workloads_select_their_own_pods(build: str, each: Workload) -> None:
    if "Job" not in each.manifest["kind"]:
        assert selects(each.manifest["spec"]["selector"], each.labels)
    constraints: list[Any] = list(each.spec.get("topologySpreadConstraints", ()))
    anti = each.spec.get("affinity", {}).get("podAntiAffinity", {})
    constraints += anti.get("requiredDuringSchedulingIgnoredDuringExecution", ())
    constraints += [t["podAffinityTerm"] for t in anti.get("preferredDuringSchedulingIgnoredDuringExecution", ())]
    for constraint in constraints:
        assert selects(constraint["labelSelector"], each.labels)
        assert sum(selects(constraint["labelSelector"], other.labels) for other in EVERYWHERE.values()) == 1


# ------------------------------------------------------------------------------------------------------- scheduling


@pytest.mark.parametrize(("build", "each"), ANY_WORKLOAD)
def test_a_lost_zone_does_not_keep_replacements_from_other_zones(build: str, each: Workload) -> None:
    """Nodes that cannot be reached are tainted: unless taints count, their zone is one with room for the next pod."""
    for constraint in each.spec.get("topologySpreadConstraints", ()):
        if constraint["whenUnsatisfiable"] == "DoNotSchedule":
            assert constraint["nodeTaintsPolicy"] == "Honor"


def test_the_dev_cluster_and_the_example_fit_on_three_nodes_of_two_cores() -> None:
    """Each node has a tenth of a core less, for the system's own pods."""
    expected = []
    for each in (*workloads("overlays/dev"), *workloads("workers"), *workloads("operator")):
        spec = each.manifest["spec"]
        cpu = each.container["resources"]["requests"]["cpu"]
        millis = int(cpu[:-1]) if cpu.endswith("m") else 1000 * int(cpu)
        expected += [millis] * spec.get("replicas", spec.get("parallelism", 1))
    free = [1900] * 3
    for millis in sorted(expected, reverse=True):
        free.sort()
        free[-1] -= millis
    assert min(free) >= 0


# ------------------------------------------------------------------------------------------------------- production


@pytest.mark.parametrize("build", CLUSTERS)
def test_budgets_cover_each_kind_of_process(build: str) -> None:
    budgets = of_kind(build, "PodDisruptionBudget")
    for each in (each for each in workloads(build) if each.manifest["kind"] != "Job"):
        (budget,) = (b for b in budgets if selects(b["spec"]["selector"], each.labels))
        assert budget["spec"]["maxUnavailable"] == 1


def test_policies_name_existing_pods_and_ports() -> None:
    for policy in (p for build in (CLUSTERS[1], "chaos") for p in of_kind(build, "NetworkPolicy")):
        spec = policy["spec"]
        roles = [each for each in EVERYWHERE.values() if selects(spec["podSelector"], each.labels)]
        assert roles
        for rule in spec.get("ingress", ()):
            for port in rule["ports"]:
                assert any(port["port"] in each.ports for each in roles)
        for rule in spec.get("egress", ()):
            peers = [p["podSelector"] for p in rule.get("to", ())]
            assert peers or {port["port"] for port in rule["ports"]} in ({53}, {443, 6443})
            for peer in peers:
                (target,) = (each for each in EVERYWHERE.values() if selects(peer, each.labels))
                assert {port["port"] for port in rule["ports"]} <= set(target.ports.values())


@pytest.mark.parametrize("build", CLUSTERS)
def test_traffic_is_denied_to_every_pod_unless_a_policy_allows_it(build: str) -> None:
    everything = [p["spec"] for p in of_kind(build, "NetworkPolicy") if not p["spec"]["podSelector"]]
    assert everything == [{"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}]


@pytest.mark.parametrize("build", BUILDS)
def test_only_for_chaos_runs_processes_share_a_namespace(build: str) -> None:
    shared = {each.labels[COMPONENT] for each in workloads(build) if each.spec.get("shareProcessNamespace")}
    assert shared == ({"server", "coordinator"} if build == "overlays/chaos" else set())


def test_monitors_and_the_autoscaler_find_their_targets() -> None:
    build = "overlays/production"
    monitor = named(build, "ServiceMonitor", "elasticps")["spec"]
    services = [m for m in of_kind(build, "Service") if selects(monitor["selector"], m["metadata"]["labels"])]
    assert {m["metadata"]["name"] for m in services} == {
        "elasticps-etcd", "elasticps-coordinator", "elasticps-server", "elasticps-reader",
    }  # fmt: skip
    for service in services:
        assert {e["port"] for e in monitor["endpoints"]} <= {port["name"] for port in service["spec"]["ports"]}
    workers = named(build, "PodMonitor", "elasticps-worker")["spec"]
    assert selects(workers["selector"], EVERYWHERE["worker"].labels)
    assert workers["podMetricsEndpoints"][0]["port"] in EVERYWHERE["worker"].ports
    for name in ("elasticps-server", "elasticps-reader"):
        target = named(build, "HorizontalPodAutoscaler", name)["spec"]["scaleTargetRef"]
        scaled = named(build, target["kind"], target["name"])
        assert scaled["apiVersion"] == target["apiVersion"]
        assert "replicas" not in scaled["spec"]  # to apply it must not set them back


def test_readers_are_ready_by_age_and_an_update_leaves_no_fewer() -> None:
    reader = workload("overlays/production", "reader")
    assert reader.ports == {"grpc": int(reader.flag("grpc-port")), "metrics": int(reader.flag("metrics-port"))}
    assert reader.flag("max-age") == "60s"
    startup, readiness, liveness = (reader.container[f"{each}Probe"] for each in ("startup", "readiness", "liveness"))
    assert (startup["httpGet"]["path"], readiness["httpGet"]["path"]) == ("/readyz", "/readyz")
    assert liveness["httpGet"]["path"] == "/healthz"
    assert startup["periodSeconds"] * startup["failureThreshold"] >= float(reader.flag("timeout")) + 30
    assert reader.manifest["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
    assert "--insecure" not in reader.args


# --------------------------------------------------------------------------------------------------------- etcd, TLS


@pytest.mark.parametrize("build", CLUSTERS)
def test_the_url_leads_to_etcd(build: str) -> None:
    url = parse(named(build, "ConfigMap", "elasticps")["data"]["url"])
    etcd = workload(build, "etcd")
    count = etcd.manifest["spec"]["replicas"]
    members = [f"{etcd.name}-{i}.{etcd.manifest['spec']['serviceName']}" for i in range(count)]
    secure = url.tls is not None
    assert etcd.flag("initial-cluster") == ",".join(
        f"{etcd.name}-{i}={'https' if secure else 'http'}://{member}:2380" for i, member in enumerate(members)
    )
    assert all(etcd.flag(f"listen-{which}-urls").startswith("https:") == secure for which in ("client", "peer"))
    if url.tls is None:
        assert url.endpoints == ("elasticps-etcd-client:2379",)
        named(build, "Service", "elasticps-etcd-client")
        return
    assert url.endpoints == tuple(f"{member}:2379" for member in members)
    certificates = {m["spec"]["secretName"]: m["spec"] for m in of_kind(build, "Certificate")}
    for role in ("server", "peer"):
        assert set(members) <= set(certificates[f"elasticps-etcd-{role}"]["dnsNames"])
    assert {"name": "ETCD_TLS_MIN_VERSION", "value": "TLS1.3"} in etcd.container["env"]
    assert certificates["elasticps-server"]["dnsNames"] == [host_name(url.cluster)]
    assert certificates["elasticps-reader"]["dnsNames"] == [host_name(url.cluster, Role.READER)]
    holders = {role: EVERYWHERE[role] for role in ("coordinator", "server", "worker", "reader")}
    for role, each in (holders | {"operator": workload("operator", "worker")}).items():
        (mount,) = (m for m in each.container["volumeMounts"] if m["name"] == "identity")
        files = {f"{mount['mountPath']}/{file}" for file in ("ca.crt", "tls.crt", "tls.key")}
        assert {url.tls.ca, url.tls.cert, url.tls.key} == files
        (volume,) = (v for v in each.spec["volumes"] if v["name"] == "identity")
        certificate = certificates[volume["secret"]["secretName"]]
        identity = identity_among(certificate["uris"])
        assert (identity.cluster, identity.role, identity.name) == (url.cluster, role, "*")
        assert certificate["commonName"] == identity.common_name
        assert ("server auth" in certificate["usages"]) == (role in ("server", "reader"))


def test_with_tls_a_pod_waits_for_the_secret_that_has_its_certificate(tmp_path: Path) -> None:
    """One that started before it was there would see an empty folder for as long as it lives."""
    parts = [DEPLOY / "kubernetes" / each for each in (CLUSTERS[1], "workers", "operator", "identity")]
    resources, component = [os.path.relpath(part, tmp_path) for part in parts[1:3]], os.path.relpath(parts[3], tmp_path)
    text = json.dumps({"resources": resources, "components": [component]})
    (tmp_path / "kustomization.yaml").write_text(text, encoding="utf-8")
    for each in (*workloads(CLUSTERS[1]), *workloads(str(tmp_path))):
        secrets = [volume["secret"] for volume in each.spec["volumes"] if "secret" in volume]
        assert secrets
        assert not any(secret.get("optional") for secret in secrets), each.name


def test_a_chaos_run_has_no_certificate() -> None:
    assert not [volume for volume in EVERYWHERE["chaos"].spec["volumes"] if "secret" in volume]


@pytest.mark.parametrize(
    ("page", "build", "others"),
    [("guides/kubernetes.md", CLUSTERS[1], ("workers", "operator", "checkpoints")), ("guides/chaos.md", "chaos", ())],
)
def test_the_documented_overlay_sets_the_registry_of_every_image(
    page: str, build: str, others: tuple[str, ...], tmp_path: Path
) -> None:
    """What was pushed to a registry was asked for under a name that only nodes know where it was loaded."""
    text = (DOCS / page).read_text(encoding="utf-8")
    (block,) = (found for found in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL) if found.startswith("resources:"))
    where = "github.com/you/elasticps/deploy/kubernetes/"
    assert block.count(where + build) == 1
    alike = "".join(part for part in text.split("\n\n") if f"`resources: [{where}" in part)
    for each in (build, *others):
        assert each == build or f"`{each}`" in alike
        folder = tmp_path / each
        folder.mkdir(parents=True)
        ours = os.path.relpath(DEPLOY / "kubernetes" / each, folder)
        (folder / "kustomization.yaml").write_text(block.replace(where + build, ours), encoding="utf-8")
        images = {
            w.container["image"].partition("@")[0] for w in workloads(str(folder)) if w.labels[COMPONENT] != "etcd"
        }
        assert images == {"REGISTRY/elasticps-chaos" if build == "chaos" else "REGISTRY/elasticps"}


def test_only_the_job_that_sets_up_etcd_has_its_certificate() -> None:
    build = CLUSTERS[1]
    each = workload(build, "protect")
    url = parse(
        environment(each, {"ELASTICPS_URL": named(build, "ConfigMap", "elasticps")["data"]["url"]})["ELASTICPS_URL"]
    )
    assert url.tls is not None
    (mount,) = (m for m in each.container["volumeMounts"] if m["name"] == "identity")
    assert {url.tls.ca, url.tls.cert, url.tls.key} == {
        f"{mount['mountPath']}/{f}" for f in ("ca.crt", "tls.crt", "tls.key")
    }
    secrets = {
        w.name: {v["secret"]["secretName"] for v in w.spec["volumes"] if "secret" in v} for w in workloads(build)
    }
    (certificate,) = (m["spec"] for m in of_kind(build, "Certificate") if m["spec"]["commonName"] == ROOT)
    assert [name for name, found in secrets.items() if certificate["secretName"] in found] == [each.name]
    assert secrets[each.name] == {certificate["secretName"]}
    assert each.manifest["spec"]["ttlSecondsAfterFinished"] > 0, (
        "a Job cannot be changed: it has to go, to be applied again"
    )


@pytest.mark.parametrize("build", CLUSTERS)
def test_servers_without_tls_are_allowed_only_in_builds_without_it(build: str) -> None:
    url = parse(named(build, "ConfigMap", "elasticps")["data"]["url"])
    assert ("--insecure" in workload(build, "server").args) == (url.tls is None)


@pytest.mark.parametrize(("build", "each"), ANY_WORKLOAD)
def test_every_object_that_a_pod_refers_to_exists(build: str, each: Workload) -> None:
    cluster = manifests(build) + (manifests("base") if build in ("workers", "checkpoints", "operator", "chaos") else [])
    there = {(m["kind"], m["metadata"]["name"]) for m in cluster}
    there |= {("Secret", m["spec"]["secretName"]) for m in cluster if m["kind"] == "Certificate"}
    assert ("ServiceAccount", each.spec["serviceAccountName"]) in there
    for volume in each.spec.get("volumes", ()):
        if "secret" in volume and not volume["secret"].get("optional"):
            assert ("Secret", volume["secret"]["secretName"]) in there
        if "configMap" in volume:
            assert ("ConfigMap", volume["configMap"]["name"]) in there
    for variable in each.container.get("env", ()):
        if "configMapKeyRef" in variable.get("valueFrom", {}):
            assert ("ConfigMap", variable["valueFrom"]["configMapKeyRef"]["name"]) in there
    claims = {claim["metadata"]["name"] for claim in each.manifest["spec"].get("volumeClaimTemplates", ())}
    volumes = {volume["name"] for volume in each.spec.get("volumes", ())} | claims
    assert {mount["name"] for mount in each.container.get("volumeMounts", ())} <= volumes


# ----------------------------------------------------------------------------------------------------- least rights


@pytest.mark.parametrize(("build", "each"), ANY_WORKLOAD)
def test_pods_run_with_few_privileges(build: str, each: Workload) -> None:
    pod, container = each.spec["securityContext"], each.container["securityContext"]
    assert pod["runAsNonRoot"] is True
    assert pod["runAsUser"] > 0
    assert pod["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["readOnlyRootFilesystem"] is True
    assert container["allowPrivilegeEscalation"] is False
    assert container["capabilities"] == {"drop": ["ALL"]}
    resources = each.container["resources"]
    assert {"cpu", "memory"} <= set(resources["requests"])
    assert "memory" in resources["limits"]
    asks_kubernetes = each.labels[COMPONENT] == "chaos" or any(arg.startswith("--autoscale") for arg in each.args)
    assert each.spec.get("automountServiceAccountToken", True) is asks_kubernetes
    image = each.container["image"]  # what runs is said exactly; ours has a digest only once somebody has built it
    assert re.search(r":\d+\.\d+\.\d+$" if image.startswith("elasticps") else r":v?[\d.]+@sha256:[0-9a-f]{64}$", image)
