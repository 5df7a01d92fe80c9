"""Which of several relays a reader follows. Pure: time is an argument.

A relay that answers may be cut off from the servers itself. When what the reader shows is old, all relays are compared,
by when the state that they have was read at the servers: these times are of the servers' clocks, and differences do not
depend on those of relays. Another relay is followed only if its state is a good deal newer. So a reader stays where it
is when nobody has anything newer, as while the servers are away.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from elasticps.wire.windows import MOST_STRETCH

STALE_S = 10.0  # what is older, by more than windows are apart, is looked for at other relays
NEWER_S = 5.0  # by so much another relay's state has to be newer
COMPARE_S = 5.0  # from one comparison to the next


class RelayState(NamedTuple):
    """What a relay says: its place in the URL, when its oldest range was read at a server, in microseconds since 1970,
    and seconds from one window to the next."""

    place: int
    read_us: int
    every_s: float


def is_stale(now_s: float, read_us: int, every_s: float) -> bool:
    """Whether a state is so old that others are asked for theirs. now_s: seconds since 1970; every_s: from one window
    to the next."""
    return now_s - read_us / 1e6 > STALE_S + MOST_STRETCH * every_s


def choose(states: Sequence[RelayState]) -> RelayState:
    """The relay to follow, of those that answer. states: in the order in which they were asked, beginning with the
    relay that is followed, if it answers."""
    first, newest = states[0], max(states, key=lambda state: state.read_us)
    return newest if newest.read_us - first.read_us > NEWER_S * 1e6 else first


class StaleWatch:
    """When to compare relays though the one that is followed answers. several: whether there are others; every_s: from
    one window to the next."""

    def __init__(self, every_s: float, *, several: bool) -> None:
        self._every_s = every_s
        self._several = several
        self._compared_s = float("-inf")

    def due(self, now_s: float, wall_s: float, read_us: int) -> bool:
        """Whether to compare now. now_s: of a clock that is never set; wall_s: seconds since 1970; read_us: when the
        oldest range that is shown was read at its server, 0 before all are here."""
        if not self._several or not read_us or now_s - self._compared_s < COMPARE_S:
            return False
        stale = is_stale(wall_s, read_us, self._every_s)
        if stale:
            self._compared_s = now_s
        return stale
