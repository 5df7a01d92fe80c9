"""Whole clusters of real servers, leaders and workers under seeds: every promise is kept, and a seed is one story."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from chaos.sim.run import run
from chaos.sim.story import ANY, DROPS, FLAVOURS, TRAININGS, tell
from tests.sim.planted import PLANTED, kind_of

ORDINARY = 40
STORIES = [(ANY, seed) for seed in range(ORDINARY)]
STORIES += sorted({(kind_of(plant), seed) for plant, (*_, seed) in PLANTED.items()})
"""Those that find bugs must keep every promise where there is none."""
BATCH = 6


@pytest.mark.parametrize("start", range(0, len(STORIES), BATCH))
def test_every_promise_is_kept_in_every_story(start: int) -> None:
    results = [run(seed, kind) for kind, seed in STORIES[start : start + BATCH]]
    failed = [str(result) for result in results if not result.ok]
    assert not failed, "\n".join(failed)


def test_the_stories_have_all_flavours_and_all_kinds_of_training() -> None:
    assert len(STORIES) >= 100
    stories = [tell(seed, kind) for kind, seed in STORIES]
    assert {story.flavour for story in stories} == set(FLAVOURS)
    assert {app.kind for story in stories for app in story.apps} == {*TRAININGS, DROPS.kind}


@pytest.mark.parametrize("seed", [12])
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
