"""What `make dist` makes needs nothing of the repository: it is installed into empty environments, and trains there."""

from __future__ import annotations

import email
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OURS = ("chaos", "coordinator", "elasticps", "replication")
BARE_MB = 250  # that an installation without extras may take
SCRIPT = """
import sys

import numpy as np

import elasticps as eps

keys = np.arange(1000)
with eps.connect(sys.argv[1], worker="w0") as ps:
    table = ps.table("sums", dim=4, optimizer=eps.Accumulate())
    for step in range(10):
        ps.push({table: (keys, np.full((len(keys), 4), step, np.float32))})
    np.testing.assert_array_equal(table.pull(keys), np.full((len(keys), 4), 45, np.float32))
    print("trained with", eps.__file__)
"""


def _python(minor: int) -> str | None:
    """The interpreter of Python 3.minor: on PATH, or one of pyenv's, whose commands on PATH run only what is chosen."""
    if sys.version_info[1] == minor:
        return sys.executable
    name = f"python3.{minor}"
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    found = shutil.which(name)
    there = [] if found is None or Path(found).parent == pyenv / "shims" else [found]
    return next(iter([*there, *map(str, sorted(pyenv.glob(f"versions/3.{minor}*/bin/{name}")))]), None)


PYTHONS = {minor: _python(minor) for minor in (11, 12, 13, 14)}


def _parameters() -> Iterator[object]:
    """One for each supported Python."""
    for minor, python in PYTHONS.items():
        absent = pytest.mark.skipif(python is None, reason=f"there is no Python 3.{minor} here")
        yield pytest.param(minor, marks=absent, id=f"3.{minor}")


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the wheel and the source distribution, made of the tree as it is."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in (*OURS, "tests"):
        shutil.copytree(ROOT / name, folder / "source" / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, folder / "source")
    _run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", folder / "source")
    return folder / "dist"


@pytest.mark.slow  # with the next one, which needs the same wheel
@pytest.mark.ci
def test_a_wheel_has_all_that_is_needed_and_nothing_else(dist: Path) -> None:
    (wheel,), (source,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        described = email.message_from_bytes(archive.read("elasticps-0.1.0.dist-info/METADATA"))
    info = {name for name in names if name.startswith("elasticps-0.1.0.dist-info/")}
    assert {name.partition("/")[0] for name in names - info} == set(OURS)
    tracked = _run("git", "-C", ROOT, "ls-files", "--cached", "--others", "--exclude-standard", *OURS).split()
    assert names - info == {name for name in tracked if (ROOT / name).exists()}
    assert "elasticps-0.1.0.dist-info/licenses/LICENSE" in info
    with tarfile.open(source) as sources:
        tops = {name.split("/")[1] for name in sources.getnames() if "/" in name}
    assert set(OURS) < tops
    assert "tests" not in tops

    assert described["License-Expression"] == "Apache-2.0"
    assert described["Requires-Python"] == ">=3.11"
    assert described["Description-Content-Type"] == "text/markdown"
    versions = {f"Programming Language :: Python :: 3.{minor}" for minor in PYTHONS}
    assert versions <= set(described.get_all("Classifier", []))
    torch = [line for line in described.get_all("Requires-Dist", []) if line.startswith("torch<")]
    assert torch == ['torch<3,>=2.6; extra == "torch"']


@pytest.mark.slow  # kernels are compiled for the new environment, which takes two minutes
@pytest.mark.timeout(900)
@pytest.mark.parametrize("minor", list(_parameters()))
def test_a_wheel_in_an_empty_environment_trains(dist: Path, minor: int, tmp_path: Path) -> None:
    base, python = PYTHONS[minor], tmp_path / "env" / "bin" / "python"
    assert base is not None
    (wheel,) = dist.glob("*.whl")
    pip = python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", "--only-binary=:all:"
    _run(base, "-m", "venv", tmp_path / "env")
    _run(*pip, wheel)
    size = int(_run("du", "-sm", tmp_path / "env").split()[0])
    assert size <= BARE_MB, f"a bare installation takes {size} MB"
    command = tmp_path / "env" / "bin" / "elasticps"
    assert "0.1.0" in _run(command, "--version")
    assert "elasticps[kernels]" in _run(command, "doctor", codes=(0, 1))

    _run(*pip, f"{wheel}[local]")
    folder = tmp_path / "empty"
    folder.mkdir()
    _run(python, "-m", "elasticps.warm", folder=folder)
    name = f"wheel-{os.getpid()}"
    try:
        up = _run(command, "up", "--name", name, "--servers", "2", "--detach", "--json", folder=folder)
        url = json.loads(up)["url"]
        output = _run(python, "-c", SCRIPT, url, folder=folder)
        assert f"trained with {tmp_path / 'env'}" in output
        assert "s1" in _run(command, "status", "--name", name, folder=folder)
        assert "packages" in _run(command, "doctor", url, folder=folder, codes=(0, 1))
    finally:
        _run(command, "down", "--name", name, folder=folder)
    assert list(folder.iterdir()) == []


def _run(*command: str | Path, folder: Path = Path("/"), codes: tuple[int, ...] = (0,)) -> str:
    """In an environment that knows nothing of this one."""
    ours = ("PYTHONPATH", "VIRTUAL_ENV", "NUMBA_CACHE_DIR")
    env = {name: value for name, value in os.environ.items() if name not in ours}
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True)
    assert done.returncode in codes, done.stdout + done.stderr
    return done.stdout
