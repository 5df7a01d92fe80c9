"""The view and the roster that a server follows, and which ranges may be read or pushed here."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from coordinator.core.view import Roster, RosterChange, View, WorkerInfo
from replication.chain import Member, Ranges
from replication.core import NO_RANGES
from replication.replica import Replica

_NEVER = 1 << 62


class Serving:
    """epoch: of the view; listed: the view has this server; workers: the roster, by id.

    tailed: the ranges whose tail we are; held: those of which we are a full replica. A pull counts if these are the
    same as in its epoch: tail_since and full_since say since when they are.
    """

    def __init__(self, me: Member, ranges: int, replica: Replica) -> None:
        self.me = me
        self.ranges = ranges
        self._replica = replica
        self.view: View | None = None
        self.epoch = 0
        self.listed = False
        self.workers: Mapping[int, WorkerInfo] = {}
        self.newest: Mapping[tuple[str, str], int] = {}  # the same ids by application and name
        self.roster: Roster | None = None
        self.tailed = self.held = NO_RANGES
        self._had = NO_RANGES, NO_RANGES  # headed and tailed when `concerns_workers` was asked last
        self._recovered = 0  # the newest epoch then in which ranges came back from a checkpoint
        self.tail_since = self.full_since = _NEVER

    @property
    def roster_version(self) -> int:
        """The version of the roster that is followed, 0 for none."""
        return 0 if self.roster is None else self.roster.version

    @property
    def headed(self) -> Ranges:
        """The ranges headed here, in the order of a push's keys; the same array as long as they are the same."""
        ranges = self._replica.headed(self._replica.epoch)
        return NO_RANGES if ranges is None else ranges

    def serves(self, epoch: int, anywhere: bool) -> bool:
        """Whether the ranges that may be read here, by those who read anywhere or at tails, are those of an epoch."""
        return epoch >= (self.full_since if anywhere else self.tail_since)

    def joiner(self, r: int) -> tuple[Member, int] | None:
        """The joiner that this server has yet to fill with range r, and since which epoch; None if there is none."""
        view = self.view
        if view is None or view.joining[r] < 0 or self._replica.waiting[r] or not (self.tailed == r).any():
            return None
        return view.servers[view.joining[r]].member, int(view.since[r])

    def adopt(self, view: View) -> bool:
        """Takes a newer view. False if it has dropped this server, whose copy is void then."""
        me = view.as_chains.index(self.me)
        skipped = self.view is None or view.epoch > self.epoch + 1
        self.view, self.epoch = view, view.epoch
        if me < 0 and self.listed:
            self.listed = False
            return False
        self.listed = me >= 0
        tailed = np.flatnonzero((view.tails == me) & (me >= 0))
        held = np.flatnonzero((view.chains == me).any(axis=1) & (me >= 0))
        # Of a view that was skipped nothing is known: the ranges may have been others then, and the same again.
        if skipped or not np.array_equal(tailed, self.tailed):
            self.tail_since = view.epoch
        if skipped or not np.array_equal(held, self.held):
            self.full_since = view.epoch
        self.tailed, self.held = tailed, held
        return True

    def concerns_workers(self) -> bool:
        """Whether to tell workers of the view unasked: since the last call this server heads or reads other ranges, or
        ranges came back from a checkpoint. A quiet worker asks for no view, but has to connect to whoever heads its
        home range now, or its application's group range, and is always connected to whoever did before."""
        had, self._had = self._had, (self.headed, self.tailed)
        recovered, self._recovered = self._recovered, 0 if self.view is None else int(self.view.recovery_epoch.max())
        others = not all(np.array_equal(now, before) for now, before in zip(self._had, had, strict=True))
        return others or self._recovered > recovered

    def follow(self, roster: Roster) -> RosterChange:
        """Takes a newer roster; how it differs from the one before."""
        change = roster.change_from(self.roster)
        self.roster, self.workers, self.newest = roster, roster.by_id, roster.newest
        return change
