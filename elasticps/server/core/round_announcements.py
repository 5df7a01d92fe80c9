"""Which heads have yet to close a round that is decided here. Pure.

The head of an application's group range announces each round whose decision is committed to the heads of all ranges,
once in each view, and counts who has closed it. Closing is idempotent: a round that a head has closed stays as it is.
So whoever heads the group range later, and does not know how far its predecessor came, announces the last round again.

A round is *closed everywhere* when under one view every head has said so. That stays true: who heads a range later has
all that its earlier head has committed. Nothing else tells workers of a round, and the next one is not decided before.
So a head never gets a round whose predecessor it has not closed, and no worker's pull can come before the round's rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from coordinator.core.view import View
from elasticps.wire.frames import Buffer
from elasticps.wire.rounds import LastWorkers, round_body, round_close
from replication.chain import Member


class DecidedRound(NamedTuple):
    """A round of an application, and who is in it, sorted."""

    app: str
    clock: int
    workers: tuple[int, ...]


class _Announcement:
    """A round on its way to heads. request: of its frames under this view, 0 before there are any; owing: who has not
    closed it yet."""

    def __init__(self, round: DecidedRound) -> None:
        self.round = round
        self.request = 0
        self.owing: set[Member] = set()
        self._app = round.app.encode()
        self._differences: list[tuple[tuple[int, ...], int, bytes]] = []  # workers before, how many left, a body

    def frame(self, epoch: int, before: tuple[int, ...]) -> list[Buffer]:
        """The frame for a head that knows the workers of a round before. Most know the same."""
        found = next((one for one in self._differences if one[0] is before), None)
        if found is None:
            now = self.round.workers
            left, joined = ((), ()) if before == now else (sorted({*before} - {*now}), sorted({*now} - {*before}))
            found = before, len(left), round_body(self._app, left, joined)
            self._differences.append(found)
        return round_close(self.request, epoch, self._app, self.round.clock, found[1], found[2])


class RoundAnnouncements:
    """The rounds that are announced here.

    send(member, frame): queues a frame for a server that is connected; need(member): connects to a server; close(round,
    request, epoch): closes a round in the ranges headed here; done(round): it is closed everywhere.
    """

    def __init__(
        self, me: Member, send: Callable[[Member, list[Buffer]], None], need: Callable[[Member], None],
        close: Callable[[DecidedRound, int, int], None], done: Callable[[DecidedRound], None],
    ) -> None:  # fmt: skip
        self._me = me
        self._send = send
        self._need = need
        self._close = close
        self._done = done
        self._epoch = 0
        self._view: View | None = None
        self._announced: dict[str, _Announcement] = {}  # by application
        self._by_request: dict[int, _Announcement] = {}
        self._requests = 0
        self._known: dict[Member, LastWorkers] = {}  # what servers that we are connected to know
        self._workers: dict[str, tuple[int, ...]] = {}  # of the newest round, by application

    @property
    def owing(self) -> list[Member]:
        """The other servers that have yet to close a round, sorted."""
        return sorted({member for one in self._announced.values() for member in one.owing} - {self._me})

    def begin(self, round: DecidedRound) -> None:
        """Announces a round whose decision is committed, instead of any older one of its application."""
        last = self._workers.get(round.app)
        if last == round.workers:  # the same object, so that it is compared once and not with what each server knows
            round = round._replace(workers=last)
        self._workers[round.app] = round.workers
        self._drop(round.app)
        one = self._announced[round.app] = _Announcement(round)
        self._announce(one)

    def forget(self, app: str) -> None:
        """Another server announces the rounds of an application from now on."""
        self._drop(app)
        self._workers.pop(app, None)

    def adopt(self, view: View) -> None:
        """Follows a view: what is not closed everywhere is announced again, to its heads."""
        self._epoch, self._view = view.epoch, view
        for one in list(self._announced.values()):
            self._announce(one)

    def connected(self, member: Member) -> None:
        """There is a new connection to a server, which knows of nothing yet."""
        self._known[member] = LastWorkers()
        for one in list(self._announced.values()):
            if member in one.owing:
                self._tell(member, one)

    def disconnected(self, member: Member) -> None:
        """The connection to a server has ended."""
        self._known.pop(member, None)
        if any(member in one.owing for one in self._announced.values()):
            self._need(member)

    def closed(self, member: Member, request: int) -> None:
        """A server has closed a round in all ranges that it heads, and that is committed."""
        one = self._by_request.get(request)
        if one is None or member not in one.owing:
            return
        one.owing.remove(member)
        if not one.owing:
            self._drop(one.round.app)
            self._done(one.round)

    def _drop(self, app: str) -> None:
        one = self._announced.pop(app, None)
        if one is not None:
            self._by_request.pop(one.request, None)

    def _announce(self, one: _Announcement) -> None:
        self._by_request.pop(one.request, None)
        self._requests += 1
        one.request = self._requests
        self._by_request[one.request] = one
        heads = self._heads()
        one.owing = set(heads)
        for member in heads:
            self._tell(member, one)

    def _heads(self) -> tuple[Member, ...]:
        """The servers that head ranges; none as long as some range has no head."""
        if self._view is None:
            return ()
        indices = np.unique(self._view.heads).tolist()
        return () if indices[0] < 0 else tuple(self._view.as_chains.members[i] for i in indices)

    def _tell(self, member: Member, one: _Announcement) -> None:
        if member == self._me:
            self._close(one.round, one.request, self._epoch)
        elif (known := self._known.get(member)) is not None:
            app, workers = one.round.app, one.round.workers
            self._send(member, one.frame(self._epoch, known.of(app)))
            known.note(app, workers)
        else:
            self._need(member)
