"""Released clocks are true whoever heads the group range, and each mistake that their model knows breaks one."""

from __future__ import annotations

import pytest

from tests.sparse_ticks.ranges import Broken
from tests.sparse_ticks.released_clocks import MISTAKES, Delays, play

# The first story that shows a mistake.
FOUND_BY = {
    "no proof": 412,
    "nobody is unheard": 239,
    "an older roster": 1808,
    "releases are forgotten": 511,
    "a joiner is not counted": 19,
    "a joiner starts where it likes": 3,
    "a joiner is answered at once": 21,
    "not committed": 3,
    "a lost connection": 383,
}


def test_no_story_breaks_a_promise_about_released_clocks() -> None:
    broken, pulls = play(1000)
    assert not broken
    assert pulls > 5000


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_story_shows_each_mistake_about_released_clocks(mistake: str) -> None:
    with pytest.raises(Broken):
        Delays(FOUND_BY[mistake], mistake).play()
