"""What a run makes of what its stage tells, without processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos.live import runner
from chaos.live.plan import parse
from chaos.live.runner import Run
from elasticps.errors import Error

PLAN = parse("{about: nothing, duration: 1, faults: []}", "plan", "plan.yaml")


class FakeStage:
    """One that does as its attributes say."""

    def __init__(self) -> None:
        self.left: list[str] = []

    def start_all(self) -> None:
        raise Error("etcd did not start")

    def close(self, logs_to: Path | None = None) -> list[str]:
        return self.left


def test_what_a_run_that_ends_in_an_error_leaves_behind_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    stage, told = FakeStage(), list[str]()
    stage.left = ["node n1 takes no new pods still"]
    monkeypatch.setattr(runner, "open_stage", lambda *arguments: stage)
    with pytest.raises(Error, match="etcd did not start"):
        Run(PLAN, 0, progress=told.append).carry_out()
    assert told[-1] == "node n1 takes no new pods still"
