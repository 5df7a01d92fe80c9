"""The manifests of deploy/, as `kubectl kustomize` prints them."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
CLUSTERS = ("overlays/dev", "overlays/production", "overlays/chaos", "overlays/restored", "overlays/autoscaled")
BUILDS = ("base", *CLUSTERS, "workers", "workers-jobset", "workers-trainjob", "checkpoints", "operator", "chaos")
COMPONENT = "app.kubernetes.io/component"
WORKLOADS = ("Deployment", "StatefulSet", "Job", "CronJob")
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in C, ten times as fast, where PyYAML has it

Manifest = dict[str, Any]


@functools.cache
def rendered(build: str) -> str:
    """The manifests of a folder below deploy/kubernetes. Skips the test if no tool can render them."""
    return render(DEPLOY / "kubernetes" / build)


def render(folder: Path) -> str:
    """The manifests of a folder."""
    for tool, arguments in (("kubectl", ["kustomize"]), ("kustomize", ["build"])):
        if path := shutil.which(tool):
            done = subprocess.run([path, *arguments, str(folder)], capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            return done.stdout
    pytest.skip(
        "neither kubectl nor kustomize is on PATH: the manifests cannot be rendered here", allow_module_level=True
    )


def manifests(build: str) -> list[Manifest]:
    """The same, read."""
    return list(yaml.load_all(rendered(build), Loader=_LOADER))


def of_kind(build: str, *kinds: str) -> list[Manifest]:
    """The manifests of some kinds."""
    return [found for found in manifests(build) if found["kind"] in kinds]


def named(build: str, kind: str, name: str) -> Manifest:
    """The one of that kind and name."""
    (found,) = (m for m in of_kind(build, kind) if m["metadata"]["name"] == name)
    return found


class Workload(NamedTuple):
    """A manifest that makes pods, its pods' spec and labels, and their one container."""

    manifest: Manifest
    spec: Manifest
    labels: dict[str, str]
    container: Manifest

    @property
    def name(self) -> str:
        return str(self.manifest["metadata"]["name"])

    @property
    def args(self) -> list[str]:
        return list(self.container.get("args", ()))

    @property
    def ports(self) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for port in self.container.get("ports", ())}

    def flag(self, name: str) -> str:
        """The value of `--name=value`."""
        (found,) = (arg.partition("=")[2] for arg in self.args if arg.startswith(f"--{name}="))
        return found


def workloads(build: str) -> list[Workload]:
    """Everything that makes pods."""
    found = []
    for manifest in of_kind(build, *WORKLOADS):
        template = manifest["spec"].get("jobTemplate", manifest)["spec"]["template"]
        (container,) = template["spec"]["containers"]
        found.append(Workload(manifest, template["spec"], template["metadata"]["labels"], container))
    return found


def workload(build: str, component: str) -> Workload:
    """The one of a component."""
    (found,) = (each for each in workloads(build) if each.labels[COMPONENT] == component)
    return found


def selects(selector: Manifest, labels: dict[str, str]) -> bool:
    """Returns whether a label selector, or a Service's plain one, matches."""
    if "matchLabels" not in selector and "matchExpressions" not in selector:
        return selector.items() <= labels.items()
    expressions = selector.get("matchExpressions", ())
    assert all(expression["operator"] == "In" for expression in expressions)
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        labels.get(expression["key"]) in expression["values"] for expression in expressions
    )


def environment(each: Workload, values: dict[str, str]) -> dict[str, str]:
    """The container's variables as Kubernetes would set them; `values` gives those that come from the pod or a map."""
    found: dict[str, str] = {}
    for variable in each.container.get("env", ()):
        value = variable["value"] if "value" in variable else values[variable["name"]]
        found[variable["name"]] = expanded(value, found)
    return found


def expanded(text: str, variables: dict[str, str]) -> str:
    """`$(NAME)` replaced, as Kubernetes does; a name that is not defined fails the test instead of staying."""
    return re.sub(r"\$\(([^)]+)\)", lambda found: variables[found[1]], text)


def mentions(value: Any) -> Iterator[str]:
    """Every text in a manifest."""
    if isinstance(value, dict):
        for part in value.values():
            yield from mentions(part)
    elif isinstance(value, list):
        for part in value:
            yield from mentions(part)
    elif isinstance(value, str):
        yield value
