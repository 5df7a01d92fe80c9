"""Whole clusters of real servers, leaders and workers under seeds: every promise is kept, and a seed is one story."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from chaos.sim.run import run
from chaos.sim.story import ANY, DROPS, FLAVOURS, TRAININGS, Kind, tell
from tests.sim.planted import PLANTED, kind_of

ORDINARY = 40
FINDING = sorted({(kind_of(plant), seed) for plant, (*_, seed) in PLANTED.items()})
"""Stories that find planted bugs: where none is planted they must keep every promise."""
STORIES = [(ANY, seed) for seed in range(ORDINARY)] + FINDING
BATCH = 6
QUICK = [*{kind: (kind, seed) for kind, seed in FINDING}.values(), *STORIES][:60]
"""Sixty for `make test`, one of each kind first. `make test-all` plays all of them, `make soak` thousands more."""
BATCHES = [QUICK[start : start + BATCH] for start in range(0, len(QUICK), BATCH)]
LATER = [story for story in STORIES if story not in QUICK]
SLOW = [LATER[start : start + BATCH] for start in range(0, len(LATER), BATCH)]


@pytest.mark.parametrize("stories", [*BATCHES, *(pytest.param(batch, marks=pytest.mark.slow) for batch in SLOW)])
def test_every_promise_is_kept_in_every_story(stories: list[tuple[Kind, int]]) -> None:
    results = [run(seed, kind) for kind, seed in stories]
    failed = [str(result) for result in results if not result.ok]
    assert not failed, "\n".join(failed)


def test_the_stories_have_all_flavours_and_all_kinds_of_training() -> None:
    assert len(QUICK) == 60
    assert len(STORIES) >= 100
    stories = [tell(seed, kind) for kind, seed in QUICK]
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
