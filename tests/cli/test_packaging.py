from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_every_package_of_the_tree_is_listed(project: dict[str, Any]) -> None:
    tops = [ROOT / name for name in ("chaos", "coordinator", "elasticps", "replication")]
    found = {
        ".".join(init.parent.relative_to(ROOT).parts)
        for top in tops
        for init in top.rglob("__init__.py")
        if "__pycache__" not in init.parts
    }
    assert found == set(project["tool"]["setuptools"]["packages"])


def test_every_requirement_is_pinned(project: dict[str, Any]) -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {line.split("==")[0] for line in lines if line and not line.startswith("#")}
    groups = [project["project"]["dependencies"], *project["project"]["optional-dependencies"].values()]
    names = {re.split(r"[>=\[ ]", requirement)[0].lower() for group in groups for requirement in group}
    assert names - {"elasticps"} <= pinned
    assert {"torch==2.13.0", "recbole==1.2.1"} <= set(lines)


def test_nothing_is_installed_from_a_host_that_is_named() -> None:
    for name in ("pyproject.toml", "constraints.txt", "Makefile", ".ci/run"):
        text = (ROOT / name).read_text(encoding="utf-8")
        assert "index-url" not in text
        assert "git+" not in text
