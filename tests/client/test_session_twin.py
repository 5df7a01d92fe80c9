"""A worker's session keeps its promises in random stories, and the stories find mistakes in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from elasticps.client.core import session as session_module
from elasticps.client.core.heads import Heads
from elasticps.client.core.session import Effect, PushSession
from replication.chain import Chains, Ranges
from replication.progress import before_part
from replication.step_records import StepRecord, record_of
from tests.client.session_stories import Story
from tests.client.session_twin import Broken

STORIES = 250


def test_every_part_is_once_in_its_ranges_and_what_is_reported_is_there() -> None:
    for seed in range(STORIES):
        try:
            Story(seed).play()
        except Exception as error:
            error.add_note(f"story {seed}")
            raise


def marks_stay(patch: pytest.MonkeyPatch) -> None:
    adopt = PushSession.adopt
    patch.setattr(
        PushSession, "adopt", lambda self, view: adopt(self, replace(view, recovery_epoch=np.zeros(view.ranges, int)))
    )


def parts_follow_the_clock_before(patch: pytest.MonkeyPatch) -> None:
    def send(self: Any, head: Any, step: Any, clock: int, part: int, *more: Any) -> None:
        last, ranges, _, content, out = more
        original(self, head, step, clock, part, last, ranges, before_part(clock, part), content, out)

    original = PushSession._send
    patch.setattr(PushSession, "_send", send)


def steps_do_not_follow_views(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PushSession, "_follow", lambda self, step: step.by_range(self._ranges))


def home_alone_commits(patch: pytest.MonkeyPatch) -> None:
    def mark(self: Any, clock: int, ranges: Ranges, out: list[Effect]) -> None:
        step = self._steps.get(clock)
        if step is not None and step.closed and self._home in ranges:
            self._commit(clock, out)

    patch.setattr(PushSession, "_mark", mark)


def applied_is_committed(patch: pytest.MonkeyPatch) -> None:
    def clocks(self: Any, ask: int, status: Any, epoch: int, ranges: Ranges, applied: Any, _: Any) -> list[Effect]:
        return original(self, ask, status, epoch, ranges, applied, applied)

    original = PushSession.clocks
    patch.setattr(PushSession, "clocks", clocks)


def the_last_part_ticks_only_what_it_touches(patch: pytest.MonkeyPatch) -> None:
    ticked = PushSession._ticked_heads
    patch.setattr(
        PushSession, "_ticked_heads", lambda self, content, step, last: ticked(self, content, step, last=False)
    )


def progress_is_lost_with_the_head(patch: pytest.MonkeyPatch) -> None:
    def follow(self: Heads, view: Chains, recovered: Any) -> Any:
        gone, fresh = original(self, view, recovered)
        for head in gone:
            self._last[head.order] = 0
        return gone, fresh

    original = Heads.follow
    patch.setattr(Heads, "follow", follow)


def ranges_without_a_head_are_not_ticked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PushSession, "_ticks_elsewhere", lambda self, content: False)


def an_interruption_forgets_progress(patch: pytest.MonkeyPatch) -> None:
    forget = Heads.forget
    patch.setattr(Heads, "forget", lambda self, progress: forget(self, np.zeros_like(progress)))


def a_record_names_only_home(patch: pytest.MonkeyPatch) -> None:
    def record(clock: int, committed: int, ticked: Any) -> StepRecord:
        return record_of(clock, committed, np.arange(len(ticked)) == np.flatnonzero(ticked)[0])

    patch.setattr(session_module, "record_of", record)


def a_record_claims_its_own_step(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(session_module, "record_of", lambda clock, committed, ticked: record_of(clock, clock, ticked))


def a_new_connection_is_not_asked(patch: pytest.MonkeyPatch) -> None:
    def begin(self: Any, member: Any, head: Any, out: list[Effect]) -> None:
        head.ready = member in self._connected

    patch.setattr(PushSession, "_begin", begin)


MISTAKES = (
    marks_stay, parts_follow_the_clock_before, steps_do_not_follow_views, home_alone_commits, applied_is_committed,
    the_last_part_ticks_only_what_it_touches, progress_is_lost_with_the_head, ranges_without_a_head_are_not_ticked,
    an_interruption_forgets_progress, a_record_names_only_home, a_record_claims_its_own_step,
    a_new_connection_is_not_asked,
)  # fmt: skip


def fails(seed: int) -> bool:
    try:
        Story(seed).play()
    except (Broken, KeyError):
        return True
    return False


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_each_mistake_is_found(mistake: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    mistake(monkeypatch)
    assert any(fails(seed) for seed in range(STORIES))
