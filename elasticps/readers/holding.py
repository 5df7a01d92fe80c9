"""How a reader comes to show one moment, and stays there until it is released.

First all servers are asked for a window after each change, and for what they know of workers (`GATHER`); then once
more, so that each state from there on has all that was committed as the first answers came (`FREEZE`). From then on
what comes is queued; `MomentSearch` says up to which window of each server it is to be applied (`SEARCH`). There the
reader stays (`HELD`), and the rest of the queue waits for its release.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import Enum, auto
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from elasticps.readers.core.clocks import RangeClocks
from elasticps.readers.core.following import Feed, Following
from elasticps.readers.core.moment_search import MomentSearch, TailState
from elasticps.wire.frames import Header, Kind
from elasticps.wire.windows import WindowFrame

FINE_MS = 1000  # windows after each change, for so long
SEARCH_S = 0.9  # then it begins again
Bytes = NDArray[np.uint8]


class HoldState(Enum):
    """See above."""

    FOLLOWS = auto()
    GATHER = auto()
    FREEZE = auto()
    SEARCH = auto()
    HELD = auto()


class QueuedFrame(NamedTuple):
    """What a server has sent while the reader holds."""

    feed: Feed
    header: Header
    body: Bytes


class Holding:
    """state: see above. apart: how far ranges were apart when it looked last. Called under the reader's lock."""

    def __init__(
        self, following: Following, clocks: RangeClocks, subscribe: Callable[[Feed, int], None],
        handle: Callable[[Feed, Header, Bytes], None], buffer_bytes: int,
    ) -> None:  # fmt: skip
        """subscribe: asks a server for its ranges again, with a window after each change for so many milliseconds;
        handle: does what a frame says."""
        self.state = HoldState.FOLLOWS
        self.apart = "not all ranges are here"
        self._following = following
        self._clocks = clocks
        self._subscribe = subscribe
        self._handle = handle
        self._buffer_bytes = buffer_bytes
        self._frozen: set[Feed] = set()  # whose frames are queued
        self._queue: deque[QueuedFrame] = deque()
        self._queued_bytes = 0
        self._search: MomentSearch | None = None
        self._committed: dict[int, int] = {}  # by worker, as the first answers had come
        self._epoch = 0  # of the view, when it began
        self._feeds: list[Feed] = []  # those of all ranges then

    @property
    def full(self) -> bool:
        """Whether so much is queued that servers are to stop."""
        return self._queued_bytes > self._buffer_bytes

    @property
    def held(self) -> bool:
        """Whether the reader shows one moment."""
        return self.state is HoldState.HELD

    def begin(self) -> None:
        """Looks for a moment, from the beginning."""
        self._thaw()
        self._epoch, self._search = self._following.epoch, None
        feeds, tails = self._following.feeds, self._following.tails
        self._feeds = [feeds[member] for member in tails if member in feeds]
        if len(self._feeds) < len(tails) or not self._following.filled:
            self.state = HoldState.FOLLOWS
            return
        self.state = HoldState.GATHER
        for feed in self._feeds:
            self._subscribe(feed, FINE_MS)

    def release(self) -> None:
        """Goes on with the newest."""
        self.state = HoldState.FOLLOWS
        self._thaw()

    def _thaw(self) -> None:
        self._frozen.clear()
        self._search = None
        queue, self._queue = self._queue, deque()
        self._queued_bytes = 0
        for frame in queue:
            if self._following.feeds.get(frame.feed.member) is frame.feed:
                self._handle(*frame)

    def queue(self, feed: Feed, header: Header, body: Bytes) -> bool:
        """Queues a frame if it is not to be handled now; whether it was."""
        if feed not in self._frozen and not self.held:
            return False
        frame = QueuedFrame(feed, header, body.copy())
        self._queue.append(frame)
        self._queued_bytes += len(body)
        if self.state is HoldState.SEARCH:
            self._note(frame)
            self._find()
        return True

    def _note(self, frame: QueuedFrame) -> None:
        """Has the search know of a state."""
        if frame.header.kind != Kind.WINDOW:  # the server begins again, or has lost this reader
            self.state = HoldState.FOLLOWS
            return
        window = WindowFrame.of(frame.header, frame.body, self._following.ranges)
        if window.complete and self._search is not None:
            self._search.add(frame.feed.slot, TailState(window.number, window.progress.runs, window.records))

    def step(self) -> None:
        """Something has been handled: goes on to the next state if it is time."""
        if self.state in (HoldState.FOLLOWS, HoldState.HELD):
            return
        feeds = self._following.feeds
        if self._following.epoch != self._epoch or any(feeds.get(feed.member) is not feed for feed in self._feeds):
            self.state = HoldState.FOLLOWS  # it begins again
        elif self.state is HoldState.GATHER and all(feed.stated for feed in self._feeds):
            self._committed, self.state = dict(self._clocks.committed), HoldState.FREEZE
            for feed in self._feeds:
                self._subscribe(feed, FINE_MS)
        elif self.state is HoldState.FREEZE:
            exact = self._following.exact
            self._frozen |= {feed for feed in self._feeds if feed.stated and bool(exact[feed.ranges].all())}
            if len(self._frozen) == len(self._feeds):
                self._begin_search()

    def _begin_search(self) -> None:
        owner = np.full(self._following.ranges, -1, np.int64)
        for feed in self._feeds:
            owner[feed.ranges] = feed.slot
        clocks = self._clocks
        self._search = MomentSearch(owner, clocks.progress, clocks.records, self._committed)
        self.state = HoldState.SEARCH
        for frame in self._queue:
            if self.state is HoldState.SEARCH:
                self._note(frame)
        if self.state is HoldState.SEARCH:
            self._find()

    def _find(self) -> None:
        """Ends the search if there is a moment: what leads to it is applied."""
        search = self._search
        assert search is not None
        if not search.find():
            self.apart = search.apart()
            return
        rest = deque[QueuedFrame]()
        queue, self._queue = self._queue, deque()
        self._frozen.clear()
        for frame in queue:
            if frame.header.clock <= search.chosen[frame.feed.slot]:
                self._handle(*frame)
            else:
                rest.append(frame)
        self._queue, self._queued_bytes = rest, sum(len(frame.body) for frame in rest)
        self._search, self.state = None, HoldState.HELD
