"""What a run makes of what its stage tells, without processes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from chaos.live import runner
from chaos.live.figures import Life
from chaos.live.load import BEGUN, READ, RECORD
from chaos.live.nemesis import Nemesis
from chaos.live.plan import parse
from chaos.live.runner import Load, Run
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
        self.missing: list[str] = []

    def start_all(self) -> None:
        raise Error("etcd did not start")

    def names(self, role: str) -> list[str]:
        return ["s0", "s1"] if role == "server" else []

    def poll(self) -> list[tuple[str, str]]:
        return self.ended()

    def ended(self) -> list[tuple[str, str]]:
        dead, self.dead = self.dead, []
        return dead

    def late(self, names: Sequence[str]) -> list[str]:
        return self.missing

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


def test_a_worker_that_does_not_come_back_has_been_lost(
    run: Run, stage: FakeStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "START_S", 0.05)
    stage.missing = ["w1"]
    run._judge(stage)
    assert run.outcome.broken == ["w1 was not ready again 0.05 s after all was whole; its log may say why"]


def test_lives_without_a_step_are_told(run: Run, stage: FakeStage, monkeypatch: pytest.MonkeyPatch) -> None:
    lives = [Life("w0", n, np.array([(BEGUN, 1, 1.0)][: n % 2], RECORD)) for n in (1, 2, 3, 4)]
    onlooker = Life("onlooker", 1, np.array([(READ, 0, 1.0)], RECORD))
    monkeypatch.setattr(run.load, "lives", lambda began: [*lives, onlooker])
    run._judge(stage)
    assert run.outcome.broken == []
    assert run.outcome.notes == ["w0, life 2 ended before its first step", "w0, life 4 ended before its first step"]


class Workers:
    """A stage of workers that run until they are asked to end."""

    url = ""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.commands: dict[str, Callable[[], list[str]]] = {}
        self.gone: set[str] = set()

    def add_worker(self, name: str, command: Callable[[], list[str]], *, says_ready: bool = True) -> None:
        self.commands[name] = command
        command()

    def wait_ready(self, names: Sequence[str]) -> None:
        assert {*names} <= {*self.commands}

    def running(self, name: str) -> bool:
        return name not in self.gone

    def terminate(self, name: str) -> None:
        self.gone.add(name)

    def code(self, name: str) -> int:
        return 0


def test_a_life_ends_as_the_next_one_of_its_worker_is_started_or_as_all_are_asked_to(tmp_path: Path) -> None:
    stage = Workers(tmp_path)
    load = Load(PLAN, 0, stage)  # type: ignore[arg-type]
    moments = [time.time()]
    for happens in (load.start, lambda: stage.commands["w0"](), load.finish):
        happens()
        moments.append(time.time())
    w0, w1, again, onlooker = load.lives(0.0)
    assert [(life.worker, life.number) for life in (w0, w1, again)] == [("w0", 1), ("w1", 1), ("w0", 2)]
    assert moments[1] <= w0.ended <= moments[2] <= again.ended <= moments[3]
    assert moments[2] <= w1.ended <= moments[3]
    assert onlooker.worker == "onlooker"


def test_who_does_not_run_at_the_end_has_ended_nobody_knows_when(tmp_path: Path) -> None:
    stage = Workers(tmp_path)
    load = Load(PLAN, 0, stage)  # type: ignore[arg-type]
    load.start()
    stage.gone.add("w1")
    load.finish()
    assert math.isnan(load.lives(0.0)[1].ended)
