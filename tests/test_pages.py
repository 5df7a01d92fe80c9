"""What the pages say about the code, as far as its text shows: fast, for nothing of elasticps is imported."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = {page.relative_to(ROOT).as_posix(): page.read_text("utf-8") for page in sorted((ROOT / "docs").rglob("*.md"))}
FAMILIES = {
    "CounterMetricFamily": "_total", "_counter": "_total", "GaugeMetricFamily": "", "_gauge": "",
    "HistogramMetricFamily": "", "_histograms": "",
}  # fmt: skip
"""Functions of elasticps/metrics that make a family, and what Prometheus adds to its name."""


def metric_names() -> set[str]:
    """The names of all metrics that processes serve, read off the calls that make their families."""
    found = set()
    for file in sorted((ROOT / "elasticps/metrics").glob("*.py")):
        for call in ast.walk(ast.parse(file.read_text("utf-8"))):
            match call:
                case ast.Call(func=ast.Name(id=maker), args=[ast.Constant(value=str(name)), *_]) if maker in FAMILIES:
                    prefix = "" if name.startswith("elasticps_") else f"elasticps_{file.stem}_"
                    found.add(prefix + name + FAMILIES[maker])
    return found


def test_each_metric_is_described() -> None:
    described = set(re.findall(r"`(elasticps_\w+)`", PAGES["docs/reference/monitoring.md"]))
    assert described - {"elasticps_server_load"} == metric_names()  # that one is the autoscaler's


def _lines(page: str) -> Iterator[tuple[str, str]]:
    """(line before, line), without those of blocks of code."""
    in_code, before = False, ""
    for line in PAGES[page].splitlines():
        if line.startswith("```"):
            in_code = not in_code
        elif not in_code:
            yield before, line
        before = line


@pytest.mark.parametrize("page", PAGES)
def test_a_heading_follows_a_blank_line(page: str) -> None:
    assert [line for before, line in _lines(page) if re.match("#{2,5} ", line) and before.strip()] == []


def test_the_tests_that_the_rules_name_exist() -> None:
    named = set(re.findall(r"\btests/[\w/]+(?:\.py)?", (ROOT / "CONTRIBUTING.md").read_text("utf-8")))
    assert len(named) > 10
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_server_s_half_of_a_push_names_functions_that_exist() -> None:
    """Each `function` (`file`) of the table in docs/internals/walk.md, and each constant of failures.md."""
    rows = re.findall(r"^\| \d+ \| `([\w.]+)` \| `([\w./]+\.py)` \|", PAGES["docs/internals/walk.md"], re.M)
    assert len(rows) > 8
    for name, file in rows:
        text = (ROOT / file).read_text("utf-8")
        owner, _, function = name.rpartition(".")
        assert f"def {function}(" in text, f"{file} has no {function}"
        assert not owner or f"class {owner}" in text, f"{file} has no {owner}"


def test_constants_of_failure_detection_are_those_of_the_code() -> None:
    rows = re.findall(r"`(\w+_S)` (\d+(?:\.\d+)?) s \(`([\w./]+\.py)`\)", PAGES["docs/internals/failures.md"])
    assert len(rows) > 5
    for name, seconds, file in rows:
        (value,) = re.findall(rf"^{name} = ([\d.]+)", (ROOT / file).read_text("utf-8"), re.M)
        assert float(value) == float(seconds), f"{name} of {file}"
