"""What the documentation shows can be typed: its Python runs, its commands and their options exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

from elasticps.cli.app import app

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RUN = {"README.md": 1, "start.md": None, "linear.md": None}  # how many blocks, from the first on; None: all
ELSEWHERE = {
    "README.md",  # what follows the first script needs data of its own
    "custom.md",  # tests/store/test_custom.py
    "caches.md",  # tests/e2e/test_caches.py
    "filters.md",  # tests/e2e/test_filters.py
    "groups.md",  # tests/torch/group
    "machines.md",  # needs machines
    "torch.md",  # tests/torch
}


def _blocks(page: Path, language: str) -> list[str]:
    fences = re.findall(r"^```([^\n]*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S)
    return [block for fence, block in fences if fence == language]


def _commands() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        for block in _blocks(page, ""):
            joined = block.replace("\\\n", " ").replace(" --config /etc/elasticps.toml", "")
            lines = re.findall(r"^elasticps [a-z].*", joined, re.M)
            found += [(page.name, re.split(r" && | \| | &$", line)[0]) for line in lines]
    return found


@pytest.mark.parametrize("name", RUN)
def test_the_code_of_a_page_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = next(page for page in PAGES if page.name == name)
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {"__name__": "page"}
    try:
        for block in _blocks(page, "python")[: RUN[name]]:
            exec(compile(block, name, "exec"), scope)
    finally:
        for thing in ("ps", "cluster"):
            end = getattr(scope.get(thing), "close", None) or getattr(scope.get(thing), "stop", None)
            if end is not None:
                end()


def test_every_page_with_code_is_run_somewhere() -> None:
    assert {page.name for page in PAGES if _blocks(page, "python")} <= RUN.keys() | ELSEWHERE


@pytest.mark.parametrize(("page", "line"), _commands())
def test_a_command_and_its_options_exist(page: str, line: str) -> None:
    words = shlex.split(line, comments=True)[1:]
    command = typer.main.get_command(app)
    context = command.make_context("elasticps", ["version"])
    try:
        while hasattr(command, "commands"):
            command, words = command.commands[words[0]], words[1:]
        command.make_context("elasticps", words, parent=context)
    except typer.Exit:
        pass
    except Exception as error:
        if "does not exist" not in str(error):  # a file of the reader's
            raise AssertionError(f"{page}: {line}: {error}") from error
