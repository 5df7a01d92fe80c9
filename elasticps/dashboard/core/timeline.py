"""What happened: entries for people, the last hour of them. Pure.

A loss is followed until it is over: when its connection broke, when the leader found it, when the view without it
stood, when the last of the others had adopted that, the first push that a new head took after it, and when every range
had its replicas again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from coordinator.core.view import View

RETAINED_S = 3600.0
ENTRIES_MAX = 2000
NAMES_MAX = 5
_SAME_S = 5.0  # views about the same work that follow each other so closely are one entry
_WATCHED_S = 120.0  # for the first push after a loss: where nobody trains there is none
RECOVERIES_MAX = 32
DETECTED = "detected by the leader"


@dataclass
class TimelineEntry:
    """until: when it was over, None while it lasts, `t` for what has no length; parts: (name, time) in order; count:
    how many like it are told in one."""

    id: int
    t: float
    kind: str
    title: str
    reason: str = ""
    until: float | None = None
    epoch: int = 0
    count: int = 1
    parts: list[tuple[str, float]] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        """As the page gets it."""
        return dict(vars(self))


class Timeline:
    """Entries in the order in which they were noted. `changed` has those that viewers do not know, until taken."""

    def __init__(self) -> None:
        self.entries: deque[TimelineEntry] = deque()
        self.changed: dict[int, TimelineEntry] = {}
        self._next = 1

    def note(
        self, t: float, kind: str, title: str, reason: str = "", *, lasts: bool = False, epoch: int = 0
    ) -> TimelineEntry:
        """A new entry; one that `lasts` is ended by `end`."""
        entry = TimelineEntry(self._next, t, kind, title, reason, None if lasts else t, epoch)
        self._next += 1
        self.entries.append(entry)
        while len(self.entries) > ENTRIES_MAX or self.entries[0].t < t - RETAINED_S:
            self.changed.pop(self.entries.popleft().id, None)
            if not self.entries:
                break
        self.changed[entry.id] = entry
        return entry

    def end(self, entry: TimelineEntry, t: float) -> None:
        """Ends an entry that lasts."""
        entry.until = t
        self.changed[entry.id] = entry

    def add_part(self, entry: TimelineEntry, name: str, t: float) -> None:
        """Adds a step to an entry."""
        entry.parts.append((name, t))
        self.changed[entry.id] = entry

    def repeat(self, kind: str, t: float, title: str, reason: str, epoch: int) -> None:
        """A view that goes on with the work of the last one: told in one entry with it, unless it has another cause."""
        last = self.entries[-1] if self.entries else None
        same = last is not None and last.kind == kind and last.reason.partition(":")[0] == reason.partition(":")[0]
        if last is None or not same or t - (last.until or last.t) > _SAME_S:
            self.note(t, kind, title, reason, epoch=epoch)
            return
        last.title, last.reason, last.epoch, last.count = title, reason, epoch, last.count + 1
        self.end(last, t)

    def take(self) -> list[dict[str, Any]]:
        """The entries that are new or changed since the last call."""
        found = [entry.document() for entry in self.changed.values()]
        self.changed.clear()
        return found


@dataclass
class LossRecovery:
    """After a view without servers that had ranges. waiting: who has not adopted it; commits: new heads, and the pushes
    that each had counted when it was first seen under that view; None before that."""

    entry: TimelineEntry
    epoch: int
    began: float
    waiting: set[str]
    commits: dict[str, int | None]

    @property
    def watched(self) -> set[str]:
        """The servers whose next status says something about this."""
        return self.waiting | set(self.commits)


class Recoveries:
    """The recoveries under way."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self.under_way: list[LossRecovery] = []

    def begin(
        self,
        t: float,
        before: View,
        after: View,
        lost: Collection[str],
        gone: Mapping[str, float],
        here: Collection[str],
    ) -> TimelineEntry:
        """A view leaves `lost` out, unasked. gone: when connections broke; here: the servers that are to adopt it."""
        entry = self._timeline.note(t, "loss", f"{names(lost)} lost", after.reason, lasts=True, epoch=after.epoch)
        seen = [gone[name] for name in lost if name in gone]
        if seen:
            entry.t = min(*seen, t)
            entry.parts.append(("connection broke", entry.t))
        entry.parts.append(("view written", t))
        was = np.isin(before.heads, [before.index(name) for name in lost])
        heads = {after.servers[i].name for i in np.unique(after.heads[was]).tolist() if i >= 0} - set(lost)
        waiting = {server.name for server in after.servers} & set(here)
        self.under_way.append(LossRecovery(entry, after.epoch, t, waiting, dict.fromkeys(heads)))
        for old in self.under_way[:-RECOVERIES_MAX]:
            self._timeline.end(old.entry, t)
        del self.under_way[:-RECOVERIES_MAX]
        return entry

    def status(self, t: float, name: str, epoch: int, pushes: int) -> None:
        """Takes a server's status."""
        for recovery in self.under_way:
            if epoch < recovery.epoch:
                continue
            if name in recovery.waiting:
                recovery.waiting.discard(name)
                if not recovery.waiting:
                    self._timeline.add_part(recovery.entry, "adopted by all", t)
            if name in recovery.commits:
                counted = recovery.commits[name]
                if counted is None:
                    recovery.commits[name] = pushes
                elif pushes > counted:
                    recovery.commits.clear()
                    self._timeline.add_part(recovery.entry, "first push", t)

    def detected(self, epoch: int, before_s: float) -> None:
        """The leader found the loss so long before the view of that epoch stood."""
        for recovery in self.under_way:
            entry = recovery.entry
            if recovery.epoch == epoch and all(name != DETECTED for name, _ in entry.parts):
                found = recovery.began - before_s
                self._timeline.add_part(entry, DETECTED, found)
                entry.parts.sort(key=lambda part: part[1])
                entry.t = min(entry.t, found)

    def left(self, name: str) -> None:
        """That server is out of the view: nobody waits for it."""
        for recovery in self.under_way:
            recovery.waiting.discard(name)
            recovery.commits.pop(name, None)

    def look(self, t: float, whole: bool) -> None:
        """whole: every range has all its replicas now."""
        for recovery in list(self.under_way):
            if whole and recovery.entry.until is None:
                self._timeline.add_part(recovery.entry, "all replicas there", t)
                self._timeline.end(recovery.entry, t)
            done = not recovery.watched and recovery.entry.until is not None
            if done or (t - recovery.began > _WATCHED_S and recovery.entry.until is not None):
                self.under_way.remove(recovery)


def names(some: Collection[str]) -> str:
    """A list for people, not too long."""
    shown = sorted(some)
    more = len(shown) - NAMES_MAX
    return ", ".join(shown[:NAMES_MAX]) + (f" and {more} more" if more > 0 else "")
