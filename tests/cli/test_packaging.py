from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import EntryPoint, requires
from pathlib import Path
from typing import Any

import pytest
import setuptools
import tomli
import typer
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from typer.testing import CliRunner

from elasticps.cli import app
from elasticps.cli.output import ExitCode

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomli.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_every_package_of_the_tree_is_found(project: dict[str, Any]) -> None:
    found = set(
        setuptools.find_packages(str(ROOT), include=project["tool"]["setuptools"]["packages"]["find"]["include"])
    )
    tops = [ROOT / name for name in ("chaos", "coordinator", "elasticps", "replication")]
    folders = {file.parent for top in tops for file in top.rglob("*.py") if "__pycache__" not in file.parts}
    assert found == {".".join(folder.relative_to(ROOT).parts) for folder in folders}


@pytest.mark.parametrize("module", ["not_installed.cli:app", "tests.not_there.cli:app"])
def test_commands_of_missing_packages_are_hidden_and_name_how_to_install_them(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "entry_points", lambda group: [EntryPoint("bench", module, group)])
    commands = typer.Typer(callback=lambda: None)
    app.add_extensions(commands)
    assert "bench" not in CliRunner().invoke(commands, ["--help"]).output
    result = CliRunner().invoke(commands, ["bench", "sparse", "--servers", "3"])
    assert result.exit_code == ExitCode.USAGE
    assert "`elasticps bench` is not part of this installation" in result.output
    assert "make setup" in result.output


def test_benchmarks_and_demo_are_commands_of_a_checkout(project: dict[str, Any]) -> None:
    found = project["project"]["entry-points"]["elasticps.commands"]
    assert found.keys() == {"bench", "chaos", "demo", "sim"}
    for name, target in found.items():
        loaded = EntryPoint(name, target, "elasticps.commands").load()
        assert isinstance(loaded, typer.Typer) or callable(loaded)


@pytest.mark.parametrize("image", ["requirements", "requirements-chaos"])
def test_an_image_installs_only_pinned_packages(image: str, project: dict[str, Any]) -> None:
    text = (ROOT / "deploy" / f"{image}.txt").read_text(encoding="utf-8")
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)", text, re.M))
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert pinned.items() <= {tuple(line.split("==")) for line in lines if "==" in line}
    assert len(re.findall(r"^\S+==\S+ \\\n    --hash=sha256:[0-9a-f]{64}", text, re.M)) == len(pinned)
    extras = project["project"]["optional-dependencies"]
    expected = [*project["project"]["dependencies"], *extras["kernels"], "setuptools"]
    expected += [*extras["chaos"], *extras["kubernetes"]] if image == "requirements-chaos" else []
    names = {re.split(r"[>=\[ ]", requirement)[0].lower() for requirement in expected} - {"elasticps"}
    assert names <= pinned.keys(), "make hashes"
    needed = {name for name in pinned for name in _needs(name)}
    assert needed <= pinned.keys(), "make hashes"


def _needs(name: str) -> Iterator[str]:
    """The requirements of an installed package on Linux with the image's Python."""
    for requirement in map(Requirement, requires(name) or ()):
        environment = {"extra": "", "python_version": "3.12", "python_full_version": "3.12.0"}
        if requirement.marker is None or requirement.marker.evaluate(environment):
            yield canonicalize_name(requirement.name)


def test_every_requirement_is_pinned(project: dict[str, Any]) -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {line.split("==")[0] for line in lines if line and not line.startswith("#")}
    groups = [project["project"]["dependencies"], *project["project"]["optional-dependencies"].values()]
    names = {re.split(r"[>=\[ ]", requirement)[0].lower() for group in groups for requirement in group}
    assert names - {"elasticps"} <= pinned
    assert {"torch==2.13.0", "recbole==1.2.1"} <= set(lines)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    alone = re.search(r"^MOTO = ((?:.*\\\n)*.*)$", makefile, re.M)
    assert alone is not None
    assert {"moto", "flask", *alone[1].replace("\\", "").split()} <= pinned


def test_no_requirement_names_a_host() -> None:
    for name in ("pyproject.toml", "constraints.txt", "Makefile", ".ci/run"):
        text = (ROOT / name).read_text(encoding="utf-8")
        assert "index-url" not in text
        assert "git+" not in text
