"""Which server a reader follows for each range, how far it has come there, and what it has to read again. Pure.

A range is followed at its tail. The reader says up to which sequence number it has the range; the server goes on from
there if it can prove what is missing, else the reader reads the range again, part by part, while windows go on: what
comes later on a connection is newer, and says how rows are, not what was done to them.

Rows of a range count only from the server that the newest view has as its tail, and only behind its answer to the
newest SUBSCRIBE that names the range. So a window of a former tail, or of an earlier stay there, never replaces a row
that is newer.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coordinator.core.view import View
from elasticps.kernels.progress import take_positions
from elasticps.model.key_share import ALL_KEYS, KeyShare
from elasticps.wire.range_parts import ALL_TABLES, RangePart, ReadCursor, ReadRange
from elasticps.wire.windows import Subscribe, Subscribed, WindowFrame
from replication.chain import Member, Ranges

READS_AT_ONCE = 2  # of one server
ROWS_AT_ONCE = 8192
NOBODY = -1


class Wishes(NamedTuple):
    """What a reader follows: see `ReaderSpec`."""

    tables: tuple[str, ...] | None
    dtype: str
    every_ms: int
    share: KeyShare = ALL_KEYS


class OutOfOrder(ValueError):
    """A server says something that it cannot say now: the connection begins again."""


class Unacknowledged(NamedTuple):
    """nbytes: of windows that are not acknowledged; since_s: when windows were acknowledged last."""

    nbytes: int = 0
    since_s: float = float("-inf")


@dataclass(eq=False)
class Feed:
    """A server that is followed, on one connection. slot: its number here; ranges: what it was asked for, ascending."""

    member: Member
    slot: int
    ranges: Ranges = field(default_factory=lambda: np.empty(0, np.int64))
    subscribed: int = 0  # number of the newest SUBSCRIBE, 0 before the first
    answered: bool = False  # it has been
    confirmed: bool = False  # every window from now on is of all of `ranges`, and of no range that has left
    stated_us: int = 0  # when the newest complete window behind the answer was read, 0 before the first
    window: int = 0  # number of the newest one
    listed: bool = False  # it has said which tables there are
    tables: dict[int, None] = field(default_factory=dict)  # that it has
    unread: deque[int] = field(default_factory=deque)  # ranges to read
    reading: dict[int, tuple[int, ReadCursor]] = field(default_factory=dict)  # by request: range, and from where on
    unlisted: set[int] = field(default_factory=set)  # ranges to read, as soon as it has listed its tables
    unacknowledged: Unacknowledged = field(default_factory=Unacknowledged)
    fine_ms: int = 0  # of the next SUBSCRIBE

    @property
    def stated(self) -> bool:
        """Whether a complete window has come behind the answer."""
        return self.stated_us > 0


class Following:
    """All ranges of one reader.

    heard   int64 [P]: sequence number of the newest complete window of each range's tail, -1 for none
    have    int64 [P]: the reader has all that is in the range up to this number, -1: it has to read it
    time_us int64 [P]: when the state was read that the range is known to have, microseconds since 1970, 0 for none
    exact   bool [P]: the range shows the state of its server at the newest complete window, and nothing newer
    """

    def __init__(self, view: View, wishes: Wishes) -> None:
        self.ranges = view.ranges
        self.epoch = 0
        self.heard = np.full(view.ranges, -1, np.int64)
        self.have = np.full(view.ranges, -1, np.int64)
        self.time_us = np.zeros(view.ranges, np.int64)
        self.exact = np.zeros(view.ranges, np.bool_)
        self.fills = 0  # ranges that had to be read
        self._wishes = wishes
        self._owner = np.full(view.ranges, NOBODY, np.int64)  # slots of feeds, by range
        self._since = np.zeros(view.ranges, np.int64)  # numbers of the SUBSCRIBEs that named a range first there
        self._origins = np.zeros(view.ranges, np.int64)  # epochs in which ranges began anew
        self._tails: dict[Member, Ranges] = {}  # of the view
        self._feeds: dict[Member, Feed] = {}  # that are connected
        self._slots = 0
        self._requests = 0
        self.adopt(view)

    @property
    def feeds(self) -> dict[Member, Feed]:
        """The servers that are connected."""
        return self._feeds

    @property
    def filled(self) -> bool:
        """Whether every range is here."""
        return bool((self.have >= 0).all())

    @property
    def tails(self) -> dict[Member, Ranges]:
        """The ranges that each server is to be followed for."""
        return self._tails

    def adopt(self, view: View) -> list[Feed]:
        """Follows a newer view; the servers that `subscribe` is due for."""
        if view.epoch <= self.epoch:
            return []
        # In views that were not seen here a range may have had another tail: a server that was it again has left it.
        seen = self.epoch if view.epoch > self.epoch + 1 else view.epoch
        changed = np.flatnonzero(view.since > seen)
        self.epoch = view.epoch
        begun = view.recovery_epoch != self._origins
        self._origins = view.recovery_epoch.copy()
        self.have[begun] = -1  # what is there now has another history
        members = view.as_chains.members
        self._tails = {members[i]: np.flatnonzero(view.tails == i) for i in np.unique(view.tails).tolist() if i >= 0}
        due = []
        for member, feed in self._feeds.items():
            ranges = self._tails.get(member, np.empty(0, np.int64))
            if not np.array_equal(ranges, feed.ranges) or begun[ranges].any() or np.isin(ranges, changed).any():
                self._leave(feed, np.setdiff1d(feed.ranges, ranges))
                due.append(feed)
        return due

    def _leave(self, feed: Feed, ranges: Ranges) -> None:
        ours = ranges[self._owner[ranges] == feed.slot]
        self._owner[ours] = NOBODY
        self.exact[ours] = False
        if len(ranges):
            feed.confirmed = False

    def connected(self, member: Member) -> Feed:
        """A server has welcomed us: `subscribe` is due."""
        self.gone(member)
        self._slots += 1
        feed = self._feeds[member] = Feed(member, self._slots)
        return feed

    def gone(self, member: Member) -> None:
        """A connection has ended."""
        feed = self._feeds.pop(member, None)
        if feed is not None:
            self._leave(feed, feed.ranges)

    def subscribe(self, feed: Feed) -> Subscribe:
        """Asks a server for the ranges whose tail it is."""
        ranges = self._tails.get(feed.member, np.empty(0, np.int64))
        added = np.setdiff1d(ranges, feed.ranges)
        self._leave(feed, np.setdiff1d(feed.ranges, ranges))
        self._owner[added] = NOBODY  # until it has answered
        self._requests += 1
        feed.ranges, feed.subscribed = ranges, self._requests
        feed.answered = feed.confirmed = False
        feed.stated_us = 0
        self._since[added] = feed.subscribed
        feed.unread.clear()
        feed.unlisted.clear()
        feed.reading.clear()  # `have` says what is to be read
        fine, feed.fine_ms = feed.fine_ms, 0
        tables, dtype, every_ms, share = self._wishes
        have, origins = self.have[ranges], self._origins[ranges]
        return Subscribe(feed.subscribed, self.epoch, ranges, have, origins, tables, dtype, every_ms, fine, share)

    def compare(self, feed: Feed) -> None:
        """Forgets how far a server's ranges are here: what it has is compared with them behind the next SUBSCRIBE."""
        ours = feed.ranges[self._owner[feed.ranges] == feed.slot]
        self.have[ours] = -1
        self.exact[ours] = False

    def answered(self, feed: Feed, answer: Subscribed) -> bool:
        """A server has answered a SUBSCRIBE, or says that the reader was too slow. False: some of the ranges are not
        answered for there, and the view is an old one here or there."""
        named = np.concatenate([answer.continued, answer.unknown])
        newest, unknown = answer.number == feed.subscribed, answer.unknown
        if newest and len(np.setdiff1d(named, feed.ranges)):
            raise OutOfOrder(f"server {feed.member.name} answers for ranges that it was not asked for")
        if answer.number:  # also an older one counts, for ranges that every SUBSCRIBE since has named
            ours = named[np.isin(named, feed.ranges)]
            self._owner[ours[self._since[ours] <= answer.number]] = feed.slot
        if newest:
            feed.answered = feed.confirmed = True
        unknown = unknown[self._owner[unknown] == feed.slot]
        self.have[unknown] = self.heard[unknown] = -1
        self.exact[unknown] = False
        self.fills += len(unknown)
        feed.unlisted |= set(unknown.tolist())
        feed.unread = deque(r for r in feed.unread if r not in feed.unlisted)
        feed.reading = {request: one for request, one in feed.reading.items() if one[0] not in feed.unlisted}
        return not newest or len(named) == len(feed.ranges)

    # --- windows ----------------------------------------------------------------------------------------------------

    def counts(self, feed: Feed) -> NDArray[np.bool_] | None:
        """Of which ranges rows of a server count, bool [P]; None: of all that it sends."""
        return None if feed.confirmed and feed.answered else self._owner == feed.slot

    def window(self, feed: Feed, frame: WindowFrame) -> None:
        """A server has sent a window. Its rows are to be applied, as far as they `counts`, then `applied` is to be
        called. OutOfOrder for one that does not follow the one before."""
        if frame.number != feed.window + 1:
            raise OutOfOrder(f"window {frame.number} of server {feed.member.name} came after {feed.window}")
        feed.window = frame.number
        for table, _ in frame.tables:
            feed.tables[table] = None
        for table in frame.dropped:
            feed.tables.pop(table, None)

    def applied(self, feed: Feed, frame: WindowFrame) -> list[ReadRange]:
        """The rows of a window have been applied; what is to be asked for now."""
        if frame.complete:
            # A server that follows a newer view than this reader, or is asked again, may have left ranges that it does
            # not name.
            followed = feed.ranges if feed.answered and frame.epoch <= self.epoch else frame.ranges
            take_positions(
                frame.ranges, frame.positions, followed, feed.slot, frame.time_us, self._owner, self.heard, self.have,
                self.time_us, self.exact,
            )  # fmt: skip
            if feed.answered:
                feed.listed, feed.stated_us = True, frame.time_us
        else:  # some rows are newer than what is known of their ranges
            self.exact[feed.ranges[self._owner[feed.ranges] == feed.slot]] = False
        if feed.listed and feed.unlisted:
            for r in sorted(feed.unlisted):
                if self.heard[r] >= 0:
                    feed.unlisted.discard(r)
                    if feed.tables:
                        feed.unread.append(r)
                    else:
                        self._read(feed, r)
        return self._ask(feed)

    # --- reading ranges ---------------------------------------------------------------------------------------------

    def rows(self, feed: Feed, rows: RangePart) -> tuple[bool, list[ReadRange]]:
        """A server has sent a part of a range. Whether its rows are to be applied; what to ask for next."""
        one = feed.reading.pop(rows.request, None)
        if one is None:
            return False, self._ask(feed)
        if one != (rows.range, rows.start):
            raise OutOfOrder(f"server {feed.member.name} sends another part of a range than was asked for")
        if self._owner[rows.range] != feed.slot:
            return False, self._ask(feed)
        if rows.end < ALL_TABLES:
            return True, [self._request(feed, rows.range, rows.end)]
        self._read(feed, rows.range)
        return True, self._ask(feed)

    def _read(self, feed: Feed, r: int) -> None:
        """All of a range is here. Some of its rows may be newer than `heard` says, until the next window."""
        self.have[r] = self.heard[r]
        self.time_us[r] = max(feed.stated_us, int(self.time_us[r]))

    def _ask(self, feed: Feed) -> list[ReadRange]:
        requests = []
        while feed.unread and len(feed.reading) < READS_AT_ONCE:
            requests.append(self._request(feed, feed.unread.popleft(), ReadCursor(0)))
        return requests

    def _request(self, feed: Feed, r: int, start: ReadCursor) -> ReadRange:
        self._requests += 1
        feed.reading[self._requests] = r, start
        return ReadRange(self._requests, self.epoch, r, ROWS_AT_ONCE, start)
