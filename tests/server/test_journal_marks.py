"""Where a reader goes on in a journal: compared with a list of every operation and of what was noted."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from elasticps.server.core.journal_marks import MOST_MARKS, JournalMarks

RANGES = 3
EVERY = np.arange(RANGES)
WHOLE = np.ones(RANGES, np.bool_)


class DumbJournal:
    """Remembers where each change of each range was noted, and which were not noted at all."""

    def __init__(self) -> None:
        self.end = 0
        self.oldest = 0
        self.seqs = [0] * RANGES
        self.whole = [True] * RANGES
        self.noted: list[dict[int, int]] = [{} for _ in range(RANGES)]  # by number of the operation, its position

    def change(self, r: int) -> None:
        self.seqs[r] += 1
        if self.whole[r]:
            self.noted[r][self.seqs[r]] = self.end
            self.end += 1

    def serves(self, r: int, position: int, begin: int) -> bool:
        """Whether a reader that has a range up to a number gets all that it lacks from a position on."""
        lacks = range(position + 1, self.seqs[r] + 1)
        return begin >= self.oldest and all(self.noted[r].get(seq, -1) >= begin for seq in lacks)


@pytest.mark.parametrize("seed", range(40))
def test_a_reader_goes_on_where_all_that_it_lacks_is_behind(seed: int) -> None:
    """Whatever moved meanwhile; and where the newest mark allows it, it need not read the range again."""
    random, marks, dumb = Random(seed), JournalMarks(), DumbJournal()
    went_on = read_again = 0
    for _ in range(300):
        r = random.randrange(RANGES)
        turn = random.random()
        if turn < 0.6:
            dumb.change(r)
        elif turn < 0.75:
            marks.add(dumb.end, np.array(dumb.seqs), np.array(dumb.whole))
        elif turn < 0.8 and dumb.whole[r]:  # it goes elsewhere
            dumb.whole[r] = False
            marks.forget(np.array([r]))
        elif turn < 0.85 and not dumb.whole[r]:  # and comes back, filled
            dumb.whole[r] = True
            marks.forget(np.array([r]))
        elif turn < 0.87:
            dumb.oldest = random.randint(dumb.oldest, dumb.end)
        here = np.flatnonzero(dumb.whole)
        positions = np.array([random.randint(-1, dumb.seqs[each]) for each in here], np.int64)
        found = marks.find(here, positions, np.array(dumb.seqs)[here], dumb.end, dumb.oldest)
        for each, position, begin in zip(here.tolist(), positions.tolist(), found.tolist(), strict=True):
            if begin < 0:
                read_again += 1
                assert position < dumb.seqs[each]
            else:
                went_on += 1
                assert position >= 0
                assert dumb.serves(each, position, begin)
    assert went_on > 50
    assert read_again > 50


def test_the_newest_mark_that_is_old_enough_is_taken() -> None:
    marks = JournalMarks()
    for position, seq in ((10, 5), (20, 7), (30, 9)):
        marks.add(position, np.full(RANGES, seq), WHOLE)
    found = marks.find(EVERY, np.array([8, 5, 4]), np.full(RANGES, 12), 40, 0)
    assert found.tolist() == [20, 10, -1]
    assert marks.find(EVERY, np.array([12, 9, 8]), np.full(RANGES, 12), 40, 25).tolist() == [40, 30, -1]


def test_a_range_that_nobody_has_is_to_be_read() -> None:
    """A relay that reads a range itself has it up to -1, as a reader that begins has: neither goes on there."""
    nobody = np.full(RANGES, -1)
    assert JournalMarks().find(EVERY, nobody, nobody, 40, 0).tolist() == [-1] * RANGES
    assert JournalMarks().find(EVERY, nobody, np.array([-1, 0, 3]), 40, 0).tolist() == [-1] * RANGES


def test_a_range_that_came_back_has_no_mark_of_before() -> None:
    """What changed elsewhere meanwhile was not noted here."""
    marks = JournalMarks()
    marks.add(10, np.array([5, 5, 5]), WHOLE)
    marks.forget(np.array([1]))
    assert marks.find(EVERY, np.array([6, 6, 6]), np.array([9, 9, 9]), 20, 0).tolist() == [10, -1, 10]
    marks.add(20, np.array([9, 9, 9]), WHOLE)
    assert marks.find(EVERY, np.array([9, 9, 9]), np.array([11, 11, 11]), 30, 0).tolist() == [20, 20, 20]


def test_ranges_that_are_not_whole_have_no_mark_and_old_marks_go() -> None:
    marks = JournalMarks()
    for position in range(MOST_MARKS + 1):
        marks.add(position, np.full(RANGES, position), np.array([True, False, True]))
    found = marks.find(EVERY, np.array([0, 50, 50]), np.full(RANGES, 500), 900, 0)
    assert found.tolist() == [-1, -1, 50]
    marks.clear()
    assert marks.find(EVERY, np.array([50, 50, 500]), np.full(RANGES, 500), 900, 0).tolist() == [-1, -1, 900]
