from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image
from rich.console import Console

from elasticps.admin.audit import AuditReport, WorkerClocks
from examples.demo.report import (
    AuditAnswer,
    Evaluation,
    Kill,
    Moment,
    Report,
    Run,
    longest_pause,
    smooth,
    throughput,
)


def a_run(auc: float, seconds: float, *names: str) -> Run:
    loss = {name: [(seconds * i / 30, 0.7 - i / 300) for i in range(1, 31)] for name in names}
    ends = {name: [seconds * (i + 0.5) / 500 for i in range(500)] for name in names}
    evaluations = [Evaluation(e, seconds * e / 3, auc - 0.01 * (3 - e), 0.5) for e in (1, 2, 3)]
    return Run(seconds, 1000, loss, evaluations, ends)


def a_report(servers: float, reference: float) -> Report:
    timeline = [Moment(-2.0, "start"), Moment(3.3, "server s1 was killed by SIGKILL", "membership")]
    timeline += [Moment(4.0 + i / 2, f"scale to {i} servers", "change") for i in range(6)]
    ranges = [(0.0, {"s0": 256, "s1": 256}), (3.3, {"s0": 256}), (5.0, {"s0": 256, "s2": 200})]
    settings = {"model": "DeepFM", "data": "MovieLens-100K", "servers": 3, "workers": 2, "batch": 256}
    runs = a_run(servers, 10.0, "w0", "w1"), a_run(reference, 4.0, "reference")
    kill = Kill("s1", "s1#1", 90, 3.3, 12.0, 15.0, 42.0, 45.0)
    return Report(settings, *runs, timeline, AuditAnswer(True, 512), kill, ranges)


@pytest.mark.parametrize(("servers", "reference", "agrees"), [(0.78, 0.785, True), (0.80, 0.781, False)])
def test_the_aucs_agree_within_a_hundredth(servers: float, reference: float, agrees: bool) -> None:
    report = a_report(servers, reference)
    assert report.agrees is agrees
    assert report.difference == pytest.approx(servers - reference)


def test_time_without_a_cluster_is_reported_and_does_not_count_as_training() -> None:
    report = a_report(0.78, 0.78)
    report.servers.away.append((4.0, 9.0))
    assert report.servers.samples_per_s == 200
    assert report.as_dict()["elasticps"]["away"] == [[4.0, 9.0]]
    console = Console(width=120)
    with console.capture() as captured:
        console.print(report.table())
    assert re.search(r"of it, without a cluster\W+5.0 s", captured.get())


def test_the_report_is_written_as_json_and_as_a_picture(tmp_path: Path) -> None:
    from examples.demo.picture import draw  # only here, as in the demo: matplotlib takes half a second

    data, picture = tmp_path / "report.json", tmp_path / "report.png"
    report = a_report(0.7812345, 0.78)
    report.write(data)
    draw(report, picture)
    content = json.loads(data.read_text())
    assert content["elasticps"]["auc"] == 0.78123
    assert content["elasticps"]["samples_per_s"] == 100
    assert content["reference"]["evaluations"][0] == {"epoch": 1, "t": 1.33333, "auc": 0.76, "loss": 0.5}
    assert content["timeline"][1] == {"t": 3.3, "event": "server s1 was killed by SIGKILL", "kind": "membership"}
    assert content["agrees"] is True
    assert (content["kill"]["server"], content["kill"]["recovered_ms"]) == ("s1", 42.0)
    assert content["audit"]["clean"] is True
    assert content["ranges"][1] == [3.3, {"s0": 256}]
    assert content["elasticps"]["throughput"][5] == [0.5, 10 * 256 / 0.1]
    with Image.open(picture) as image:
        assert image.size == (1650, 1560)
        assert len(image.convert("RGB").getcolors(1 << 20) or []) > 100


def test_the_table_shows_both_runs() -> None:
    console = Console(width=120)
    with console.capture() as captured:
        console.print(a_report(0.78, 0.785).table())
    text = captured.get()
    for part in ("0.7800", "0.7850", "✓ -0.0050", "10.0 s", "250"):
        assert part in text


def test_the_printed_report_describes_the_kill_and_the_audit() -> None:
    report = a_report(0.78, 0.785)
    assert report.story() == [
        "s1 was killed after 3.3 s: recovered in 42 ms, longest pause of a worker 45 ms",
        "audit: all 512 replicas of ranges are equal, no acknowledged step is missing",
    ]
    report.kill, report.audit = None, AuditAnswer(False, 500, 2, 1, 6, 3)
    assert report.story() == [
        "audit: 2 replicas differ, 1 workers miss acknowledged steps, 3 ranges could not be compared; "
        "6 ranges are short of a replica"
    ]


def test_an_audit_of_one_remaining_server_is_clean_without_comparisons() -> None:
    alone = AuditReport(
        "demo", 7, 256, 2, 256, 256, 256, (), (WorkerClocks(1, "w0", 5, 5, 0, False),), {}, {}, 0.1
    )  # fmt: skip
    answer = AuditAnswer.of(alone)
    assert answer.clean
    assert str(answer) == (
        "one server is left, so nothing could be compared; no acknowledged step is missing; "
        "256 ranges are short of a replica"
    )
    assert not AuditAnswer.of(replace(alone, unjudged={3: "s1 did not answer"})).clean
    assert not AuditAnswer.of(replace(alone, lost={"s0": "silent"})).clean


def test_the_longest_pause_is_one_that_ended_after_the_kill() -> None:
    ends = [0.0, 1.0, 1.1, 1.2, 1.6, 1.7, 9.0]
    assert longest_pause(ends, 1.25) == pytest.approx(0.4)
    assert longest_pause(ends, 20.0) == 0.0


def test_throughput_counts_batches_of_all_processes() -> None:
    found = throughput({"w0": [-0.1, 0.05, 0.31], "w1": [0.06]}, 100)
    assert [rate for _, rate in found] == pytest.approx([2000, 0, 0, 1000])
    assert throughput({}, 100) == []


def test_smoothing_keeps_a_constant_and_has_no_bias_at_its_start() -> None:
    assert smooth([2.0] * 5, 10) == pytest.approx([2.0] * 5)
    assert smooth([1.0, 3.0], 3)[0] == 1.0
