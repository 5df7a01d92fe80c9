"""Verdicts of a run on the reports of its stage, without processes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from chaos.live import load as load_module
from chaos.live import runner
from chaos.live.figures import Life
from chaos.live.load import BEGUN, COMMITTED, FAILED, READ, READ_FAILED, RECORD, STALE
from chaos.live.nemesis import FaultRecord, Nemesis
from chaos.live.plan import Promises, parse
from chaos.live.runner import Load, Run
from chaos.live.watch import Seen
from elasticps.admin.audit import AuditReport
from elasticps.errors import Error
from tests.chaos.scenes import action_of, scene_of, view_of

PLAN = parse("{about: nothing, duration: 1, faults: []}", "plan", "plan.yaml")
VIEW = view_of([["s0", "s1"], ["s1", "s0"]])
LOOKED = Life("observer", 1, np.array([(READ, 0, 1.0)], RECORD))
CLEAN = AuditReport("c", 1, 2, 2, 4, 0, 0, (), (), {}, {}, 0.1)


class FakeStage:
    """A stage that behaves as its attributes say."""

    url = own_url = reader_url = ""

    def __init__(self) -> None:
        self.left: list[str] = []
        self.dead: list[tuple[str, str]] = []
        self.missing: list[str] = []
        self.used = 0

    def start_all(self) -> None:
        raise Error("etcd did not start")

    def names(self, role: str) -> list[str]:
        return ["s0", "s1"] if role == "server" else []

    def poll(self) -> list[tuple[str, str]]:
        return self.ended()

    def ended(self) -> list[tuple[str, str]]:
        dead, self.dead = self.dead, []
        return dead

    def memory_used(self, name: str) -> int:
        return self.used

    def late(self, names: Sequence[str]) -> list[str]:
        return self.missing

    def close(self, logs_to: Path | None = None) -> list[str]:
        return self.left


class FakeLoad:
    """Workers that have done nothing, and end when they are asked to."""

    def __init__(self) -> None:
        self.jobs: list[Any] = []
        self.names: list[str] = []
        self.readers = SimpleNamespace(names=[])

    def finish(self) -> list[str]:
        return []

    def incarnations(self, began: float) -> list[Any]:
        return [LOOKED]


@pytest.fixture
def stage() -> FakeStage:
    return FakeStage()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, stage: FakeStage) -> Run:
    """A run whose faults are over, to be judged."""
    monkeypatch.setattr(runner, "audit", lambda url, timeout_s: CLEAN)
    monkeypatch.setattr(load_module, "check_run", lambda *arguments: [])
    run = Run(PLAN, 0)
    run.nemesis = Nemesis(stage, (), lambda: scene_of(VIEW))  # type: ignore[arg-type]
    run.load = FakeLoad()  # type: ignore[assignment]
    run.watch = SimpleNamespace(view=VIEW, seen=[])  # type: ignore[assignment]
    return run


def test_a_run_in_which_nothing_went_wrong_has_kept_every_promise(run: Run, stage: FakeStage) -> None:
    run._judge(stage)
    assert run.outcome.broken == []


@pytest.mark.parametrize("moment", ["the workers end", "all is compared"])
def test_a_server_that_dies_after_recovery_breaks_a_promise(
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


def test_a_run_that_ends_in_an_error_reports_what_it_leaves_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    stage, reported = FakeStage(), list[str]()
    stage.left = ["node n1 takes no new pods still"]
    monkeypatch.setattr(runner, "open_stage", lambda *arguments: stage)
    with pytest.raises(Error, match="etcd did not start"):
        Run(PLAN, 0, progress=reported.append).carry_out()
    assert reported[-1] == "node n1 takes no new pods still"


def test_no_fault_begins_before_every_range_has_all_replicas(stage: FakeStage, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was, and what broke then said nothing of the faults."""
    monkeypatch.setattr(stage, "start_all", lambda: None)
    monkeypatch.setattr(runner, "START_S", 0.05)
    monkeypatch.setattr(runner, "open_stage", lambda *arguments: stage)
    monkeypatch.setattr(runner, "Watch", lambda *arguments: SimpleNamespace(view=None, seen=[], close=lambda: None))
    with pytest.raises(Error, match=r"nothing was tried: 0\.05 s after its start .* not whole: no view was formed"):
        Run(PLAN, 0).carry_out()


def test_a_worker_that_does_not_come_back_has_been_lost(
    run: Run, stage: FakeStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "START_S", 0.05)
    stage.missing = ["w1"]
    run._judge(stage)
    assert run.outcome.broken == ["w1 was not ready again 0.05 s after all was whole; its log may say why"]


def test_incarnations_without_a_step_are_noted(run: Run, stage: FakeStage, monkeypatch: pytest.MonkeyPatch) -> None:
    incarnations = [Life("w0", n, np.array([(BEGUN, 1, 1.0)][: n % 2], RECORD)) for n in (1, 2, 3, 4)]
    monkeypatch.setattr(run.load, "incarnations", lambda began: [*incarnations, LOOKED])
    run._judge(stage)
    assert run.outcome.broken == []
    assert run.outcome.notes == ["w0, life 2 ended before its first step", "w0, life 4 ended before its first step"]


def test_missing_replicas_at_the_end_are_reported(run: Run, stage: FakeStage) -> None:
    run._plan = replace(PLAN, promises=Promises(settle_s=0.05))
    run.watch = SimpleNamespace(view=view_of([["s0", "s1"], ["s1"]]), seen=[])  # type: ignore[assignment]
    run._judge(stage)
    assert run.outcome.broken == ["not whole 0.05 s after the last fault: 1 ranges have fewer than 2 replicas"]


def test_a_fault_that_does_not_end_is_reported(run: Run, stage: FakeStage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "START_S", 0.05)
    run._plan = replace(PLAN, promises=Promises(settle_s=0.05))
    assert run.nemesis is not None
    run.nemesis.faults = [FaultRecord(action_of("grow"), "running", "s9", began=1.0, names=["s9"])]
    monkeypatch.setattr(stage, "ready", lambda name: False, raising=False)
    run._judge(stage)
    assert run.outcome.broken == ["did not end: grow s9"]


@pytest.mark.parametrize(
    ("kind", "words"), [(FAILED, "pushes failed"), (READ_FAILED, "pulls failed"), (STALE, "pulls were stale")]
)
def test_wrong_values_that_workers_and_the_observer_noted_are_reported(
    run: Run, stage: FakeStage, monkeypatch: pytest.MonkeyPatch, kind: int, words: str
) -> None:
    incarnations = [Life("w0", 1, np.array([(BEGUN, 1, 1.0), (kind, 1, 2.0)], RECORD)), LOOKED]
    monkeypatch.setattr(run.load, "incarnations", lambda began: incarnations)
    run._judge(stage)
    assert run.outcome.broken == [f"1 {words}; the workers' logs say which"]


def test_an_observer_that_has_read_nothing_is_reported(
    run: Run, stage: FakeStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run.load, "incarnations", lambda began: [Life("observer", 1, np.array([], RECORD))])
    run._judge(stage)
    assert run.outcome.broken == ["the observer has read nothing, so nobody has seen what others read"]
    run.outcome.broken.clear()
    run.outcome.faults = [FaultRecord(action_of("kill", "worker"), "over", "observer", "worker", 0.0, 0.0)]
    run._check_ledgers()
    assert "the observer has read nothing, so nobody has seen what others read" not in run.outcome.broken


def test_a_stall_over_the_limit_and_a_fault_without_recovery_are_reported(
    run: Run, stage: FakeStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    run._plan = replace(PLAN, promises=Promises(stall_s=1.0))
    records = np.array([(BEGUN, 1, 1.0), (COMMITTED, 1, 3.5), (BEGUN, 2, 3.6), (COMMITTED, 2, 3.7)], RECORD)
    monkeypatch.setattr(run.load, "incarnations", lambda began: [Life("w0", 1, records), LOOKED])
    kill = action_of("kill", "s0")
    run.outcome.faults = [FaultRecord(kill, "over", "s0", "server", at, at) for at in (2.0, 3.65)]
    run._judge(stage)
    assert run.outcome.broken == [
        "w0 had no commit for 2.50 s, at 1.0 s; 1 s is allowed",
        "no worker committed anything that it began after: kill s0",
    ]


def test_a_view_older_than_the_one_before_is_reported(run: Run, stage: FakeStage) -> None:
    assert run.watch is not None
    run.watch.seen += [Seen(1.0, 7, 0, 0, "a"), Seen(2.0, 6, 0, 0, "b")]
    run._judge(stage)
    assert run.outcome.broken == ["at 2.0 s the view of epoch 7 was followed by another one of epoch 6: b"]


def test_content_that_is_wrong_or_cannot_be_read_is_reported(
    run: Run, stage: FakeStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_module, "check_run", lambda url, ledgers, filling: [f"wrong with {filling} rows filled"])
    monkeypatch.setattr(runner, "audit", lambda url, timeout_s: replace(CLEAN, short=1))
    run._judge(stage)
    assert run.outcome.broken == ["wrong with 20000 rows filled", "1 ranges have fewer than 2 replicas"]

    def fails(*arguments: Any) -> list[str]:
        raise Error("s0 does not answer")

    run.outcome.broken.clear()
    monkeypatch.setattr(load_module, "check_run", fails)
    run._judge(stage)
    assert run.outcome.broken == ["the content could not be checked: s0 does not answer"]


def test_a_server_over_its_memory_limit_is_reported_once(run: Run, stage: FakeStage) -> None:
    run._plan = replace(PLAN, cluster=replace(PLAN.cluster, memory="512MiB"))
    stage.used = 512 << 20
    run._weigh(stage)
    assert run.outcome.broken == []
    stage.used += 1 << 20
    for _ in range(2):
        run._weighed = 0.0
        run._weigh(stage)
    assert [text.partition(" at ")[0] for text in run.outcome.broken] == ["s0 used 513 MiB", "s1 used 513 MiB"]


def test_memory_that_could_not_be_measured_is_reported(run: Run, stage: FakeStage) -> None:
    run._plan = replace(PLAN, cluster=replace(PLAN.cluster, memory="512MiB"))
    run._judge(stage)
    assert run.outcome.broken == ["nothing was seen of what servers used, of 512MiB each"]


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


def test_an_incarnation_ends_when_the_next_one_starts_or_the_load_finishes(tmp_path: Path) -> None:
    stage = Workers(tmp_path)
    load = Load(PLAN, 0, stage)  # type: ignore[arg-type]
    times = [time.time()]
    for happens in (load.start, lambda: stage.commands["w0"](), load.finish):
        happens()
        times.append(time.time())
    w0, w1, again, observer = load.incarnations(0.0)
    assert [(life.worker, life.number) for life in (w0, w1, again)] == [("w0", 1), ("w1", 1), ("w0", 2)]
    assert times[1] <= w0.ended <= times[2] <= again.ended <= times[3]
    assert times[2] <= w1.ended <= times[3]
    assert observer.worker == "observer"


def test_the_end_of_a_worker_that_is_already_gone_is_unknown(tmp_path: Path) -> None:
    stage = Workers(tmp_path)
    load = Load(PLAN, 0, stage)  # type: ignore[arg-type]
    load.start()
    stage.gone.add("w1")
    load.finish()
    assert math.isnan(load.incarnations(0.0)[1].ended)
