"""The Python environment in which contestants run: what it has, and how one is made."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from benchmarks.runner import Progress
from elasticps.errors import ConfigError, Error

HERE = Path(__file__).parent
ROOT = HERE.parent
PACKAGES = ("torch", "torchrec", "fbgemm-gpu-cpu", "ray", "elasticps")  # whose releases a result names
_LOOK = """
import importlib.util, importlib.metadata, json, sys
def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
modules, packages = json.loads(sys.argv[1])
print(json.dumps([[m for m in modules if importlib.util.find_spec(m) is None], {p: version(p) for p in packages}]))
"""


def python_of(folder: Path | None) -> str:
    """The interpreter of an environment; None: the one that runs this. ConfigError if the folder has none."""
    if folder is None:
        return sys.executable
    python = folder.absolute() / "bin" / "python"
    if not python.exists():
        raise ConfigError(
            f"{folder} is no virtual environment: it has no bin/python; name a folder that does not exist"
        )
    return str(python)


def make(folder: Path, progress: Progress) -> None:
    """Makes an environment with the contestants' packages, and everything that this one has. Error if that fails."""
    progress(f"making {folder}")
    _run([sys.executable, "-m", "venv", str(folder)])
    python = python_of(folder)
    site = Path(_run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).strip())
    ours = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    (site / "elasticps-compare.pth").write_text(ours, encoding="utf-8")
    for arguments in installing():
        progress(f"pip install {' '.join(arguments)}")
        _run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments])


def installing() -> list[list[str]]:
    """What pip is told to install, one call after the other."""
    return [
        ["-c", str(ROOT / "constraints.txt"), "-r", str(HERE / "compare-requirements.txt")],
        ["--no-deps", "-r", str(HERE / "compare-no-deps.txt")],
    ]


def look(python: str, modules: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Which modules an environment lacks, and the releases of PACKAGES that it has, "" for none."""
    missing, versions = json.loads(_run([python, "-c", _LOOK, json.dumps([list(modules), PACKAGES])]))
    return missing, versions


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Error(f"{' '.join(command)} failed with exit code {done.returncode}: {done.stderr.strip()}")
    return done.stdout
