"""Kernels are compiled once, and again when an inlined file has changed; also if the code folder is read-only."""

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
from elasticps.kernels.hashing import key_ranges
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


LIST = "\nfrom elasticps.kernels import list_compiled\nlist_compiled()\n"


def run(tree: Path, before: str = "", after: str = "") -> tuple[dict[str, object], str]:
    others = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA")}
    settings = {"PYTHONPATH": str(tree), "XDG_CACHE_HOME": str(tree.parent / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", before + RUN + after],
        cwd=tree.parent,
        env=others | settings,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found, done.stderr


def read_only(tree: Path) -> str:
    """Code that lets nothing be written there: tests may run as root, who may write everywhere, and numba and we find
    out by a temporary file."""
    return (
        "import os, tempfile\n"
        "there, replace = tempfile.TemporaryFile, os.replace\n"
        "def refuse(path):\n"
        f"    if str(path).startswith({str(tree)!r}): raise OSError(30, 'Read-only file system')\n"
        "def file(*a, dir=None, **k):\n"
        "    refuse(dir)\n"
        "    return there(*a, dir=dir, **k)\n"
        "def moved(source, target):\n"
        "    refuse(target)\n"
        "    return replace(source, target)\n"
        "tempfile.TemporaryFile, os.replace = file, moved\n"
    )


def test_a_kernel_is_compiled_again_when_an_inlined_file_has_changed(tree: Path) -> None:
    first, output = run(tree)
    assert first["hit"] == 0
    assert output.count("compiling kernels for this machine") == 1
    again, output = run(tree)
    assert again == {**first, "hit": 1}
    assert output == ""
    inlined = tree / "elasticps" / "kernels" / "hashing.py"
    text = inlined.read_text(encoding="utf-8")
    assert "np.uint64(27)" in text
    inlined.write_text(text.replace("np.uint64(27)", "np.uint64(25)"), encoding="utf-8")
    changed, output = run(tree)
    assert changed["hit"] == 0
    assert changed["out"] != first["out"], "a stale kernel ran"
    assert "compiling kernels" in output


def test_kernels_are_cached_elsewhere_when_the_code_cannot_be_written(tree: Path) -> None:
    first, _ = run(tree, read_only(tree))
    assert str(first["at"]).startswith(str(tree.parent / "cache" / "elasticps"))
    again, output = run(tree, read_only(tree))
    assert again == {**first, "hit": 1}
    assert output == ""


def cut_times(tree: Path) -> None:
    """Cuts the times of files to whole seconds, and moves them, as layers of an image do."""
    for file in (*tree.rglob("*.py"), *tree.rglob("*.pyc")):
        seconds = int(file.stat().st_mtime) - 5
        os.utime(file, (seconds, seconds))


def test_shipped_kernels_are_used_if_no_cache_can_be_written(tree: Path) -> None:
    run(tree, after=LIST)
    cut_times(tree)
    found, output = run(tree, read_only(tree))
    assert found["hit"] == 1
    assert found["at"] == str(tree / "elasticps" / "store" / "__pycache__")
    assert output == ""


@pytest.mark.parametrize("cause", ["a file", "the processor", "the list"])
def test_a_process_logs_why_it_does_not_use_shipped_kernels(tree: Path, cause: str) -> None:
    first, _ = run(tree, after=LIST)
    before = read_only(tree)
    expected = {
        "a file": "elasticps/store/intervals.py, or what it imports, has changed since",
        "the processor": "they are for CPU ",
        "the list": "none is of elasticps/store/intervals.py",
    }
    if cause == "a file":
        with (tree / "elasticps" / "store" / "intervals.py").open("a", encoding="utf-8") as file:
            file.write("# more\n")
    elif cause == "the processor":
        before += "os.environ |= {'NUMBA_CPU_NAME': 'generic', 'NUMBA_CPU_FEATURES': ''}\n"
    else:
        listed = tree / "elasticps" / "kernels" / "__pycache__" / "kernels.json"
        content = json.loads(listed.read_text(encoding="utf-8"))
        del content["stamps"]["elasticps/store/intervals.py"]
        listed.write_text(json.dumps(content), encoding="utf-8")
    found, output = run(tree, before)
    assert (found["out"], found["hit"]) == (first["out"], 0)
    assert output.count("compiling kernels for this machine, though some came along in ") == 1
    assert expected[cause] in output


def test_a_kernel_that_cannot_be_cached_is_used_all_the_same(tree: Path) -> None:
    """As one that did not come along, where nothing can be written, or on a full disk."""
    first, _ = run(tree, after=LIST)
    for file in (tree / "elasticps" / "store" / "__pycache__").glob("intervals.ranges_of-*"):
        file.unlink()
    found, output = run(tree, read_only(tree))
    assert (found["out"], found["hit"]) == (first["out"], 0)
    assert "not all that are needed here are among them" in output


def test_the_sources_of_a_kernel_are_found_by_its_imports() -> None:
    package = ROOT / "elasticps"
    found = sources_of(package / "store" / "updates.py")
    names = {str(path.relative_to(package)) for path in found if path.is_relative_to(package)}
    assert {
        "store/updates.py",
        "store/index.py",
        "store/values.py",
        "store/native.py",
        "kernels/hashing.py",
        "model/spec.py",
    } <= names
    assert not {name for name in names if name.startswith(("cli/", "local/", "demo/", "torch/"))}


def test_a_kernel_is_compiled_for_each_kind_of_array() -> None:
    """As when the fast path of a server is compiled before any table is made."""

    @numba.njit
    def kernel(numbers):  # type: ignore[no-untyped-def]
        return numbers.sum()

    kernel(np.ones(2, np.float32))
    registry._load(kernel, (numba.types.Array(numba.types.int64, 1, "C"),))
    assert kernel(np.arange(3)) == 3


CALLS = """
import json, sys
sys.path.insert(0, sys.argv[1])
import calls
from calls import double, twice_the_sum
import numpy as np
out = [int(twice_the_sum(np.arange(4))), int(twice_the_sum(np.arange(5)))]
hits = {name: sum(getattr(calls, name).stats.cache_hits.values()) for name in ("double", "twice_the_sum")}
made = {name: len(getattr(calls, name)._made) for name in ("double", "plus")}
print(json.dumps({"out": out, "hits": hits, "made": made}))
"""
MODULE = """
from numba import types
from elasticps.kernels.dispatch import njit
INT = types.int64

@njit(cache=True)
def plus(a, b):
    return a + b

@njit(cache=True, signature=(INT,))
def double(x):
    return plus(x, x)

@njit(cache=True)
def twice_the_sum(numbers):
    total = plus(plus(0, 0), plus(1, -1))
    for i in range(numbers.shape[0]):
        total = plus(total, numbers[i])
    return double(total)
"""


def test_a_kernel_from_the_cache_finds_the_machine_code_that_it_calls(tmp_path: Path) -> None:
    (tmp_path / "calls.py").write_text(MODULE, encoding="utf-8")
    command = [sys.executable, "-c", CALLS, str(tmp_path)]
    settings = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}

    def call() -> dict[str, object]:
        done = subprocess.run(command, env=settings, capture_output=True, text=True, check=True)
        found: dict[str, object] = json.loads(done.stdout)
        return found

    first = call()
    assert first["out"] == [12, 20]
    assert first["hits"] == {"double": 0, "twice_the_sum": 0}
    assert first["made"] == {"double": 1, "plus": 1}, "compiled anew for a number in a call"
    again = call()
    assert again["out"] == [12, 20]
    assert again["hits"] == {"double": 1, "twice_the_sum": 1}
    assert again["made"] == {"double": 0, "plus": 0}


def test_a_kernel_uses_recompiled_machine_code(tmp_path: Path) -> None:
    (tmp_path / "calls.py").write_text(MODULE, encoding="utf-8")
    cache = tmp_path / "cache"
    command = [sys.executable, "-c", CALLS, str(tmp_path)]
    settings = os.environ | {"NUMBA_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)}
    subprocess.run(command, env=settings, capture_output=True, check=True)
    lost = list(cache.rglob("calls.double-*"))
    assert lost
    for file in lost:
        file.unlink()
    done = subprocess.run(command, env=settings, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert (found["out"], found["hits"]) == ([12, 20], {"double": 0, "twice_the_sum": 1})
