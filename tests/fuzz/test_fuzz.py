"""Whatever peers send: no server ends, nothing is leaked, and an honest worker notices nothing."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from elasticps.model.spec import TableSpec
from tests.fuzz import corpus
from tests.fuzz.core import HOSTILE, watched
from tests.fuzz.corpus import ROLES, Corpus, record
from tests.fuzz.story import Story, Talk
from tests.fuzz.voices import Voices

FRAMES = 2000
CORPUS: Corpus = {}
TABLES: dict[int, TableSpec] = {}  # both are filled before the first test: to record them takes some seconds


@pytest.fixture(scope="module", autouse=True)
def recorded() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "STORIES", corpus.STORIES[-1:])
        frames, tables = record()
    CORPUS.update(frames)
    TABLES.update(tables)


@pytest.mark.parametrize("seed", range(2))
def test_no_promise_is_broken_and_compiled_code_agrees_with_python(seed: int) -> None:
    reported = []
    for compiled in (False, True):
        with watched():
            reported.append(Story(str(seed), CORPUS, TABLES, compiled).tell(FRAMES))
    assert reported[0].frames >= FRAMES
    assert reported[0] == reported[1]


class Sequences(RuleBasedStateMachine):
    """Connections, frames, ends and views in any order."""

    def __init__(self) -> None:
        super().__init__()
        self._stack = ExitStack()
        self._stack.enter_context(watched())
        self._story = Story("sequences", CORPUS, TABLES, compiled=True)
        self._core = self._story.core
        self._view()

    def _view(self) -> None:
        self._core.server.adopt(self._core.next_view())
        self._core.settle()
        self._voices = Voices(self._core, CORPUS, TABLES, self._core.random)

    @rule(role=st.sampled_from(ROLES), worker=st.sampled_from(HOSTILE), reads=st.booleans())
    def opens(self, role: str, worker: int, reads: bool) -> None:
        talk = Talk(self._core.open(reads), role, worker)
        talk.wire.feed(self._voices.hello(role, worker), 1 << 20)
        self._story._talks.append(talk)

    @precondition(lambda self: self._story._talks)
    @rule(who=st.integers(0, 9), what=st.integers(0, 999), count=st.integers(1, 20), wrong=st.sampled_from((0.0, 0.3)),
          most=st.sampled_from((1 << 20, 65, 8)))  # fmt: skip
    def says(self, who: int, what: int, count: int, wrong: float, most: int) -> None:
        talk = self._story._talks[who % len(self._story._talks)]
        self._core.random.seed(what)
        self._story._say(talk, self._voices.say(talk.role, talk.worker, count, wrong), most)

    @precondition(lambda self: self._story._talks)
    @rule(who=st.integers(0, 9))
    def goes(self, who: int) -> None:
        self._story._talks.pop(who % len(self._story._talks)).wire.abort()

    @rule()
    def another_view(self) -> None:
        self._view()

    @rule(seconds=st.sampled_from((0.1, 1.0, 11.0)))
    def time_passes(self, seconds: float) -> None:
        self._core.pass_time(seconds)

    @invariant()
    def the_honest_worker_works(self) -> None:
        self._core.settle()
        self._core.honest.work()

    def teardown(self) -> None:
        try:
            wires = [talk.wire for talk in self._story._talks]
            self._story._talks.clear()
            self._core.end_burst(wires)
        finally:
            self._stack.close()


TestSequences = Sequences.TestCase
_USUAL = settings()
TestSequences.settings = settings(_USUAL, stateful_step_count=25, max_examples=max(6, _USUAL.max_examples // 20))
