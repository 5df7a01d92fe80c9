"""What an installation without numba does, which is half as large: all that looks at clusters and steers them."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import elasticps as eps
from elasticps.cli.output import ExitCode
from elasticps.errors import ConfigError, KernelsMissing
from tests.e2e.conftest import Connect

WITHOUT = """
import sys
from importlib import metadata

MISSING, version = ("numba", "llvmlite"), metadata.version

def version_of(name):
    if name in MISSING:
        raise metadata.PackageNotFoundError(name)
    return version(name)

sys.modules.update(dict.fromkeys(MISSING))
metadata.version = version_of
"""
COMMANDS = """
import json
from typer.testing import CliRunner
from elasticps.cli.app import app

for command in json.loads(sys.argv[1]):
    done = CliRunner().invoke(app, command)
    print(json.dumps([done.exit_code, done.output, repr(done.exception)]))
"""


def _run(commands: list[list[str]]) -> Iterator[tuple[int, str]]:
    run = [sys.executable, "-c", WITHOUT + COMMANDS, json.dumps(commands)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        code, output, error = json.loads(line)
        yield code, f"{output} {error}"


def test_operators_see_and_steer_a_cluster(cluster: eps.LocalCluster, connect: Connect, tmp_path: Path) -> None:
    ps = connect()
    ps.table("users", dim=4, optimizer=eps.SGD(lr=0.1))
    url = cluster.operator_url
    commands = [
        ["status", "--url", url],
        ["doctor", url],
        ["tables", "list", "--url", url],
        ["tables", "show", "users", "--url", url, "--app", ps.app],
        ["audit", "--url", url],
        ["drain", "s1", "--cancel", "--url", url],
        ["certificates", str(tmp_path / "ca"), "test/operator/me"],
        ["version"],
    ]
    for command, (code, output) in zip(commands, _run(commands), strict=True):
        assert code == ExitCode.OK, (command, output)


def test_commands_that_need_kernels_say_what_to_install(cluster: eps.LocalCluster, tmp_path: Path) -> None:
    url = cluster.url
    commands = [
        ["server", "--url", url, "--name", "s9"],
        ["coordinator", "--url", url, "--name", "c9"],
        ["tables", "clear", "users", "--yes", "--url", url],
        ["export", "--to", str(tmp_path / "out"), "--url", url],
        ["checkpoint", "list", str(tmp_path)],
        ["up", "--name", "another", "--servers", "1"],
        ["launch", "--servers", "1", "--", "true"],
    ]
    for command, (code, output) in zip(commands, _run(commands), strict=True):
        assert code == ExitCode.USAGE, (command, output)
        assert "pip install 'elasticps[kernels]'" in output.replace("\n", " "), (command, output)


def test_the_error_is_one_for_settings_and_for_imports_and_other_processes_can_read_it() -> None:
    with pytest.raises(ConfigError, match="kernels"):
        raise KernelsMissing
    assert issubclass(KernelsMissing, ImportError)
    error = copy.copy(KernelsMissing())  # as `pickle` does, when Ray passes it on
    assert (str(error), error.name) == (str(KernelsMissing()), "numba")
