"""Stories find every bug that is planted: a check that nothing can fail checks nothing."""

from __future__ import annotations

import pytest

from tests.sim.planted import PLANTED, STORIES, find
from tests.sim.planting import Patch

SEEDS: dict[str, int] = {}
"""Stories that have found them soon are tried first. `python -m tests.sim.planted NAME…` looks for others."""


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_story_finds(plant: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    found = find(plant, SEEDS.get(plant.__name__))
    assert found is not None, f"{plant.__name__} survived {STORIES} stories"
    assert f"elasticps sim --seed {found.seed}" in str(found)
