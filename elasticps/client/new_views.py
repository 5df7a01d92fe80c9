"""Newer views: who speaks of one, when servers or the coordination store are asked for one, and which is believed."""

from __future__ import annotations

import logging
from collections.abc import Callable

from coordinator.core.view import View
from elasticps.client.core.hearsay import Hearsay
from elasticps.client.core.view_refresh import ViewRefresh
from elasticps.wire.frames import FrameError
from replication.chain import Member

log = logging.getLogger(__name__)

ReadStore = Callable[[Callable[[View | None], None]], None]


class NewViews:
    """Of one cluster. Called under the client's lock.

    read_store: reads the view from the coordination store, in a thread of its own, and hands it over to `came`, None if
    there is no answer. proven: everybody proves who they are, so that a server's word for a view is not the leader's.
    heard: frames received from servers of the client's view.
    """

    def __init__(
        self, cluster: str, ranges: int, read_store: ReadStore, came: Callable[[View | None], None], *, proven: bool
    ) -> None:
        self.read_store = read_store
        self.proven = proven
        self.heard = 0
        self._cluster = cluster
        self._ranges = ranges
        self._came = came
        self._refresh = ViewRefresh()
        self._hearsay = Hearsay()

    def need(self, epoch: int) -> None:
        """Somebody has the view of that epoch."""
        self._refresh.epoch = max(self._refresh.epoch, epoch)

    def hear(self, now_s: float, member: Member, view: View) -> bool:
        """A server speaks of a newer view; whether that is to be followed. FrameError for another cluster's."""
        self._check(view)
        if self.proven:
            self._hearsay.hear(now_s, member, view)
        return not self.proven

    @property
    def doubted(self) -> bool:
        """Whether the store is to be asked about what a server has said."""
        return self._hearsay.told is not None

    def choose(self, now_s: float, epoch: int, stored: View | None) -> View | None:
        """The view to follow now that the store was read, None if it has given no answer; epoch: of the client's."""
        self._refresh.reading = False
        if stored is not None:
            try:
                self._check(stored)
            except FrameError as error:
                log.warning("the coordination store: %s", error)
                stored = None
        newest, untrue = self._hearsay.judge(now_s, epoch, stored)
        if newest is not None and untrue is not None:
            log.warning(
                "server %s speaks of a view of epoch %d, but the newest in the coordination store is of epoch %d",
                untrue.by, untrue.view.epoch, newest.epoch,
            )  # fmt: skip
        return newest

    def turn(self, now_s: float, epoch: int, lost: bool, oldest: tuple[int, ...]) -> bool:
        """Has the store read when it is time; whether servers are to be asked. Arguments as for `ViewRefresh.turn`."""
        want = self._refresh.turn(now_s, epoch, lost, oldest, self.heard)
        if want.ask_store or (self.doubted and not self._refresh.reading):
            self._refresh.reading = True
            self._hearsay.ask()
            self.read_store(self._came)
        return want.ask_servers

    def _check(self, view: View) -> None:
        if view.cluster != self._cluster or view.ranges != self._ranges:
            raise FrameError(f"a view of cluster {view.cluster!r} with {view.ranges} ranges is not this cluster's")
