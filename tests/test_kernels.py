"""Kernels are compiled once, and anew when what they inline has changed; also where the code cannot be written."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numba
import numpy as np
import pytest

from elasticps.kernels import sources_of
from elasticps.store import registry

ROOT = Path(__file__).parent.parent
RUN = """
import json, sys, numpy as np
from elasticps.hashing import key_ranges
from elasticps.store import intervals
keys, out = np.arange(4), np.zeros(4, np.int64)
header = np.zeros(32, np.int64)
from elasticps.store.native import H_SHIFT
header[H_SHIFT] = 60
intervals.ranges_of(header, keys, out)
(hits,) = intervals.ranges_of.stats.cache_hits.values() or (0,)
print(json.dumps({"out": out.tolist(), "hit": hits, "at": intervals.ranges_of.stats.cache_path}))
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the code without any kernel."""
    for package in ("replication", "coordinator", "elasticps"):
        shutil.copytree(ROOT / package, tmp_path / "code" / package, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "code"


def run(tree: Path, before: str = "") -> tuple[dict[str, object], str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA")}
    settings = {"PYTHONPATH": str(tree), "XDG_CACHE_HOME": str(tree.parent / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", before + RUN], cwd=tree.parent, env=kept | settings, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found, done.stderr


def test_a_kernel_is_compiled_again_when_what_it_inlines_has_changed(tree: Path) -> None:
    first, said = run(tree)
    assert first["hit"] == 0
    assert said.count("compiling kernels for this machine") == 1
    again, said = run(tree)
    assert again == {**first, "hit": 1}
    assert said == ""
    inlined = tree / "elasticps" / "hashing.py"
    text = inlined.read_text(encoding="utf-8")
    assert "np.uint64(27)" in text
    inlined.write_text(text.replace("np.uint64(27)", "np.uint64(25)"), encoding="utf-8")
    changed, said = run(tree)
    assert changed["hit"] == 0
    assert changed["out"] != first["out"], "a stale kernel ran"
    assert "compiling kernels" in said


def test_kernels_are_kept_elsewhere_when_the_code_cannot_be_written(tree: Path) -> None:
    # Tests may run as root, who may write everywhere; numba and we find out by a temporary file.
    read_only = (
        "import tempfile\n"
        "there = tempfile.TemporaryFile\n"
        "def file(*a, dir=None, **k):\n"
        f"    if str(dir).startswith({str(tree)!r}): raise OSError(30, 'Read-only file system')\n"
        "    return there(*a, dir=dir, **k)\n"
        "tempfile.TemporaryFile = file\n"
    )
    first, _ = run(tree, read_only)
    assert str(first["at"]).startswith(str(tree.parent / "cache" / "elasticps"))
    again, said = run(tree, read_only)
    assert again == {**first, "hit": 1}
    assert said == ""


def test_what_a_kernel_may_have_compiled_in_is_found_by_its_imports() -> None:
    package = ROOT / "elasticps"
    names = {str(path.relative_to(package)) for path in sources_of(package / "store" / "updates.py")}
    assert {
        "store/updates.py",
        "store/index.py",
        "store/values.py",
        "store/native.py",
        "hashing.py",
        "spec.py",
    } <= names
    assert not {name for name in names if name.startswith(("cli/", "local/", "demo/", "torch/"))}


def test_a_kernel_that_another_has_had_compiled_for_other_arrays_is_compiled_for_its_own() -> None:
    """As when the fast path of a server is compiled before any table is made."""

    @numba.njit
    def kernel(numbers):  # type: ignore[no-untyped-def]
        return numbers.sum()

    kernel(np.ones(2, np.float32))
    registry._load(kernel, (numba.types.Array(numba.types.int64, 1, "C"),))
    assert kernel(np.arange(3)) == 3
