"""Whole clusters of real servers, leaders and workers under seeds: every promise is kept, and a seed is one story."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from chaos.sim.run import run
from chaos.sim.story import FLAVOURS, TRAININGS, tell

STORIES = 114
BATCH = 6


@pytest.mark.parametrize("start", range(0, STORIES, BATCH))
def test_every_promise_is_kept_under_every_seed(start: int) -> None:
    failed = [str(result) for seed in range(start, start + BATCH) if not (result := run(seed)).ok]
    assert not failed, "\n".join(failed)


def test_the_stories_have_all_flavours_and_all_kinds_of_training() -> None:
    stories = [tell(seed) for seed in range(STORIES)]
    assert {story.flavour for story in stories} == set(FLAVOURS)
    assert {app.kind for story in stories for app in story.apps} == set(TRAININGS)


@pytest.mark.parametrize("seed", [1, 12])
def test_a_seed_gives_the_same_trace_in_every_process(seed: int) -> None:
    program = f"from chaos.sim.run import run; print(*run({seed}, trace=True).trace, sep='\\n')"
    traces = [
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": chance},
            capture_output=True,
            check=True,
        ).stdout
        for chance in ("1", "2")
    ]
    assert len(traces[0].splitlines()) > 1000
    assert traces[0] == traces[1]
