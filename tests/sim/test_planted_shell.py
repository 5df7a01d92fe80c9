"""Stories find every bug that is planted in the shell: a check that nothing can fail checks nothing."""

from __future__ import annotations

import pytest

from chaos.sim.run import run
from tests.sim.planted_shell import PLANTED, Patch

STORIES = 50

FIRST = {
    "reply_before_the_log_holds_the_entry": 8,
    "use_memory_again_that_python_or_a_socket_refers_to": 8,
    "let_a_worker_that_has_left_hold_others_back": 9,
}
"""Seeds from which it takes fewer stories than from 0."""


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_story_finds(plant: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    first = FIRST.get(plant.__name__, 0)
    found = next((result for seed in range(first, first + STORIES) if not (result := run(seed)).ok), None)
    assert found is not None, f"{plant.__name__} survived {STORIES} stories"
    assert f"elasticps sim --seed {found.seed}" in str(found)
