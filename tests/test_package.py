"""Contents of `import elasticps`, and imports that it postpones."""

from __future__ import annotations

import importlib.metadata
import inspect
import re
import subprocess
import sys
from graphlib import TopologicalSorter

import grimp
import pytest
from packaging.requirements import Requirement

import elasticps


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
import elasticps.cli.app, elasticps.client.client, elasticps.system.coordination, elasticps.local
import elasticps.server.process.main
"""


def test_servers_and_workers_need_only_installed_packages() -> None:
    there = brought("elasticps")
    installed = importlib.metadata.packages_distributions()
    missing = {module for module, names in installed.items() if there.isdisjoint(map(normal, names))}
    assert {"torch", "pytest"} < missing
    done = subprocess.run([sys.executable, "-c", ALONE.format(missing=missing)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def brought(name: str) -> set[str]:
    """All packages that come with a distribution, without extras."""
    found, new = set(), {normal(name)}
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
