"""Predicts what would move if the cluster changed, by running the planner on a copy to its end. Fillings are level at
once. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from coordinator.core.planner import Health, Members, plan
from coordinator.core.repair import Limits
from coordinator.core.view import ClusterConfig, View

KINDS = ("repair", "drain", "balance")
_LIMITS = Limits()
_VIEWS_MAX = 2000


@dataclass
class Work:
    """The amount of one kind of work. ranges: how many different ones; copies: replicas filled; nbytes: estimated."""

    ranges: int = 0
    copies: int = 0
    nbytes: int = 0


@dataclass(frozen=True)
class DryRun:
    """How the cluster would change, and into what.

    view       the last one, with nothing under way; None if there would not be a first one
    kinds      work by kind: "repair", "drain", "balance"
    moves      (from, to) -> replicas: from who gives them up, or in a repair from who fills; names
    views      written on the way; converges: whether that came to an end
    waiting    what would stand in the way of more, "" if nothing
    """

    view: View | None
    kinds: Mapping[str, Work]
    moves: Mapping[tuple[str, str], int]
    views: int
    converges: bool
    waiting: str = ""

    @property
    def copies(self) -> int:
        """The replicas filled, by work of all kinds."""
        return sum(work.copies for work in self.kinds.values())

    @property
    def nbytes(self) -> int:
        """The bytes sent for that, estimated."""
        return sum(work.nbytes for work in self.kinds.values())


def dry_run(
    view: View | None,
    members: Members,
    config: ClusterConfig,
    *,
    nbytes: Mapping[str, int] | None = None,
    limits: Limits = _LIMITS,
) -> DryRun:
    """Predicts what the planner would do until nothing is left to do, if these were the servers and all were well.

    view: the present one. nbytes: bytes stored by each server, by name; a range counts as much as its source's mean.
    """
    size = _mean_sizes(view, nbytes or {})
    book = _Book()
    for views in range(_VIEWS_MAX):
        decision = plan(view, members, config, _well(view, members), limits)
        if decision is None or decision.view is None:
            standing = "" if decision is None else decision.reason
            return DryRun(view, book.kinds(), book.moves, views, True, standing)
        if view is not None:
            book.enter(view, decision.view, members, size)
        view = decision.view
    return DryRun(view, book.kinds(), book.moves, _VIEWS_MAX, False)


def _well(view: View | None, members: Members) -> Health:
    """Returns the health of a cluster in which the registered servers are well, and no others."""
    if view is None:
        return Health()
    here = {s.member for s in members.servers}
    level = {r: int(view.since[r]) for r in np.flatnonzero(view.joining >= 0).tolist()}
    alone = {s.member: view.epoch for s in view.servers}
    return Health({s.member: "not registered" for s in view.servers if s.member not in here}, level, alone=alone)


def _mean_sizes(view: View | None, nbytes: Mapping[str, int]) -> dict[str, float]:
    """Returns the bytes per range held, by server."""
    if view is None:
        return {}
    held = np.bincount(view.chains[view.chains >= 0], minlength=len(view.servers)).tolist()
    return {s.name: nbytes.get(s.name, 0) / max(1, count) for s, count in zip(view.servers, held, strict=True)}


@dataclass
class _Book:
    """The fillings that were started so far."""

    copies: Counter[str] = field(default_factory=Counter)
    nbytes: Counter[str] = field(default_factory=Counter)
    ranges: dict[str, set[int]] = field(default_factory=dict)
    moves: Counter[tuple[str, str]] = field(default_factory=Counter)

    def enter(self, old: View, new: View, members: Members, size: dict[str, float]) -> None:
        """Notes the fillings that the new view starts."""
        for r in np.flatnonzero(new.joining >= 0).tolist():
            target = new.servers[new.joining[r]]
            if old.as_chains.joiner_of(r) == target.member:
                continue
            source, leaver = new.servers[new.tails[r]], int(new.leaving[r])
            kind = "repair" if leaver < 0 else "balance"
            if leaver >= 0 and new.servers[leaver].member in members.draining:
                kind = "drain"
            origin = source if leaver < 0 else new.servers[leaver]
            self.copies[kind] += 1
            self.nbytes[kind] += round(size.get(source.name, 0.0) or _mean(size))
            self.ranges.setdefault(kind, set()).add(r)
            self.moves[origin.name, target.name] += 1

    def kinds(self) -> dict[str, Work]:
        return {k: Work(len(self.ranges.get(k, ())), self.copies[k], self.nbytes[k]) for k in KINDS}


def _mean(size: dict[str, float]) -> float:
    """Returns the size of a range for a source that holds nothing yet in the present view."""
    return sum(size.values()) / max(1, len(size))
