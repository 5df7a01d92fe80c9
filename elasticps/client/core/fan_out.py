"""Requests that must be answered by several servers of one view: CREATE, INIT, JOIN, CLOSE. Such a round begins afresh
with each view that has other heads, so whoever asks must be content to have asked twice. Pure.

What takes several rounds is a `Script`: a generator that yields what is to be asked and is sent the answers. So the
rules of a protocol stand apart from threads and sockets, and the simulator follows the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from elasticps.client.core.routing import Routes
from elasticps.kernels.hashing import group_range
from elasticps.wire.clocks import ClocksFrame
from elasticps.wire.frames import Buffer, Header, Kind
from elasticps.wire.headers import GetClocksHeader
from replication.chain import Member
from replication.progress import Progress
from replication.step_records import StepRecord, home_range

T = TypeVar("T")
FAN_OUT_ANSWERS = frozenset(
    {Kind.OK, Kind.CLOCKS, Kind.BARRIER_DECISION, Kind.SHARDS, Kind.KEYS, Kind.REDUCED, Kind.SWEPT, Kind.RELEASED}
)

Questions = Callable[[Routes], Iterable[tuple[Member, Header, list[Buffer]]]]
"""What a round asks of whom under a view: headers without a request number, and bodies. Nothing: nobody can be asked
yet, and the round waits for the next view."""

Send = Callable[[Member, Sequence[Buffer]], None]
"""Sends a frame to a server, or has it connected: then the frame is sent again."""

SendAll = Callable[[Mapping[Member, Sequence[Buffer]]], None]
"""The same for frames of several servers."""


class Call(NamedTuple):
    """One frame of a round."""

    member: Member
    request: int
    buffers: list[Buffer]


class Answer(NamedTuple):
    """What a server answered."""

    header: Header
    body: bytes


Ask = Callable[[Questions, str], Sequence[Answer]]
"""Asks, and waits for the answers of a round, which is for what the text says."""


class Request(NamedTuple):
    """What a script wants to be asked: of whom, for how long, and what for (to be told if it takes longer)."""

    questions: Questions
    timeout_s: float
    what: str


Script = Generator[Request, list[Answer], T]
"""Rounds one after another; what it returns is what came of them."""


class FanOut:
    """Who has been asked and who has answered, in one view. left: nobody waits for the answers that are to come;
    writes: rows change by it."""

    def __init__(self, questions: Questions, writes: bool = False) -> None:
        self.pending: dict[int, Call] = {}
        self.answers: list[Answer] = []
        self.error: Exception | None = None
        self.routes: Routes | None = None
        self.stalled = False  # a server has another view than the one asked under
        self.left = False
        self.writes = writes
        self._questions = questions

    def begin(self, routes: Routes, requests: Iterator[int]) -> list[Call]:
        """Forgets all answers and asks the servers of this view."""
        self.routes, self.stalled = routes, False
        self.answers.clear()
        self.pending.clear()
        for member, header, body in self._questions(routes):
            request = next(requests)
            self.pending[request] = Call(member, request, [header._replace(request=request).pack(), *body])
        return list(self.pending.values())

    def overtaken(self, routes: Routes) -> bool:
        """Whether a newer view has other heads, or has lost somebody who still owes an answer."""
        assert self.routes is not None
        return not self.routes.same_heads(routes) or any(
            call.member not in routes.index_of for call in self.pending.values()
        )

    def answered(self, header: Header, body: bytes) -> None:
        """A server did it."""
        self.answers.append(Answer(header, body))
        del self.pending[header.request]  # not before: whoever waits takes a round without pending calls as done

    @property
    def owing(self) -> set[Member]:
        """Who has not answered yet; nobody, if all are to be asked again."""
        return set() if self.stalled else {call.member for call in list(self.pending.values())}

    def done(self) -> bool:
        """Whether all have answered under one view, or one has refused."""
        return self.error is not None or (bool(self.answers) and not self.pending and not self.stalled)


class FanOuts:
    """The rounds that somebody waits for, and which of them each request belongs to."""

    def __init__(self, requests: Iterator[int], send: Send) -> None:
        self._requests = requests
        self._send = send
        self._of: dict[int, FanOut] = {}
        self._fan_outs: list[FanOut] = []

    def __len__(self) -> int:
        return len(self._fan_outs)

    @property
    def oldest(self) -> int:
        """The oldest request that has not been answered, 0 for none."""
        return next(iter(self._of), 0)

    @property
    def writing(self) -> bool:
        """Whether something that changes rows has not been answered by all."""
        return any(fan_out.writes and not fan_out.done() for fan_out in self._fan_outs)

    @property
    def owing(self) -> set[Member]:
        """The servers that owe answers for which somebody waits."""
        waited_for = (fan_out for fan_out in self._fan_outs if not fan_out.left)
        return {call.member for fan_out in waited_for for call in fan_out.pending.values()}

    @property
    def servers(self) -> set[Member]:
        """The servers that owe answers, whether somebody waits or not."""
        return {call.member for fan_out in self._fan_outs for call in fan_out.pending.values()}

    def begin(self, fan_out: FanOut, routes: Routes) -> None:
        """Asks, and asks again under every view with other heads, until `end`."""
        self._fan_outs.append(fan_out)
        self._ask(fan_out, routes)

    def end(self, fan_out: FanOut) -> None:
        """Nobody waits for it any more."""
        if fan_out in self._fan_outs:
            self._fan_outs.remove(fan_out)
        self._drop(fan_out)

    def recover(self, routes: Routes) -> None:
        """Asks everything again, after something that an exception cut short."""
        self._of.clear()
        for fan_out in self._fan_outs:
            if not fan_out.done():
                self._ask(fan_out, routes)

    def fail(self, error: Exception) -> None:
        """Ends every round."""
        for fan_out in self._fan_outs:
            fan_out.error = error
        self._of.clear()

    def answered(self, header: Header, body: bytes) -> None:
        """An answer, if somebody still waits for it."""
        if (fan_out := self._of.pop(header.request, None)) is not None:
            fan_out.answered(header, body)
            if fan_out.left and fan_out.done():
                self.end(fan_out)

    def refused(self, request: int, error: Exception) -> bool:
        """A refusal; False if nobody waits for this."""
        fan_out = self._of.pop(request, None)
        if fan_out is not None:
            fan_out.error = error
            if fan_out.left:
                self.end(fan_out)
        return fan_out is not None

    def stall(self, request: int, routes: Routes) -> None:
        """A server has another view than the one that a round was asked under: it is asked again under a newer one,
        or, should there be none, with the next `resume`."""
        if (fan_out := self._of.get(request)) is not None:
            fan_out.stalled = True
            if fan_out.routes is not routes:
                self._ask(fan_out, routes)

    def resume(self, routes: Routes) -> None:
        """Asks again what was stalled."""
        for fan_out in self._fan_outs:
            if fan_out.stalled:
                self._ask(fan_out, routes)

    def adopt(self, routes: Routes) -> None:
        """Follows a view."""
        for fan_out in self._fan_outs:
            if not fan_out.done() and (fan_out.stalled or fan_out.overtaken(routes)):
                self._ask(fan_out, routes)

    def connected(self, member: Member) -> None:
        """A new connection to a server: what it may not have heard is asked again."""
        for fan_out in self._fan_outs:
            for call in fan_out.pending.values():
                if call.member == member:
                    self._send(call.member, call.buffers)

    def _ask(self, fan_out: FanOut, routes: Routes) -> None:
        self._drop(fan_out)
        for call in fan_out.begin(routes, self._requests):
            self._of[call.request] = fan_out
            self._send(call.member, call.buffers)

    def _drop(self, fan_out: FanOut) -> None:
        for request in fan_out.pending:
            self._of.pop(request, None)


def of_heads(header: Header, body: bytes = b"", *, all_ranges: bool = True) -> Questions:
    """The same question to every head. all_ranges: only when every range has one."""

    def questions(routes: Routes) -> list[tuple[Member, Header, list[Buffer]]]:
        if all_ranges and routes.headless:  # who heads them later would never be asked
            return []
        return [(routes.members[s], header._replace(epoch=routes.epoch), [body]) for s in routes.share_of]

    return questions


def of_ranges(ranges: Callable[[int], Sequence[int]], header: Header) -> Questions:
    """A question to the heads of these ranges of so many, when the first of them has one."""

    def questions(routes: Routes) -> list[tuple[Member, Header, list[Buffer]]]:
        some = ranges(routes.view.ranges)
        if routes.view.heads[some[0]] < 0:
            return []
        return [(member, header._replace(epoch=routes.epoch), []) for member in routes.heads_of(some)]

    return questions


def of_group(app: str, header: Header, body: bytes = b"") -> Questions:
    """A question to the head of an application's group range."""

    def questions(routes: Routes) -> list[tuple[Member, Header, list[Buffer]]]:
        head = int(routes.view.heads[group_range(app, routes.view.ranges)])
        return [(routes.members[head], header._replace(epoch=routes.epoch), [body])] if head >= 0 else []

    return questions


class PastSteps(NamedTuple):
    """How far a worker's steps are, as heads say: its home range, its progress applied and committed in every range,
    int64 [P] each, and the records of its sparse steps."""

    home: int
    applied: Progress
    committed: Progress
    records: Sequence[StepRecord]


def steps_of(worker: int, timeout_s: float, *, fencing: bool = False) -> Script[PastSteps]:
    """How far a worker's steps are. fencing: it is over when whoever may head a range soon has fenced that worker, too:
    each server that has, or gets, a copy of one answers."""
    head, ranges = GetClocksHeader(worker).header(), 0

    def questions(routes: Routes) -> list[tuple[Member, Header, list[Buffer]]]:
        nonlocal ranges
        ranges = routes.view.ranges
        if routes.headless:  # nobody can say it for all ranges now
            return []
        servers = routes.holding if fencing else [routes.members[s] for s in routes.share_of]
        return [(member, head._replace(epoch=routes.epoch), []) for member in servers]

    answers = yield Request(questions, timeout_s, f"asking for the clocks of worker {worker}")
    applied, committed = (np.zeros(ranges, np.int64) for _ in range(2))
    records: list[StepRecord] = []
    for answer in answers:
        clocks = ClocksFrame.of(answer.header, np.frombuffer(answer.body, np.uint8), ranges)
        applied[clocks.ranges], committed[clocks.ranges] = clocks.applied, clocks.committed
        records += [record for _, record in clocks.records]
    return PastSteps(home_range(worker, ranges), applied, committed, records)


def carry_out(script: Script[T], ask: Callable[[Questions, float, str], list[Answer]]) -> T:
    """Runs a script to its end; `ask` waits for a round's answers."""
    try:
        request = next(script)
        while True:
            request = script.send(ask(*request))
    except StopIteration as end:
        result: T = end.value
        return result
