"""All planted bugs, and the stories that have to find them.

`python -m tests.sim.planted [NAME…]` looks for a story for each (`make soak`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import count, islice

import pytest

from chaos.sim.run import Result, run
from chaos.sim.story import tell
from tests.sim import planted_chain, planted_rounds, planted_shell
from tests.sim.planting import Patch

STORIES = 50

KINDS: dict[Patch, frozenset[str]] = {
    **dict.fromkeys(planted_rounds.ROUNDS, frozenset({"rounds", "shards in rounds"})),
    **dict.fromkeys(planted_rounds.SHARDS, frozenset({"shards", "shards in rounds"})),
}
"""Of the training that a bug is in; of those that are not here: any."""

PLANTED: tuple[Patch, ...] = (*planted_chain.PLANTED, *planted_shell.PLANTED, *KINDS)


def seeds(plant: Patch) -> Iterator[int]:
    """Of the stories that have to find a bug."""
    kinds = KINDS.get(plant)
    found = (seed for seed in count() if kinds is None or any(app.kind in kinds for app in tell(seed).apps))
    return islice(found, STORIES)


def find(plant: Patch, first: int | None = None) -> Result | None:
    """The first story that shows a bug that is planted; `first` is tried before all others."""
    for seed in (*(() if first is None else (first,)), *seeds(plant)):
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
        told = "SURVIVED" if found is None else f"{found.seed}  # {found.invariant}"
        sys.stdout.write(f'    "{plant.__name__}": {told}\n')
        sys.stdout.flush()
    return survived


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) > 0)
