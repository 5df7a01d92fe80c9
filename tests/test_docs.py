"""Samples in the documentation run, and its commands and options exist."""

from __future__ import annotations

import inspect
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer

import elasticps as eps
import elasticps.torch
from elasticps.cli.app import app
from elasticps.torch import group
from elasticps.wire import frames
from tests.conftest import NewCluster

ROOT = Path(__file__).parents[1]
PAGES = {
    page.relative_to(ROOT).as_posix(): page for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
}
RUN = {
    "README.md",
    "docs/guides/growing-tables.md",
    "docs/guides/linear.md",
    "docs/guides/port.md",
    "docs/guides/start.md",
}
ELSEWHERE = {
    "docs/guides/custom.md",  # tests/store/test_custom.py
    "docs/guides/caches.md",  # tests/e2e/test_caches.py
    "docs/guides/filters.md",  # tests/e2e/test_filters.py
    "docs/guides/frameworks.md",  # tests/frameworks
    "docs/guides/groups.md",  # tests/torch/group
    "docs/guides/logging.md",  # here
    "docs/guides/names.md",  # here
    "docs/guides/kubernetes.md",  # tests/deploy/test_guide.py
    "docs/guides/machines.md",  # needs machines
    "docs/guides/ray.md",  # tests/ray
    "docs/guides/slurm.md",  # tests/launch/test_guide.py
    "docs/guides/serve.md",  # tests/e2e/test_exchange_of_unusual_models.py
    "docs/guides/torch.md",  # tests/torch
    "docs/reference/published.md",  # tests/publishing/test_redis.py
}


def _blocks(page: Path, language: str) -> list[str]:
    fences = re.findall(r"^```([^\n]*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S)
    return [block for fence, block in fences if fence == language]


def _commands() -> list[tuple[str, str]]:
    found = []
    for name, page in PAGES.items():
        for block in _blocks(page, ""):
            joined = block.replace("\\\n", " ").replace(" --config /etc/elasticps.toml", "")
            lines = re.findall(r"^elasticps [a-z].*", joined, re.M)
            found += [(name, re.split(r" && | \| | &$", line)[0]) for line in lines]
    return found


@pytest.mark.parametrize("name", sorted(RUN))
def test_the_code_of_a_page_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {"__name__": "page"}
    try:
        for block in _blocks(PAGES[name], "python"):
            exec(compile(block, name, "exec"), scope)
    finally:
        for thing in ("ps", "cluster"):
            end = getattr(scope.get(thing), "close", None) or getattr(scope.get(thing), "stop", None)
            if end is not None:
                end()


def test_samples_for_an_existing_cluster_run(
    local_cluster: NewCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cluster = local_cluster(servers=1, replicas=1, ranges=16)
    with eps.connect(cluster.url, worker="w0") as ps:

        def run(name: str, number: int, **known: object) -> dict[str, object]:
            scope = {"np": np, "torch": torch, "eps": eps, "elasticps": elasticps, "ps": ps, **known}
            exec(compile(_blocks(PAGES[f"docs/guides/{name}"], "python")[number], name, "exec"), scope)
            for table in ps.tables() if name != "torch.md" else ():
                ps.drop_table(table)
            return scope

        run("filters.md", 0, w=np.zeros((8, 8), np.float32), model=torch.nn.Linear(4, 1))
        run("caches.md", 0)
        run("logging.md", 0)
        run("names.md", 0)
        run("names.md", 1)
        run("custom.md", 4, table=ps.table("items", dim=16, optimizer=eps.SGD(lr=0.1)))
        scope = run("torch.md", 0)
        vectors = scope["vectors"]
        assert isinstance(vectors, elasticps.torch.KeyedTensor)
        assert vectors["friends"].shape == (2, 32)
        rows = scope["rows"]
        assert isinstance(rows, elasticps.torch.EmbeddingBagCollection)
        model = torch.nn.Sequential(rows)
        elasticps.torch.Optimizer(ps, model, optimizer=eps.Adam(lr=0.01))
        vectors.values().sum().backward()
        run("torch.md", 1, model=model)
        assert (tmp_path / "model.pt").exists()


def test_the_page_on_the_wire_has_every_kind_and_flag() -> None:
    page = (ROOT / "docs/internals/protocol.md").read_text(encoding="utf-8")
    kinds = re.findall(r"^\| (\d+) ([A-Z_]+) \|", page, re.M)
    assert {int(number): name for number, name in kinds} == {kind.value: kind.name for kind in frames.Kind}
    flags = dict(re.findall(r"(\d+) ([A-Z_]+)", re.search(r"\| flags \| (.*) \|$", page, re.M)[1]))  # type: ignore[index]
    assert {int(number): getattr(frames, name) for number, name in flags.items()} == {
        1 << at: 1 << at for at in range(16)
    }
    assert f"| 4 | u8 | version | {frames.VERSION};" in page


ORDERED: dict[str, list[Any]] = {
    "`Client`": [eps.Client],
    "`SparseTable`": [eps.SparseTable],
    "`DenseTensor`": [eps.DenseTensor],
    "`OpenStep`, `Step`, `Shards`": [eps.OpenStep, eps.Step, eps.Shards],
    "`elasticps.torch`, functions": [elasticps.torch],
    "`elasticps.torch`, `Embedding`, `EmbeddingBag`, `EmbeddingCollection`, `EmbeddingBagCollection`": [
        elasticps.torch.Embedding, elasticps.torch.EmbeddingBag, elasticps.torch.EmbeddingCollection,
        elasticps.torch.EmbeddingBagCollection,
    ],
    "`elasticps.torch`, `Optimizer`": [elasticps.torch.Optimizer],
    "`elasticps.torch`, `GroupClient`, `GroupTable`, `GroupTensor`": [
        elasticps.torch.GroupClient, group.GroupTable, group.GroupTensor
    ],
}  # fmt: skip
"""The tables of what calls are behind, and whose methods each of them names."""


def _methods(owner: Any) -> set[str]:
    """Public methods of a class, but those that torch's own classes have; public functions of a module."""
    if inspect.ismodule(owner):
        return {name for name in owner.__all__ if inspect.isfunction(getattr(owner, name))}
    ours = [vars(each) for each in owner.__mro__ if each.__module__.startswith("elasticps")]
    found = {name: value for each in reversed(ours) for name, value in each.items() if not name.startswith("_")}
    kinds = (staticmethod, classmethod)
    return {name for name, value in found.items() if inspect.isroutine(value) or isinstance(value, kinds)}


@pytest.mark.parametrize("heading", ORDERED)
def test_the_tables_of_call_order_name_every_method(heading: str) -> None:
    _, _, section = (
        (ROOT / "docs/concepts/consistency.md").read_text(encoding="utf-8").partition("## What a call is behind")
    )
    _, there, rest = section.partition(f"\n{heading}:")
    assert there
    rows = re.search(r"^\|.*?(?=\n\n)", rest, re.M | re.S)
    assert rows is not None
    cells = [line.split("|")[1] for line in rows[0].splitlines()[2:]]
    named = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    assert len(named) == len(set(named))
    assert set(named) == set().union(*map(_methods, ORDERED[heading]))


def test_every_page_with_code_is_run_somewhere() -> None:
    assert {name for name, page in PAGES.items() if _blocks(page, "python")} == RUN | ELSEWHERE


@pytest.mark.parametrize(("page", "line"), _commands())
def test_a_command_and_its_options_exist(page: str, line: str) -> None:
    words = shlex.split(line, comments=True)[1:]
    command = typer.main.get_command(app)
    context = command.make_context("elasticps", ["version"])
    try:
        while words and hasattr(command, "commands"):
            command, words = command.commands[words[0]], words[1:]
        command.make_context("elasticps", words, parent=context)
    except typer.Exit:
        pass
    except Exception as error:
        if "does not exist" not in str(error):  # a file of the reader's
            raise AssertionError(f"{page}: {line}: {error}") from error
