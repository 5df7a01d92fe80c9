"""A request that must be answered by several servers of one view: CREATE, INIT, JOIN. It begins afresh with each view
that has other heads, so whoever asks must be content to have asked twice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from elasticps.client.routing import Routes
from elasticps.wire.frames import Buffer, Header
from replication.chain import Member

Questions = Callable[[Routes], Iterable[tuple[Member, Header, list[Buffer]]]]
"""What a round asks of whom under a view: headers without a request number, and bodies."""


class Call(NamedTuple):
    """One frame of a round."""

    member: Member
    request: int
    buffers: list[Buffer]


class Answer(NamedTuple):
    """What a server answered."""

    header: Header
    body: bytes


class Round:
    """Who has been asked and who has answered, in one view."""

    def __init__(self, questions: Questions) -> None:
        self.pending: dict[int, Call] = {}
        self.answers: list[Answer] = []
        self.error: Exception | None = None
        self.routes: Routes | None = None
        self.stalled = False  # a server has another view than the one asked under
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

    def done(self) -> bool:
        """Whether all have answered under one view, or one has refused."""
        return self.error is not None or (bool(self.answers) and not self.pending and not self.stalled)
