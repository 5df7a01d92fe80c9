"""`elasticps sim --record`: stories of several sittings, counted together while they play the same code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import chaos.sim.cli
import chaos.sim.run
from chaos.sim import code
from chaos.sim.run import Result
from chaos.sim.story import Kind

app = typer.Typer()
app.command()(chaos.sim.cli.sim)


class Stories:
    """In place of stories: which seeds were played. stop: the one that is interrupted; broken: those that fail."""

    def __init__(self) -> None:
        self.played: list[int] = []
        self.stop = -1
        self.broken: set[int] = set()

    def run(self, seed: int, kind: Kind, **_: object) -> Result:
        if seed == self.stop:
            raise KeyboardInterrupt
        self.played.append(seed)
        return Result(seed, kind, "progress" * (seed in self.broken), "it waits", events=10, steps=seed)


@pytest.fixture
def stories(monkeypatch: pytest.MonkeyPatch) -> Stories:
    found = Stories()
    monkeypatch.setattr(chaos.sim.run, "run", found.run)
    monkeypatch.setattr(chaos.sim.cli, "_code", lambda: "as it is")
    return found


def sit(path: Path, *options: str) -> tuple[int, str]:
    """Runs the command once: its exit code and its output."""
    result = CliRunner().invoke(app, ["--jobs", "1", "--record", str(path), *options])
    return result.exit_code, result.output


def test_a_sitting_goes_on_behind_the_sitting_before(stories: Stories, tmp_path: Path) -> None:
    path = tmp_path / "played.json"
    stories.stop = 130
    assert sit(path, "--seed", "10", "--runs", "200")[0] == chaos.sim.cli.STOPPED
    assert json.loads(path.read_text())["last"] == 129
    stories.stop = -1
    exit_code, output = sit(path, "--runs", "200")
    assert exit_code == 0
    assert stories.played == list(range(10, 210))
    assert "200 runs, 2,000 events" in output
    assert "seeds 10 to 209 took" in output
    reported = json.loads(path.read_text())
    assert (reported["first"], reported["last"], reported["runs"], reported["failed"]) == (10, 209, 200, 0)
    assert reported["steps"] == sum(range(10, 210))
    assert sit(path, "--runs", "200")[0] == 0, "all have been played"
    assert len(stories.played) == 200
    assert [each.name for each in tmp_path.iterdir()] == ["played.json"]


def test_a_broken_promise_of_an_earlier_sitting_still_counts(stories: Stories, tmp_path: Path) -> None:
    path = tmp_path / "played.json"
    stories.broken = {1}
    assert sit(path, "--runs", "3")[0] == 1
    exit_code, output = sit(path, "--runs", "5")
    assert exit_code == 1
    assert "1 broke a promise" in output
    assert "elasticps sim --seed 1 --trace" in output


def test_other_code_begins_anew_and_says_so(stories: Stories, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "played.json"
    sit(path, "--seed", "7", "--runs", "3")
    monkeypatch.setattr(chaos.sim.cli, "_code", lambda: "changed")
    stories.stop = 20
    exit_code, output = sit(path, "--seed", "20", "--runs", "3")
    assert exit_code == chaos.sim.cli.STOPPED
    assert "is of other code than this: it begins anew" in output
    assert json.loads(path.read_text())["last"] == 9, "nothing has been played that could take its place"
    stories.stop = -1
    assert sit(path, "--seed", "20", "--runs", "3")[0] == 0
    reported = json.loads(path.read_text())
    assert (reported["code"], reported["first"], reported["last"], reported["runs"]) == ("changed", 20, 22, 3)


@pytest.mark.parametrize(
    ("text", "options", "why"),
    [
        (None, ["--seed", "3"], "leave --seed out"),
        (None, ["--flavour", "limps"], "of other stories"),
        ("[1]", [], "is no record of stories"),
        ("{", [], "is no record of stories"),
    ],
)
def test_a_record_that_a_sitting_cannot_continue_is_refused_and_kept(
    text: str | None, options: list[str], why: str, stories: Stories, tmp_path: Path
) -> None:
    path = tmp_path / "played.json"
    sit(path, "--seed", "7", "--runs", "3")
    if text is not None:
        path.write_text(text)
    before = path.read_text()
    exit_code, output = sit(path, *options)
    assert exit_code == 2
    assert why in " ".join(output.replace("│", " ").split())
    assert path.read_text() == before


def test_a_record_that_cannot_be_written_is_refused_before_anything_is_played(stories: Stories, tmp_path: Path) -> None:
    exit_code, output = sit(tmp_path / "nowhere" / "played.json", "--runs", "3")
    assert exit_code == 2
    assert "cannot be written" in " ".join(output.replace("│", " ").split())
    assert stories.played == []


def test_the_code_digest_ignores_comments_docstrings_and_layout() -> None:
    def of(source: str, name: str = "replication.core") -> str:
        return code.of([(name, source.encode())])

    plain = of("def f(x):\n    return x + 1\n")
    assert of('"""Of a module."""\ndef f(x):  # why\n    """Adds."""\n    return (x\n            + 1)\n') == plain
    assert of("def f(x):\n    return x + 2\n") != plain
    assert of("def f(x):\n    return x + 1\n", "replication.chain") != plain


def test_the_code_digest_covers_the_code_of_stories_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def look(modules: Any) -> str:
        seen.update(modules)
        return ""

    found = code.digest()
    assert len(found) == 16
    assert code.digest() == found
    monkeypatch.setattr(code, "of", look)
    code.played()  # of this process, which may have imported more
    assert {"replication.core", "elasticps.server.server", "chaos.sim.run", "coordinator.core.planner"} <= seen.keys()
    assert "chaos.sim.code" not in seen
