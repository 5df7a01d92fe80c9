"""What a run makes of what its stage tells, without processes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from chaos.live import runner
from chaos.live.nemesis import Nemesis
from chaos.live.plan import parse
from chaos.live.runner import Run
from elasticps.audit import AuditReport
from elasticps.errors import Error
from tests.chaos.scenes import scene_of, view_of

PLAN = parse("{about: nothing, duration: 1, faults: []}", "plan", "plan.yaml")
VIEW = view_of([["s0", "s1"], ["s1", "s0"]])
CLEAN = AuditReport("c", 1, 2, 2, 4, 0, 0, (), (), {}, {}, 0.1)


class FakeStage:
    """One that does as its attributes say."""

    url = own_url = reader_url = ""

    def __init__(self) -> None:
        self.left: list[str] = []
        self.dead: list[tuple[str, str]] = []

    def start_all(self) -> None:
        raise Error("etcd did not start")

    def names(self, role: str) -> list[str]:
        return ["s0", "s1"] if role == "server" else []

    def poll(self) -> list[tuple[str, str]]:
        return self.ended()

    def ended(self) -> list[tuple[str, str]]:
        dead, self.dead = self.dead, []
        return dead

    def close(self, logs_to: Path | None = None) -> list[str]:
        return self.left


class FakeLoad:
    """Workers that have done nothing, and end when they are asked to."""

    def __init__(self) -> None:
        self.jobs: list[Any] = []
        self.names: list[str] = []

    def finish(self) -> list[str]:
        return []

    def lives(self, began: float) -> list[Any]:
        return []


@pytest.fixture
def stage() -> FakeStage:
    return FakeStage()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, stage: FakeStage) -> Run:
    """One whose faults are over, and that is to be judged."""
    monkeypatch.setattr(runner, "audit", lambda url, timeout_s: CLEAN)
    run = Run(PLAN, 0)
    run.nemesis = Nemesis(stage, (), lambda: scene_of(VIEW))  # type: ignore[arg-type]
    run.load = FakeLoad()  # type: ignore[assignment]
    run.watch = SimpleNamespace(view=VIEW, seen=[])  # type: ignore[assignment]
    return run


def test_a_run_in_which_nothing_went_wrong_has_kept_every_promise(run: Run, stage: FakeStage) -> None:
    run._judge(stage)
    assert run.outcome.broken == []


@pytest.mark.parametrize("moment", ["the workers end", "all is compared"])
def test_who_dies_after_all_was_whole_has_died(
    run: Run, stage: FakeStage, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    def dies(*arguments: Any) -> Any:
        stage.dead.append(("s1", "server s1 was killed by SIGSEGV"))
        return [] if moment == "the workers end" else CLEAN

    if moment == "the workers end":
        monkeypatch.setattr(run.load, "finish", dies)
    else:
        monkeypatch.setattr(runner, "audit", dies)
    run._judge(stage)
    (text,) = run.outcome.broken
    assert text.startswith("ended by itself at ")
    assert text.endswith(": server s1 was killed by SIGSEGV")


def test_what_a_run_that_ends_in_an_error_leaves_behind_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    stage, told = FakeStage(), list[str]()
    stage.left = ["node n1 takes no new pods still"]
    monkeypatch.setattr(runner, "open_stage", lambda *arguments: stage)
    with pytest.raises(Error, match="etcd did not start"):
        Run(PLAN, 0, progress=told.append).carry_out()
    assert told[-1] == "node n1 takes no new pods still"
