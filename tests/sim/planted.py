"""All planted bugs, and the stories that have to find them.

`python -m tests.sim.planted [NAME…]` looks for a story for each (`make soak`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import chain, count, islice

import pytest

from chaos.sim.run import Result, run
from chaos.sim.story import tell
from tests.sim import planted_chain, planted_kept, planted_rounds, planted_shell
from tests.sim.planting import Patch

STORIES = 50

KINDS: dict[Patch, frozenset[str]] = {
    **dict.fromkeys(planted_rounds.ROUNDS, frozenset({"rounds", "shards in rounds"})),
    **dict.fromkeys(planted_rounds.SHARDS, frozenset({"shards", "shards in rounds"})),
}
"""Of the training that a bug is in; of those that are not here: any."""

FLAVOUR: dict[Patch, str] = dict.fromkeys(planted_kept.PLANTED, "suspicions")
"""Of stories that a bug is in, likewise."""

PLANTED: tuple[Patch, ...] = (*planted_chain.PLANTED, *planted_shell.PLANTED, *planted_kept.PLANTED, *KINDS)

SURVIVE: dict[str, str] = {
    "count_only_workers_that_have_pushed": "each pushes within the second that a server may take to hear of it",
    "drop_the_first_part_of_a_share": "nobody pushes a round's step in parts",
    "wait_for_workers_that_pause": "whoever pauses leaves soon after",
}
"""What stories lack that would show these."""


def seeds(plant: Patch) -> Iterator[int]:
    """Of the stories that have to find a bug."""
    kinds, flavour = KINDS.get(plant), FLAVOUR.get(plant)
    stories = ((seed, tell(seed)) for seed in count())
    fitting = ((seed, story) for seed, story in stories if flavour in (None, story.flavour))
    return (seed for seed, story in fitting if kinds is None or any(app.kind in kinds for app in story.apps))


def alike(first: int) -> Iterator[int]:
    """A story, then those in which the same goes wrong in the same kinds of training: what has moved is found there."""

    def kind(seed: int) -> tuple[str, set[str]]:
        story = tell(seed)
        return story.flavour, {app.kind for app in story.apps}

    return chain((first,), (seed for seed in count() if seed != first and kind(seed) == kind(first)))


def find(plant: Patch, first: int | None = None) -> Result | None:
    """The first story that shows a bug that is planted. first: one that has shown it."""
    for seed in islice(seeds(plant) if first is None else alike(first), STORIES):
        result = run(seed)
        if not result.ok:
            return result
    return None


def main(names: list[str]) -> int:
    """How many bugs survive; prints the seed of each."""
    survived = 0
    for plant in PLANTED:
        if names and plant.__name__ not in names:
            continue
        with pytest.MonkeyPatch.context() as patch:
            plant(patch)
            found = find(plant)
        survived += found is None
        why = SURVIVE.get(plant.__name__, "it is not known why")
        told = f"SURVIVED: {why}" if found is None else f"{found.seed}  # {found.invariant}"
        sys.stdout.write(f'    "{plant.__name__}": {told}\n')
        sys.stdout.flush()
    return survived


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) > 0)
