"""What a client knows, as numbers, and who writes them down."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import elasticps as eps

STATS = {"steps.pushed": 7, "bytes.sent": 1e6, "table.t.lr": 0.1, "odd": float("nan")}


class Known:
    """A client of which only the numbers matter."""

    clock = 7

    def stats(self) -> dict[str, float]:
        return dict(STATS)


class Run:
    """What a run of Weights & Biases has."""

    def __init__(self) -> None:
        self.logged: list[tuple[dict[str, float], int | None]] = []

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        self.logged.append((data, step))


class Writer:
    """What TensorBoard's `SummaryWriter` has."""

    def __init__(self) -> None:
        self.added: list[tuple[str, float, int | None]] = []

    def add_scalar(
        self, tag: str, scalar_value: float, global_step: int | None = None, walltime: float | None = None
    ) -> None:
        self.added.append((tag, scalar_value, global_step))


def test_numbers_go_to_a_run_as_one_record() -> None:
    run = Run()
    eps.log_stats(Known(), run)
    eps.log_stats(Known(), run, 3, prefix="ps.")
    assert run.logged[0] == (
        {"elasticps/steps.pushed": 7, "elasticps/bytes.sent": 1e6, "elasticps/table.t.lr": 0.1}, 7
    )  # fmt: skip
    assert run.logged[1][1] == 3
    assert "ps.bytes.sent" in run.logged[1][0]


def test_numbers_go_to_a_writer_one_by_one() -> None:
    writer = Writer()
    assert eps.log_stats(Known(), writer, 3) == {name: STATS[name] for name in list(STATS)[:3]}
    assert writer.added == [
        ("elasticps/steps.pushed", 7, 3), ("elasticps/bytes.sent", 1e6, 3), ("elasticps/table.t.lr", 0.1, 3)
    ]  # fmt: skip


def test_what_takes_no_numbers_is_refused() -> None:
    with pytest.raises(eps.ConfigError, match="a int has neither"):
        eps.log_stats(Known(), 3)


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        for step in (1, 2):
            eps.log_stats(Known(), writer, step)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == sorted(f"elasticps/{name}" for name in list(STATS)[:3])
    assert [(each.step, each.value) for each in events.Scalars("elasticps/bytes.sent")] == [(1, 1e6), (2, 1e6)]
