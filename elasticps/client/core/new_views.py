"""Newer views: when a client looks for one, where, and which it believes. Pure: time and chance are arguments.

Servers tell their workers of a view that has them head or answer for other ranges, or that has another server; for
everything else the client asks: while a server cannot be reached, somebody spoke of a newer view, or an answer takes
suspiciously long. It asks one server at random, at once and then ever more seldom: all workers miss the same server,
and questions of each to all others would be most of what there is on the network.

Where all prove who they are, the coordination store has the last word, which knew of every view before a server did:
else a server that was taken over could head everything, by an epoch above all that the leader will ever write. A
server's word counts only while the store does not answer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coordinator.core.view import View
from elasticps.wire.frames import FrameError, Gap, Header, Kind, read_view
from replication.chain import Member

SPEAK_OF_VIEWS = (Kind.VIEW, Kind.VIEW_DIFFERENCE, Kind.NEWER_VIEW)
ASK_FIRST_S, ASK_MOST_S = 0.05, 2.0  # about so much lies between two questions, twice as much from one to the next
SLOW_S = 0.1
STORE_AFTER_S = 0.5
STORE_MOST_S = 8.0


class ViewWant(NamedTuple):
    """What to do now: ask a connected server, read the coordination store."""

    ask_server: bool
    ask_store: bool


class ViewRefresh:
    """`epoch`: the newest that somebody spoke of. `reading`: the coordination store is being read."""

    def __init__(self) -> None:
        self.epoch = 0
        self.reading = False
        self._oldest: tuple[int, ...] = ()
        self._oldest_since_s: list[float] = []
        self._since_s: float | None = None
        self._queried_s = 0.0
        self._query_in_s = 0.0
        self._doubled_s = ASK_FIRST_S
        self._hinted = 0
        self._had = 0
        self._heard = 0
        self._store_at_s = 0.0
        self._store_in_s = STORE_AFTER_S

    def turn(self, now: float, epoch: int, lost: bool, oldest: tuple[int, ...], heard: int, chance: float) -> ViewWant:
        """Judges, at least every SLOW_S. `epoch`: of the view that the client has. `lost`: some server of it is not
        connected, or some range has none. `oldest`: the oldest unanswered request of each kind, 0 for none. `heard`:
        frames received ever. `chance`: a random number, 0 to below 1, by which clients ask at different times."""
        slow = self._slow(now, oldest)
        if not (lost or slow or self.epoch > epoch):
            self._since_s = None
            return ViewWant(False, False)
        if self._since_s is None or epoch != self._had or self.epoch > self._hinted:
            self._query_in_s = self._doubled_s = ASK_FIRST_S
            self._hinted = self.epoch
        if self._since_s is None or epoch != self._had:
            self._since_s, self._had, self._heard = now, epoch, heard
            self._store_in_s = STORE_AFTER_S
            self._store_at_s = now + STORE_AFTER_S
        ask_server = now - self._queried_s >= self._query_in_s
        if ask_server:
            self._queried_s, self._query_in_s = now, self._doubled_s * (0.5 + chance)
            self._doubled_s = min(2 * self._doubled_s, ASK_MOST_S)
        ask_store = now >= self._store_at_s and not self.reading
        if ask_store:
            if heard != self._heard:  # somebody speaks with us, and would have told us
                ask_store = False
                self._store_at_s = now + STORE_AFTER_S
            else:
                self._store_in_s = min(2 * self._store_in_s, STORE_MOST_S)
                self._store_at_s = now + self._store_in_s
            self._heard = heard
        return ViewWant(ask_server, ask_store)

    def notice(self, now: float, epoch: int) -> bool:
        """A server says that there is a view of that epoch. Whether to ask it now: of many that say so at once the
        first, and the next one if that did not help soon."""
        ask = epoch > self.epoch or now - self._queried_s >= ASK_FIRST_S
        self.epoch = max(self.epoch, epoch)
        if ask:
            self._queried_s = now
        return ask

    def _slow(self, now: float, oldest: tuple[int, ...]) -> bool:
        """Whether some request has been the oldest of its kind for SLOW_S."""
        if len(oldest) != len(self._oldest_since_s):
            self._oldest_since_s = [now] * len(oldest)
        for i, (request, before) in enumerate(zip(oldest, self._oldest or oldest, strict=True)):
            if request != before or not request:
                self._oldest_since_s[i] = now
        self._oldest = oldest
        return any(now - since >= SLOW_S for since in self._oldest_since_s)


DEAF_S = 10.0  # who spoke of a view that is none has the store asked again no sooner


class ViewHint(NamedTuple):
    """A server speaks of a view."""

    by: Member
    view: View


class ViewHints:
    """`pending`: what the store is to be asked about next; of several the newest."""

    def __init__(self) -> None:
        self.pending: ViewHint | None = None
        self._checked: ViewHint | None = None
        self._deaf_until_s: dict[Member, float] = {}

    def hear(self, now: float, member: Member, view: View) -> bool:
        """A server speaks of a view that we do not have; whether it is new to us."""
        if now < self._deaf_until_s.get(member, 0.0) or (
            self.pending is not None and view.epoch <= self.pending.view.epoch
        ):
            return False
        self.pending = ViewHint(member, view)
        return True

    def ask(self) -> None:
        """The store is read from now on: of what is told later, what is read may not know yet."""
        self._checked, self.pending = self.pending, None

    def judge(self, now: float, epoch: int, stored: View | None) -> tuple[View | None, ViewHint | None]:
        """What to believe now that the store has been read, None if it says nothing; and who spoke of what neither it
        nor we, at `epoch`, know of."""
        checked, self._checked = self._checked, None
        if stored is not None and self.pending is not None and self.pending.view.epoch <= max(stored.epoch, epoch):
            self.pending = None  # by another server, while the store was read
        if checked is None or stored is None:
            return (stored if checked is None else checked.view), None
        if checked.view.epoch <= max(stored.epoch, epoch):
            return stored, None
        self._deaf_until_s[checked.by] = now + DEAF_S
        return stored, checked


log = logging.getLogger(__name__)

ReadStore = Callable[[Callable[[View | None], None]], None]


class NewViews:
    """Of one cluster. Called under the client's lock.

    read_store: reads the view from the coordination store, in a thread of its own, and hands it over to `came`, None if
    there is no answer. authenticated: everybody proves who they are, so a server's word is not the leader's.
    heard: frames received from servers of the client's view.
    """

    def __init__(
        self,
        cluster: str,
        ranges: int,
        read_store: ReadStore,
        came: Callable[[View | None], None],
        *,
        authenticated: bool,
    ) -> None:
        self.read_store = read_store
        self.authenticated = authenticated
        self.heard = 0
        self.changes = 0  # views that were followed after the first
        self.since_s = 0.0  # when the newest of them came, as the caller's clock has it
        self._cluster = cluster
        self._ranges = ranges
        self._came = came
        self._refresh = ViewRefresh()
        self._hints = ViewHints()

    def followed(self, now_s: float) -> None:
        """The client follows another view from now on."""
        self.changes += 1
        self.since_s = now_s

    def need(self, epoch: int) -> None:
        """Somebody has the view of that epoch."""
        self._refresh.epoch = max(self._refresh.epoch, epoch)

    def read(
        self, now_s: float, header: Header, body: NDArray[np.uint8], known: View
    ) -> tuple[View | None, int | None]:
        """A server speaks of a view, or sends it. Returns the view if it is here and newer than the client's; and the
        epoch for which to ask that server for it, if it is to be asked: 0 for the whole. Raises `FrameError`.

        After a gap where the store has the last word, that is read in time."""
        if header.kind != Kind.NEWER_VIEW:
            try:
                return read_view(header, body, known), None
            except Gap:
                self.need(header.epoch)
                return None, None if self.authenticated else 0
        ask = header.epoch > known.epoch and self._refresh.notice(now_s, header.epoch)
        return None, known.epoch if ask else None

    def hear(self, now_s: float, member: Member, view: View) -> bool:
        """A server speaks of a newer view; whether that is to be followed. FrameError for another cluster's."""
        self._check(view)
        if self.authenticated:
            self._hints.hear(now_s, member, view)
        return not self.authenticated

    @property
    def doubted(self) -> bool:
        """Whether the store is to be asked about what a server has said."""
        return self._hints.pending is not None

    def choose(self, now_s: float, epoch: int, stored: View | None) -> View | None:
        """The view to follow now that the store was read, None if it has given no answer; epoch: of the client's."""
        self._refresh.reading = False
        if stored is not None:
            try:
                self._check(stored)
            except FrameError as error:
                log.warning("the coordination store: %s", error)
                stored = None
        newest, untrue = self._hints.judge(now_s, epoch, stored)
        if newest is not None and untrue is not None:
            log.warning(
                "server %s speaks of a view of epoch %d, but the newest in the coordination store is of epoch %d",
                untrue.by, untrue.view.epoch, newest.epoch,
            )  # fmt: skip
        return newest

    def turn(self, now_s: float, epoch: int, lost: bool, oldest: tuple[int, ...], chance: float) -> bool:
        """Has the store read when it is time; whether a server is to be asked. Arguments as for `ViewRefresh.turn`."""
        want = self._refresh.turn(now_s, epoch, lost, oldest, self.heard, chance)
        if want.ask_store or (self.doubted and not self._refresh.reading):
            self._read()
        return want.ask_server

    def ask_store(self) -> None:
        """Has the store read though servers speak with us; no effect while it is being read."""
        if not self._refresh.reading:
            self._read()

    def _read(self) -> None:
        self._refresh.reading = True
        self._hints.ask()
        self.read_store(self._came)

    def _check(self, view: View) -> None:
        if view.cluster != self._cluster or view.ranges != self._ranges:
            raise FrameError(f"a view of cluster {view.cluster!r} with {view.ranges} ranges is not this cluster's")
