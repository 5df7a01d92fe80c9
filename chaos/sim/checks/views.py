"""The promise of views: each follows from the one before, none leaves a range to dead servers, servers that drain get
no ranges, and without faults only ranges that must move are copied."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from chaos.sim.checks.violation import Violation
from coordinator.core.view import View
from replication.chain import Chains, Member, Ranges, unsafe_transition

LATE_S = 0.05  # a leader that is well learns of a drain within this time
MOST_COPIES = 1.25  # for each one that changes ask for; later changes undo some of what earlier ones began
FEW_COPIES = 1  # and so many besides for each change: small numbers are not even (seed 3001711: 39, of 29.7 ideal)


class Views:
    """Follows every view that is written. calm: no process and no link is slow or dies."""

    def __init__(self, replicas: int, ranges: int, alive: Callable[[Member], bool], calm: bool) -> None:
        self._alive = alive
        self._calm = calm
        self._copies_of_a_server = replicas * ranges
        self._newest: View | None = None
        self._draining: dict[str, float] = {}  # when a server was asked to go
        self._copies = 0
        self._changes = 0
        self._ideal = 0.0

    def on_join(self, staying: int) -> None:
        """A server starts: it should get its share, and others may be nearer to theirs."""
        self._changes += 1
        self._ideal += 1 + self._copies_of_a_server / staying

    def on_drain(self, name: str, now: float) -> None:
        """A server is asked to go: all that it has, or is getting, goes to others."""
        self.can_drain(name, now)
        view = self._newest
        index = -1 if view is None else next((i for i, s in enumerate(view.servers) if s.name == name), -1)
        if view is not None and index >= 0:
            self._changes += 1
            self._ideal += 1 + int((view.chains == index).sum()) + int((view.joining == index).sum())

    def can_drain(self, name: str, now: float) -> None:
        """A server that is asked to go can say so from now on."""
        self._draining[name] = now

    def on_write(self, view: View, now: float) -> None:
        """A view was written."""
        before, self._newest = self._newest, view
        if before is None:
            return
        if view.epoch != before.epoch + 1:
            raise Violation("views", f"epoch {view.epoch} follows epoch {before.epoch}")
        new, old = view.as_chains, before.as_chains
        # Whether joiners were level when they were promoted is for `Lasting` to see.
        ended = {member for member in old.members if not self._alive(member)}
        if unlawful := unsafe_transition(old, new, dict(enumerate(old.since.tolist())), ended):
            raise Violation("the law of chains", f"epoch {new.epoch}: {unlawful}")
        for r in np.flatnonzero(new.since == new.epoch).tolist():
            members, joiner = _copies(new, r), new.joiner_of(r)
            if any(map(self._alive, _copies(old, r))) and not any(map(self._alive, members)):
                raise Violation("last full replica", f"range {r} is left to the dead in epoch {new.epoch}: {members}")
            if joiner is not None and joiner != old.joiner_of(r) and not new.copy_state[r]:
                self._copies += 1
                if self._calm and now > self._draining.get(joiner.name, now) + LATE_S and not self._all_go(view):
                    raise Violation("drain", f"range {r} is given to {joiner}, which drains, in epoch {new.epoch}")
        if self._calm:
            gone = [s.member for s in before.servers if new.index(s.member) < 0 and s.name not in self._draining]
            if gone:
                raise Violation("views", f"{gone[0]} is left out of epoch {new.epoch}, and nobody asked for it")

    def _all_go(self, view: View) -> bool:
        return all(server.name in self._draining for server in view.servers)

    def check_end(self) -> None:
        """All has come to rest."""
        if self._calm and self._copies > MOST_COPIES * self._ideal + FEW_COPIES * max(1, self._changes):
            text = f"{self._copies} copies were begun, {self._ideal:.1f} are asked for"
            raise Violation("bounded movement", text)


def left_alone(before: View | None, view: View, name: str) -> Ranges:
    """The ranges that had a server as a replica, and have a single one of the others now."""
    if before is None:
        return np.empty(0, np.int64)
    old, new = before.as_chains, view.as_chains
    found = []
    for r in range(view.ranges):
        was, now = old.members_of(r), new.members_of(r)
        if len(now) == 1 and now[0] in was and now[0].name != name and name in [member.name for member in was]:
            found.append(r)
    return np.array(found, np.int64)


def _copies(chains: Chains, r: int) -> list[Member]:
    """Returns the members with a complete copy of a range."""
    return [chains.members[i] for i in chains.copies[r].tolist() if i >= 0]
