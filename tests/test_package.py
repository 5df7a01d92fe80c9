"""Contents of `import elasticps`, and imports that it postpones."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest
import tomli
from packaging.requirements import Requirement

import elasticps
from coordinator.core.view import PROTOCOL, ClusterConfig
from elasticps.wire.frames import VERSION

ROOT = Path(__file__).parents[1]


def test_every_public_name_exists() -> None:
    assert set(elasticps.__all__) <= set(dir(elasticps))
    for name in elasticps.__all__:
        assert getattr(elasticps, name) is not None


@pytest.mark.parametrize("kind", [elasticps.Client, elasticps.SparseTable, elasticps.DenseTensor, elasticps.OpenStep])
def test_every_public_method_has_a_docstring(kind: type) -> None:
    for name, what in inspect.getmembers(kind, lambda what: callable(what) or isinstance(what, property)):
        assert name.startswith("_") or what.__doc__, name


def test_a_missing_name_is_named() -> None:
    with pytest.raises(AttributeError, match="'elasticps' has no attribute 'Servr'"):
        _ = elasticps.Servr  # type: ignore[attr-defined]


def test_commands_that_need_no_kernels_do_not_import_them() -> None:
    code = "import sys, elasticps.cli.app; print(*(heavy for heavy in ('numba', 'torch') if heavy in sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == ""


ALONE = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {missing}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing())
import {modules}
"""
OPERATORS = "elasticps.cli.app, elasticps.doctor.gather, elasticps.local, elasticps.monitor, elasticps.admin.audit"
MEMBERS = "elasticps.client, elasticps.server.process.main, elasticps.checkpoint.catalog, elasticps.exchange.export"


@pytest.mark.parametrize(("extra", "modules"), [("", OPERATORS), ("kernels", f"{OPERATORS}, {MEMBERS}")])
def test_what_an_installation_promises_needs_only_installed_packages(extra: str, modules: str) -> None:
    there = brought(extra)
    assert ("numba" in there) == bool(extra)
    installed = importlib.metadata.packages_distributions()
    missing = {module for module, names in installed.items() if there.isdisjoint(map(normal, names))}
    assert "pytest" in missing
    code = ALONE.format(missing=missing - {"elasticps", "coordinator", "replication"}, modules=modules)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def brought(extra: str) -> set[str]:
    """All packages that come with elasticps, and with one of its extras."""
    project = tomli.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    first = project["dependencies"] + (project["optional-dependencies"][extra] if extra else [])
    found, new = set[str](), {normal(Requirement(line).name) for line in first}
    while new:
        found |= new
        needed = [Requirement(line) for one in new for line in importlib.metadata.requires(one) or []]
        new = {normal(each.name) for each in needed if each.marker is None or each.marker.evaluate()} - found
    return found


def normal(name: str) -> str:
    return re.sub("[-_.]+", "-", name).lower()


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports inside functions count."""
    graph = grimp.build_graph("elasticps")
    TopologicalSorter({m: graph.find_modules_directly_imported_by(m) for m in graph.modules}).prepare()


def test_numbers_of_formats_are_those_of_the_code() -> None:
    page = (ROOT / "docs/reference/compatibility.md").read_text("utf-8")
    rows = re.findall(r"^\| `([\w.]+)` \| .* \| ([\w, ]+) \|$", page, re.M)
    assert len(rows) == 12
    for name, written in rows:
        module, _, constant = name.rpartition(".")
        value = getattr(importlib.import_module(module), constant)
        if isinstance(value, bytes):
            value = f"{value[:4].decode()} {value[4]}"
        assert written == (", ".join(map(str, value)) if isinstance(value, tuple) else str(value)), name
    frames = (ROOT / "docs/internals/protocol.md").read_text("utf-8")
    (version,) = re.findall(r"^\| 4 \| u8 \| version \| (\d+);", frames, re.M)
    assert int(version) == PROTOCOL == VERSION == ClusterConfig().protocol
