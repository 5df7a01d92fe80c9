"""How a worker gets shards to train: what it asks, and which of them it trains; `server.protocol.data_shards_state`
has the whole story. Pure; `shards` does it."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Generator, Sequence
from enum import Enum
from typing import Any, NamedTuple, TypeVar

from elasticps.client.core.fan_out import Answer, Request, of_group, steps_of
from elasticps.model.sharding import ShardSpec
from elasticps.wire.frames import HEADER_BYTES, Kind, json_frame
from elasticps.wire.headers import ClaimShardsHeader
from replication.step_records import step_is_whole

PREFETCH = 4  # shards that a worker asks to hold at once
POLL_FIRST_S = 0.02
POLL_MOST_S = 0.1

T = TypeVar("T")


class Need(Enum):
    """What else has to be done before a script goes on. SETTLE: every step so far is committed and its round closed.
    PAUSE: this worker holds nobody back. ATTACH_NOTHING: the next step that begins trains no shard."""

    SETTLE = 1
    PAUSE = 2
    ATTACH_NOTHING = 3


Wish = Request | Need | float
"""Questions, something else to do, or a number of seconds to wait."""

ClaimScript = Generator[Wish, list[Answer], T]


class ClaimAnswer(NamedTuple):
    """The answer to CLAIM_SHARDS. number: of the set; held: [shard, worker, clock, last round of that worker] each."""

    number: int
    held: list[list[int]]
    finished: bool


class ShardClaims:
    """The shards that one worker holds. rounds: whether it trains in synchronous ones.

    `report()` is called before each question leaves: the clock up to which all is committed, and its round closed.
    """

    def __init__(
        self, app: str, name: str, spec: ShardSpec, rounds: bool, timeout_s: float, report: Callable[[], int]
    ) -> None:
        self.number = 0  # of the set, 0 before the first answer
        self.queue: deque[int] = deque()  # held, and good to train
        self._app = app
        self._name = name
        self._spec = spec
        self._rounds = rounds
        self._timeout_s = timeout_s
        self._report = report
        self._handed: dict[int, int] = {}  # to the caller: shard -> clock of its step, 0 as long as there is none

    @property
    def passed_over(self) -> list[int]:
        """What was handed to the caller and has no step yet."""
        return [shard for shard, clock in self._handed.items() if not clock]

    @property
    def held(self) -> int:
        """How many, handed to the caller or not."""
        return len(self.queue) + len(self._handed)

    def hand_over(self) -> int:
        """The next one of the queue."""
        shard = self.queue.popleft()
        self._handed[shard] = 0
        return shard

    def used(self, number: int, shard: int, clock: int) -> None:
        """A step that trains a shard has begun."""
        if number == self.number and shard in self._handed:
            self._handed[shard] = clock

    # --- asking -----------------------------------------------------------------------------------------------------

    def fetch(self) -> ClaimScript[bool]:
        """Gets shards to train into the queue, waiting if need be; False when all are done."""
        if self._rounds:
            yield Need.SETTLE
        yield Need.ATTACH_NOTHING
        answer = yield from self._choose((yield from self._take(PREFETCH)))
        if self.queue or answer.finished:
            return bool(self.queue)
        yield Need.SETTLE  # what others wait for may be ours
        pause_s = POLL_FIRST_S
        while True:
            answer = yield from self._choose((yield from self._take(PREFETCH, back=self.passed_over)))
            if self.queue or answer.finished:
                return bool(self.queue)
            yield Need.PAUSE
            yield pause_s
            pause_s = min(2 * pause_s, POLL_MOST_S)

    def give_back(self, timeout_s: float) -> ClaimScript[None]:
        """Says what is committed, and gives back what has no step."""
        if self.number:
            yield from self._take(0, back=[*self.queue, *self.passed_over], timeout_s=timeout_s)
        self.queue.clear()

    def _take(
        self, want: int, *, done: Sequence[int] = (), back: Sequence[int] = (), timeout_s: float | None = None
    ) -> ClaimScript[ClaimAnswer]:
        """Settles what is committed, and asks to hold `want` shards."""
        committed = self._report()
        self._handed = {n: clock for n, clock in self._handed.items() if n not in back and not 0 < clock <= committed}
        document = {**self._spec._asdict(), "name": self._name, "want": want, "done": [*done], "back": [*back]}
        body = json_frame(Kind.CLAIM_SHARDS, document)[HEADER_BYTES:]
        questions = of_group(self._app, ClaimShardsHeader(committed).header(len(body)), body)
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        (answer,) = yield Request(questions, timeout_s, f"asking for shards {self._name!r}")
        return _answer_of(json.loads(answer.body))

    def _choose(self, answer: ClaimAnswer) -> ClaimScript[ClaimAnswer]:
        """Queues the shards that are to be trained; says which of them lost workers had trained already."""
        while True:
            self.number = answer.number
            fresh = [one for one in answer.held if one[0] not in self._handed]
            done = []
            for shard, worker, clock, last in fresh:
                if worker and (yield from self._was_trained(worker, clock, last)):
                    done.append(shard)
            if not done:
                self.queue.extend(one[0] for one in fresh if one[0] not in self.queue)
                return answer
            answer = yield from self._take(PREFETCH, done=done)

    def _was_trained(self, worker: int, clock: int, last: int) -> ClaimScript[bool]:
        """Whether the step of a lost worker that used a shard is in the parameters, in every range that it ticks. It
        may be on its way down the chains still: then it will be, unless heads die as well."""
        if self._rounds:
            return last >= clock  # that round is closed everywhere, else there would be no answer yet
        while True:
            found = yield from steps_of(worker, self._timeout_s)
            whole = step_is_whole(clock, found.home, found.applied, found.committed, found.records)
            if whole is not None:
                return whole
            yield POLL_FIRST_S


def _answer_of(document: dict[str, Any]) -> ClaimAnswer:
    return ClaimAnswer(document["set"], document["held"], document["done"] >= document["total"])
