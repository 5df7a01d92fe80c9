"""The wheel in an empty environment has everything that a cluster and a worker need."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OURS = ("chaos", "coordinator", "elasticps", "replication")
SCRIPT = """
import numpy as np

import elasticps as eps
from elasticps.local import LocalCluster

keys = np.arange(1000)
with LocalCluster(servers=2) as cluster, eps.connect(cluster.url, worker="w0") as ps:
    table = ps.table("sums", dim=4, optimizer=eps.Accumulate())
    for step in range(10):
        ps.push({table: (keys, np.full((len(keys), 4), step, np.float32))})
    np.testing.assert_array_equal(table.pull(keys), np.full((len(keys), 4), 45, np.float32))
    print("trained with", eps.__file__)
"""


@pytest.mark.slow  # kernels are compiled for the new environment
@pytest.mark.timeout(900)
def test_a_wheel_in_an_empty_environment_trains(tmp_path: Path) -> None:
    source, python = tmp_path / "source", tmp_path / "env" / "bin" / "python"
    for name in OURS:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    _run(sys.executable, "-m", "build", "--no-isolation", "--outdir", tmp_path / "dist", source)
    _run(sys.executable, "-m", "venv", tmp_path / "env")
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    _run(python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", f"{wheel}[local]")
    output = _run(python, "-c", SCRIPT)
    assert f"trained with {tmp_path / 'env'}" in output
    assert "0.1.0" in _run(python, "-m", "elasticps", "--version")


def _run(*command: str | Path) -> str:
    """In an environment that knows nothing of this one."""
    ours = ("PYTHONPATH", "VIRTUAL_ENV", "NUMBA_CACHE_DIR")
    env = {name: value for name, value in os.environ.items() if name not in ours}
    done = subprocess.run(command, env=env, cwd="/", capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
