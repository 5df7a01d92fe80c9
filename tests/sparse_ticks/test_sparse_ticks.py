"""Sparse ticks keep every promise, and each mistake that their model knows breaks one."""

from __future__ import annotations

import pytest

from tests.sparse_ticks.ranges import MISTAKES, Broken
from tests.sparse_ticks.story import Story, play

# The first story that shows a mistake. After a change of the model: `python -m tests.sparse_ticks 2000 MISTAKE`.
FOUND_BY = {
    "a gap is applied": 9,
    "a gap is a duplicate": 70,
    "home alone commits": 0,
    "a duplicate is answered at once": 2,
    "prev is read at the resend": 0,
    "prev is forgotten with the view": 0,
    "only the last part's ranges tick": 6,
    "a record is not replicated": 12,
    "a moved range forgets": 0,
    "a record claims its own step": 6,
    "a jump needs no proof": 9,
    "resume trusts home alone": 6,
    "resume reads applied": 10,
    "resume before the fence": 224,
    "a shard by home alone": 6,
    "a shard is asked about once": 10,
    "held when home is": 183,
    "departed clocks are dropped": 0,
    "a recovered range keeps its marks": 100,
    "the delay reads home": 88,
    "a new head of the application guesses": 3,
}


def test_no_story_breaks_a_promise() -> None:
    broken, steps = play(400)
    assert not broken
    assert steps > 2000


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_story_shows_each_mistake(mistake: str) -> None:
    with pytest.raises(Broken):
        Story(FOUND_BY[mistake], mistake).play()
