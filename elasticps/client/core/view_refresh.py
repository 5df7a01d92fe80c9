"""When a client should look for a newer view, and where. Pure: time is an argument.

Servers tell their workers of a view that has them head or answer for other ranges, or that has another server; for
everything else the client asks: while a server cannot be reached, somebody spoke of a newer view, or an answer takes
suspiciously long.
"""

from __future__ import annotations

from typing import NamedTuple

ASK_EVERY_S = 0.05
SLOW_S = 0.1
STORE_AFTER_S = 0.5
STORE_MOST_S = 8.0


class Want(NamedTuple):
    """What to do now: ask connected servers, read the coordination store."""

    ask_servers: bool
    ask_store: bool


class ViewRefresh:
    """`epoch`: the newest that somebody spoke of. `reading`: the coordination store is being read."""

    def __init__(self) -> None:
        self.epoch = 0
        self.reading = False
        self._oldest: tuple[int, ...] = ()
        self._oldest_since_s: list[float] = []
        self._since_s: float | None = None
        self._asked_s = 0.0
        self._had = 0
        self._heard = 0
        self._store_at_s = 0.0
        self._store_in_s = STORE_AFTER_S

    def turn(self, now: float, epoch: int, lost: bool, oldest: tuple[int, ...], heard: int) -> Want:
        """Judges, at least every SLOW_S. `epoch`: of the view that the client has. `lost`: some server of it is not
        connected, or some range has none. `oldest`: the oldest unanswered request of each kind, 0 for none. `heard`:
        frames received ever."""
        slow = self._slow(now, oldest)
        if not (lost or slow or self.epoch > epoch):
            self._since_s = None
            return Want(False, False)
        if self._since_s is None or epoch != self._had:
            self._since_s, self._had, self._heard = now, epoch, heard
            self._store_in_s = STORE_AFTER_S
            self._store_at_s = now + STORE_AFTER_S
        ask_servers = now - self._asked_s >= ASK_EVERY_S
        if ask_servers:
            self._asked_s = now
        ask_store = now >= self._store_at_s and not self.reading
        if ask_store:
            if heard != self._heard:  # somebody speaks with us, and would have told us
                ask_store = False
                self._store_at_s = now + STORE_AFTER_S
            else:
                self._store_in_s = min(2 * self._store_in_s, STORE_MOST_S)
                self._store_at_s = now + self._store_in_s
            self._heard = heard
        return Want(ask_servers, ask_store)

    def _slow(self, now: float, oldest: tuple[int, ...]) -> bool:
        """Whether some request has been the oldest of its kind for SLOW_S."""
        if len(oldest) != len(self._oldest_since_s):
            self._oldest_since_s = [now] * len(oldest)
        for i, (request, before) in enumerate(zip(oldest, self._oldest or oldest, strict=True)):
            if request != before or not request:
                self._oldest_since_s[i] = now
        self._oldest = oldest
        return any(now - since >= SLOW_S for since in self._oldest_since_s)
