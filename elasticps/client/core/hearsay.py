"""What servers say of newer views, where all prove who they are. Pure: time is an argument.

The coordination store has the last word, which knew of every view before a server did: else a server that was taken
over could head everything, by an epoch above all that the leader will ever write. A server's word counts only while the
store does not answer.
"""

from __future__ import annotations

from typing import NamedTuple

from coordinator.core.view import View
from replication.chain import Member

DEAF_S = 10.0  # who spoke of a view that is none has the store asked again no sooner


class Told(NamedTuple):
    """A server speaks of a view."""

    by: Member
    view: View


class Hearsay:
    """`told`: what the store is to be asked about next; of several the newest."""

    def __init__(self) -> None:
        self.told: Told | None = None
        self._asked: Told | None = None
        self._deaf_until_s: dict[Member, float] = {}

    def hear(self, now: float, member: Member, view: View) -> bool:
        """A server speaks of a view that we do not have; whether it is new to us."""
        if now < self._deaf_until_s.get(member, 0.0) or (self.told is not None and view.epoch <= self.told.view.epoch):
            return False
        self.told = Told(member, view)
        return True

    def ask(self) -> None:
        """The store is read from now on: of what is told later, what is read may not know yet."""
        self._asked, self.told = self.told, None

    def judge(self, now: float, epoch: int, stored: View | None) -> tuple[View | None, Told | None]:
        """What to believe now that the store has been read, None if it says nothing; and who spoke of what neither it
        nor we, at `epoch`, know of."""
        asked, self._asked = self._asked, None
        if stored is not None and self.told is not None and self.told.view.epoch <= max(stored.epoch, epoch):
            self.told = None  # by another server, while the store was read
        if asked is None or stored is None:
            return (stored if asked is None else asked.view), None
        if asked.view.epoch <= max(stored.epoch, epoch):
            return stored, None
        self._deaf_until_s[asked.by] = now + DEAF_S
        return stored, asked
