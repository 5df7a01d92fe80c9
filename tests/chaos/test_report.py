"""Figures and reports made of the workers' ledgers."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import typer

from chaos.live import cli, figures, report, runner
from chaos.live.cli import find_plan
from chaos.live.figures import Life
from chaos.live.load import BEGUN, COMMITTED, FAILED, RECORD
from chaos.live.nemesis import FaultRecord
from chaos.live.runner import Outcome, command_line
from chaos.live.verdict import excused
from chaos.live.watch import Seen
from elasticps.errors import ConfigError
from tests.chaos.scenes import action_of


def life(worker: str, *records: tuple[int, int, float], number: int = 1, ended: float = math.nan) -> Life:
    return Life(worker, number, np.array(list(records), RECORD), ended)


STEADY = [each for n in range(1, 100) for each in ((BEGUN, n, n / 10), (COMMITTED, n, n / 10 + 0.02))]
STUCK = [
    (BEGUN, 1, 0.1),
    (COMMITTED, 1, 0.2),
    (BEGUN, 2, 0.3),
    (COMMITTED, 2, 4.0),
    (BEGUN, 3, 4.1),
    (COMMITTED, 3, 4.2),
]


def test_recovery_ends_with_the_first_commit_of_a_step_begun_after_the_fault() -> None:
    incarnations = [life("w0", *STEADY), life("w1", *STUCK)]
    found = figures.recovery(incarnations, 1.0)
    assert found == pytest.approx({"w0": 0.02, "w1": 3.2})


def test_a_worker_that_was_not_running_at_the_fault_does_not_count_for_recovery() -> None:
    incarnations = [
        life("w0", (BEGUN, 1, 0.5), (BEGUN, 2, 1.5)),
        life("w0", (BEGUN, 1, 3.0), (COMMITTED, 1, 3.1), number=2),
    ]
    assert figures.recovery(incarnations, 1.0) == {}
    assert figures.progressed(incarnations, 1.0)
    assert not figures.progressed(incarnations, 3.05)


def stall_of(
    incarnations: list[Life], excused: dict[str, list[tuple[float, float]]] | None = None
) -> tuple[float, str, float]:
    """The longest stall: seconds, worker, and start."""
    stall = figures.longest_stall(incarnations, excused or {})
    return round(stall.seconds, 6), stall.worker, round(stall.at, 6)


def test_the_longest_stall_leaves_out_only_the_faults_of_the_worker_itself() -> None:
    incarnations = [life("w0", *STEADY), life("w1", *STUCK)]
    assert stall_of(incarnations) == (3.8, "w1", 0.2)
    paused = {"w1": [(2.5, 2.8), (1.0, 2.0)]}
    assert stall_of(incarnations, paused) == (1.2, "w1", 2.8)
    assert figures.longest_stall(incarnations, {"w1": [(0.1, 5.0)]}).seconds == pytest.approx(0.1)
    assert figures.longest_stall([], {}).seconds == 0.0


def test_waiting_for_the_first_commit_is_a_stall() -> None:
    late = life("w0", (BEGUN, 1, 10.0), (BEGUN, 2, 10.5), (COMMITTED, 1, 14.0), (COMMITTED, 2, 14.1), number=2)
    assert stall_of([late]) == (3.5, "w0", 10.5)
    killed = {"w0": [(8.0, 11.0)]}  # it was ready again at 10
    assert stall_of([late], killed) == (3.0, "w0", 11.0)


def test_an_incarnation_that_ends_waiting_has_stalled_until_its_end() -> None:
    in_vain = life("w0", (BEGUN, 1, 1.0), (BEGUN, 2, 1.1), ended=7.1)
    assert stall_of([in_vain]) == (6.0, "w0", 1.1)
    waits = life("w0", *STUCK, (BEGUN, 4, 4.3), ended=20.2)
    assert figures.longest_stall([waits], {"w0": [(14.2, 25.0)]}).seconds == pytest.approx(10.0)
    assert figures.longest_stall([life("w0", ended=60.0)], {}).seconds == 0.0  # starting is no step


def test_operations_are_counted_and_spread_over_time() -> None:
    incarnations = [life("w0", *STEADY), life("w1", (BEGUN, 1, 0.1), (FAILED, 1, 0.2))]
    counts = figures.counts(incarnations)
    assert (counts["steps_begun"], counts["steps_committed"], counts["steps_failed"]) == (100, 99, 1)
    assert figures.throughput(incarnations, 10.0, 1.0).tolist() == [9.0] + [10.0] * 9


def outcome_of(*broken: str) -> Outcome:
    fault = FaultRecord(action_of("kill", "head-of:hottest"), "over", "s1", "server", 1.0, 3.0)
    cut = FaultRecord(action_of("pause", "worker", for_=4), "over", "w1", "worker", 5.0, 9.0)
    skipped = FaultRecord(action_of("kill", "s9"), "skipped", note="<never>")
    plan = find_plan("kill-each-role")
    outcome = Outcome(plan, 3, 10.0, command_line("kill-each-role", 3, 10.0, False), [fault, cut, skipped])
    outcome.incarnations = [life("w0", *STEADY), life("w1", *STUCK)]
    outcome.views = [Seen(1.1, 7, 16, 0, "s1 is <gone>"), Seen(2.0, 8, 0, 0, "repaired")]
    outcome.broken = list(broken)
    return outcome


def test_a_report_has_three_files_and_the_page_needs_no_other(tmp_path: Path) -> None:
    found = report.write(outcome_of("w0, life 1: 1 ranges have pushes lost"), tmp_path)
    assert json.loads((tmp_path / "report.json").read_text()) == found
    assert not found["kept"]
    assert found["command"] == "elasticps chaos run kill-each-role --seed 3 --duration 10"
    assert found["faults"][0]["recovery_ms"] == {"w0": 20.0, "w1": 3200.0}
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "index.html").read_text()
    assert "1 promises were broken" in page
    assert "s1 is &lt;gone&gt;" in page
    assert "&lt;never&gt;" in page
    assert not re.search(r"(?:src|href)=\"(?!data:)", page)
    assert "http" not in page


def test_reports_are_summed_up_by_kind_of_fault(tmp_path: Path) -> None:
    for seed in range(3):
        report.write(outcome_of(*["lost"] * (seed == 2)), tmp_path / str(seed))
    text = report.summary([tmp_path])
    assert "| kill server | 3 | 3200 | 3200 | 3200 |" in text
    assert "| pause worker | 3 | 20 | 20 | 20 |" in text  # of the other worker
    assert "3 runs, 1 with a broken promise." in text
    with pytest.raises(ConfigError, match=r"no report\.json"):
        report.summary([tmp_path / "nothing"])


def test_faults_on_a_worker_excuse_its_stalls() -> None:
    assert excused(outcome_of().faults) == {"w1": [(5.0, 10.0)]}


def untried() -> Outcome:
    outcome = outcome_of()
    outcome.faults = [FaultRecord(each.action, "skipped", note="s9: there is none now") for each in outcome.faults]
    return outcome


def test_a_run_without_faults_has_kept_no_promise(tmp_path: Path) -> None:
    found = report.write(untried(), tmp_path / "1")
    assert (found["kept"], found["tried"], found["broken"]) == (False, False, [])
    assert report.verdict(found) == "nothing was tried: all 3 faults were skipped"
    assert "nothing was tried: all 3 faults were skipped" in (tmp_path / "1" / "index.html").read_text()
    report.write(outcome_of(), tmp_path / "2")
    text = report.summary([tmp_path])
    assert "2 runs, 0 with a broken promise, 1 in which nothing was tried." in text
    assert "- `elasticps chaos run kill-each-role --seed 3 --duration 10`: nothing was tried: all 3" in text


def test_a_run_that_was_over_before_its_first_fault_tried_nothing() -> None:
    outcome = outcome_of()
    outcome.faults = []
    assert report.verdict(report.as_dict(outcome)) == "nothing was tried: no fault came due"
    outcome.plan = replace(outcome.plan, faults=())  # nor was anything to be
    assert outcome.passed
    assert report.verdict(report.as_dict(outcome)) == "every promise was kept"


def test_a_run_says_on_the_terminal_that_nothing_was_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner.Run, "carry_out", lambda run, logs_to: untried())
    with pytest.raises(typer.Exit) as ended:
        cli._run(find_plan("kill-each-role"), 3, None, tmp_path, "again", as_json=False)
    assert ended.value.exit_code == 1
    shown = capsys.readouterr().out
    assert "nothing was tried: all 3 faults were skipped" in shown
    assert "kept" not in shown


def reported(do: str, role: str, target: str, began: float, ended: float, **ms: float) -> dict[str, object]:
    return {"do": do, "role": role, "target": target, "began": began, "ended": ended, "recovery_ms": ms}


def test_figures_leave_out_workers_that_were_hit_and_list_undecided_faults_apart() -> None:
    faults = [
        reported("kill", "server", "s0", 10.0, 12.0, w0=50.0, w1=70.0),
        reported("pause", "worker", "w1", 20.0, 25.0, w0=20.0, w1=5020.0),
        reported("kill", "server", "s1", 21.0, 22.0, w0=80.0, w1=4000.0),
        reported("kill", "coordinator", "c0", 40.0, 41.0, w0=10.0),
        reported("pause", "server", "s2", 42.0, 44.0, w0=2000.0),
        reported("kill", "server", "s3", -1.0, -1.0),
    ]
    assert figures.by_kind([{"faults": faults}]) == {
        "kill coordinator": [10.0],
        "kill server": [70.0, 80.0],
        "pause server, leader or etcd away": [2000.0],
        "pause worker": [20.0],
    }
