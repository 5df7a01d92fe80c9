"""What `import elasticps` gives, and what it leaves for later."""

from __future__ import annotations

import inspect
import subprocess
import sys
from graphlib import TopologicalSorter

import grimp
import pytest

import elasticps


def test_everything_that_is_listed_is_there() -> None:
    assert set(elasticps.__all__) <= set(dir(elasticps))
    for name in elasticps.__all__:
        assert getattr(elasticps, name) is not None


@pytest.mark.parametrize("kind", [elasticps.Client, elasticps.SparseTable, elasticps.DenseTensor, elasticps.OpenStep])
def test_whatever_users_can_call_is_described(kind: type) -> None:
    for name, what in inspect.getmembers(kind, lambda what: callable(what) or isinstance(what, property)):
        assert name.startswith("_") or what.__doc__, name


def test_a_name_that_is_not_there_is_named() -> None:
    with pytest.raises(AttributeError, match="'elasticps' has no attribute 'Servr'"):
        _ = elasticps.Servr  # type: ignore[attr-defined]


def test_commands_that_need_no_kernels_do_not_wait_for_them() -> None:
    code = "import sys, elasticps.cli.app; print(*(heavy for heavy in ('numba', 'torch') if heavy in sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == ""


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports inside functions count."""
    graph = grimp.build_graph("elasticps")
    TopologicalSorter({m: graph.find_modules_directly_imported_by(m) for m in graph.modules}).prepare()
