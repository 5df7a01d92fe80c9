"""Tables that a reader has, and that the relay which it follows now has not named. Pure.

Such a table was dropped while the reader followed nobody; or the relay is behind the one that was followed before, and
has not heard of the table yet. The relay's state tells: as soon as it was read at the servers later than anything that
the reader was sent before, the relay knows all tables that the reader knows, and those that it does not name are gone.
Until then they stay as they are.

When a relay names such a table itself, what it sends begins with the table as it found it. Rows that went before are
not in that, so the reader compares all that it has with the relay's.
"""

from __future__ import annotations

from collections.abc import Collection, Set
from typing import NamedTuple

# By so much the state has to be newer: a relay may name a table when its oldest range does not have it yet.
NEWER_US = 1_000_000


class Settled(NamedTuple):
    """gone: tables to drop; compare: whether all that is here is to be compared with what the relay has."""

    gone: Collection[int]
    compare: bool


NOTHING = Settled((), False)


class AbsentTables:
    """Those of one reader behind relays."""

    def __init__(self) -> None:
        self._newest_us = 0  # when the newest state was read that any relay has sent
        self._absent: set[int] = set()  # that the relay did not name in its first window
        self._after_us = 0  # a state of then proves that they are gone

    def window(self, *, first: bool, time_us: int, here: Set[int], named: Set[int]) -> Settled:
        """A relay has sent a window, the first one of its connection or another one, of a state of `time_us`; here:
        tables of this reader, named: those that the relay has, as far as it has said."""
        if first:
            self._absent, self._after_us = set(here - named), self._newest_us + NEWER_US
        self._newest_us = max(self._newest_us, time_us)
        if not self._absent or time_us < self._after_us:
            return NOTHING
        absent, self._absent = self._absent & here, set()
        return Settled(sorted(absent - named), bool(absent & named))
