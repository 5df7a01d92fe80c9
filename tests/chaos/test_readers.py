"""What the readers of a run have found: read from their files, judged, and in the report."""

from __future__ import annotations

import json
from collections.abc import Sequence

from chaos.live.readers import judge_findings, read_findings
from chaos.live.report import reader_words


def lines(*notes: dict[str, object]) -> Sequence[str]:
    return [json.dumps(note) + "\n" for note in notes]


def test_findings_of_all_lives_are_counted() -> None:
    found = read_findings(
        "r0",
        [*lines({"age": 0.01, "lag": 0.0, "wrong": ""}, {"age": float("inf"), "wrong": ""},
                {"age": 0.03, "lag": 0.02, "wrong": ""}, {"held": 0.2, "wrong": ""}, {"timeout": "no moment"},
                {"failed": "away"}, {"undecided": 2, "late": 0.004}, {"compared": 70, "wrong": ""}), '{"age": 0.'],
    )  # fmt: skip
    assert judge_findings(found) == []
    shown = found.as_dict()
    assert shown == {
        "reader": "r0", "looks": 3, "undecided": 2, "failed": 1, "held": 1, "apart": 1, "compared": 70,
        "age_ms": {"p50": 20.0, "p99": 29.8, "most": 30.0}, "lag_ms": {"p50": 10.0, "p99": 19.8, "most": 20.0},
        "late_ms": 4.0, "hold_ms": 200.0,
    }  # fmt: skip
    words = reader_words(shown)
    assert "3 looks, rows 20 ms old (p50), 29.8 (p99), 30 at most; what was committed was missing for 10 ms" in words
    assert "1 moments held, 1 not found" in words


def test_what_is_wrong_breaks_a_promise_and_so_does_a_reader_that_found_nothing() -> None:
    wrong = [{"age": 0.1, "wrong": f"key {key} is wrong"} for key in range(5)]
    words = judge_findings(read_findings("r0", lines(*wrong, {"compared": 3, "wrong": "a key is missing"})))
    assert words[:3] == [f"reader r0: key {key} is wrong" for key in range(3)]
    assert words[3] == "reader r0: and 3 more looks were wrong"
    silent = judge_findings(read_findings("r2", []))
    assert len(silent) == 2
    assert "has shown nothing" in silent[0]
    assert "was not compared" in silent[1]
