"""Every manifest of every build against Kubernetes' own schemas, unknown fields refused."""

from __future__ import annotations

import kubernetes_validate
import pytest

from tests.deploy.manifests import BUILDS, DEPLOY, manifests, of_kind

VERSIONS = ("1.35", "1.36", "1.37")
CUSTOM = {  # kinds that operators bring, whose schemas Kubernetes has not
    ("cert-manager.io/v1", "Certificate"),
    ("cert-manager.io/v1", "Issuer"),
    ("monitoring.coreos.com/v1", "PodMonitor"),
    ("monitoring.coreos.com/v1", "PrometheusRule"),
    ("monitoring.coreos.com/v1", "ServiceMonitor"),
    ("jobset.x-k8s.io/v1alpha2", "JobSet"),
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"),
    ("trainer.kubeflow.org/v1alpha1", "TrainingRuntime"),
}


def test_every_kustomization_is_tested() -> None:
    folder = DEPLOY / "kubernetes"
    files = {str(path.parent.relative_to(folder)): path.read_text() for path in folder.rglob("kustomization.yaml")}
    assert {name for name, text in files.items() if "kind: Component\n" not in text} == set(BUILDS)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("build", BUILDS)
def test_every_manifest_fits_its_schema(build: str, version: str) -> None:
    for manifest in manifests(build):
        if (manifest["apiVersion"], manifest["kind"]) not in CUSTOM:
            kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize(
    ("build", "kind", "container"),
    [("workers-jobset", "JobSet", "worker"), ("workers-trainjob", "TrainingRuntime", "node")],
)
def test_workers_of_other_controllers_are_the_jobs_own(build: str, kind: str, container: str) -> None:
    (job,) = of_kind("workers", "Job")
    assert not of_kind(build, "Job")  # which would train beside them
    (found,) = of_kind(build, kind)
    spec = found["spec"]["template"]["spec"] if kind == "TrainingRuntime" else found["spec"]
    (replicated,) = spec["replicatedJobs"]
    job["spec"]["template"]["spec"]["containers"][0]["name"] = container
    assert replicated["template"]["spec"] == job["spec"]
    kubernetes_validate.validate({**job, "spec": replicated["template"]["spec"]}, VERSIONS[-1], strict=True)
    for named in of_kind(build, "TrainJob"):
        assert named["spec"]["runtimeRef"]["name"] == found["metadata"]["name"]
        assert named["spec"]["trainer"]["numNodes"] == job["spec"]["completions"]


@pytest.mark.parametrize("build", BUILDS)
def test_names_are_unique_and_everything_is_in_the_namespace(build: str) -> None:
    found = manifests(build)
    names = [(m["kind"], m["metadata"]["name"]) for m in found]
    assert len(names) == len(set(names))
    if build != "base":
        cluster_wide = {"Namespace", "ClusterRole", "ClusterRoleBinding"}
        assert {m["metadata"].get("namespace") for m in found if m["kind"] not in cluster_wide} == {"elasticps"}


def test_the_schemas_refuse_invalid_manifests() -> None:
    service = next(m for m in manifests("base") if m["kind"] == "Service")
    mistakes: tuple[dict[str, object], ...] = ({"selektor": {}}, {"ports": [{"port": "many"}]})
    for wrong in mistakes:
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate({**service, "spec": {**service["spec"], **wrong}}, VERSIONS[-1], strict=True)
