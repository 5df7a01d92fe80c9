"""Whole clusters of real servers, leaders and workers under seeds: every promise is kept, and a seed is one story."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from chaos.sim.run import run
from chaos.sim.story import ANY, DROPS, FAULTS, FLAGS, FLAVOURS, TRAININGS, Kind, tell
from tests.sim.planted import PLANTED, kind_of
from tests.sim.story_cost import expected_events

Played = tuple[Kind, int]
"""A story that is played: its kind and its seed."""

SEEDS_PER_FLAVOUR = 8


def cost(played: Played) -> float:
    """Estimates what a story costs."""
    kind, seed = played
    return expected_events(tell(seed, kind))


FIRST = [(ANY, seed) for seed in range(len(FLAVOURS))]
"""The first of each flavour."""
CHEAP = [
    min(((ANY, flavour + i * len(FLAVOURS)) for i in range(SEEDS_PER_FLAVOUR)), key=cost)
    for flavour in range(len(FLAVOURS))
]
"""A cheap one of each flavour."""
FINDING = sorted({(kind_of(plant), seed) for plant, (*_, seed) in PLANTED.items()})
"""Stories that find planted bugs: where none is planted they must keep every promise."""
STORIES = [*dict.fromkeys([*FIRST, *CHEAP, *FINDING])]
COUNT, BATCHES = 60, 10


def met_in(played: Played) -> set[object]:
    """Returns what a story is an example of: its flavour, each fault, each training, each property of the cluster."""
    kind, seed = played
    story = tell(seed, kind)
    met: set[object] = {("flavour", story.flavour), *(("fault", fault.what) for fault in story.faults)}
    met |= {("servers", story.servers), ("replicas", story.replicas), ("small", story.small)}
    met |= {flag for flag in FLAGS if flag != DROPS.name and getattr(story, flag)}
    for app in story.apps:
        met |= {("training", app.kind), ("readers", app.readers > 0), ("large", app.large), ("bound", app.bound)}
    return met


def cheapest(stories: list[Played], count: int) -> list[Played]:
    """Chooses the cheapest stories that are examples of everything that is met in all, and then the cheapest others."""
    by_cost = sorted(stories, key=cost)
    chosen, met = list[Played](), set[object]()
    for played in by_cost:
        if not met_in(played) <= met:
            chosen.append(played)
            met |= met_in(played)
    return [*chosen, *(played for played in by_cost if played not in chosen)][:count]


QUICK = cheapest(STORIES, COUNT)
"""Stories of `make test`. `make test-all` plays all of STORIES, `make soak` thousands more."""
SLOW = [story for story in STORIES if story not in QUICK]


@pytest.mark.parametrize(
    "stories",
    [
        *(QUICK[start::BATCHES] for start in range(BATCHES)),
        *(pytest.param(SLOW[start::BATCHES], marks=pytest.mark.slow) for start in range(BATCHES)),
    ],
)
def test_every_promise_is_kept_in_every_story(stories: list[Played]) -> None:
    results = [run(seed, kind) for kind, seed in stories]
    failed = [str(result) for result in results if not result.ok]
    assert not failed, "\n".join(failed)


def test_the_stories_of_make_test_have_every_fault_and_every_kind_of_training() -> None:
    assert len(QUICK) == COUNT
    assert len(STORIES) >= 100
    met = set().union(*map(met_in, QUICK))
    assert met == set().union(*map(met_in, STORIES))
    assert {("flavour", flavour) for flavour in FLAVOURS} <= met
    assert {("training", training) for training in (*TRAININGS, DROPS.kind)} <= met
    assert {("fault", fault) for faults in FAULTS.values() for fault in faults} <= met


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
