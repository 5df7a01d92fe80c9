"""What there was in the ranges held here as the newest cut was applied. Pure.

A CUT stands at one place of a range's log, so every replica notes the same. Which one a range has passed last belongs
to its rows (`elasticps.store.cuts`): a head that is new does not cut it again, and whoever is filled with it is told.
What was noted is this server's alone, and of the newest cut only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from elasticps.server.core.barrier_state import Rounds
from elasticps.server.core.data_shards_state import Shards
from elasticps.server.core.operations import CutMark
from elasticps.store import Table
from replication.chain import Ranges
from replication.progress import Progress


class Column(NamedTuple):
    """What must be the same in all ranges of a consistent cut. workers, progress: int64 as bytes, sorted by worker;
    closed: each application's last closed round; kept: (application, round, worker) of shares that wait for theirs."""

    workers: bytes
    progress: bytes
    closed: tuple[tuple[str, int], ...]
    kept: tuple[tuple[str, int, int], ...]

    def clocks(self) -> dict[int, int]:
        """Progress by worker."""
        workers, progress = (np.frombuffer(data, np.int64).tolist() for data in (self.workers, self.progress))
        return dict(zip(workers, progress, strict=True))


class Noted(NamedTuple):
    """A range at a cut: the CUT, its place in the log, and what there was. home: rounds and shards of applications
    whose group range this is, as JSON has them; None for a range that is nobody's."""

    mark: CutMark
    seq: int
    column: Column
    home: dict[str, Any] | None


class CutNotes:
    """noted: by range, of cut `newest`."""

    def __init__(self) -> None:
        self.newest = 0
        self.noted: dict[int, Noted] = {}
        self._columns: dict[Column, Column] = {}  # one object for all ranges that have the same

    def note(
        self, mark: CutMark, r: int, seq: int, clocks: tuple[NDArray[np.int64], Progress], rounds: Rounds,
        shards: Shards, tables: Mapping[int, Table],
    ) -> None:  # fmt: skip
        """Keeps what there is in a range as the CUT is applied."""
        if mark.number < self.newest:
            return
        if mark.number > self.newest:
            self.newest = mark.number
            self.noted.clear()
            self._columns.clear()
        workers, progress = clocks
        closed, kept = tuple(rounds.closed_in(r)), tuple(rounds.kept_in(r, tables))
        column = Column(workers.tobytes(), progress.tobytes(), closed, kept)
        column = self._columns.setdefault(column, column)
        self.noted[r] = Noted(mark, seq, column, _home(r, rounds, shards))

    def by(self, number: int, writer: str, incarnation: int) -> Iterator[tuple[int, Noted]]:
        """What was noted at a cut in the ranges that a server logged it in."""
        for r, noted in self.noted.items():
            if noted.mark.number == number and (noted.mark.writer, noted.mark.incarnation) == (writer, incarnation):
                yield r, noted

    def erase(self, ranges: Ranges) -> None:
        """Forgets everything about these ranges."""
        for r in ranges.tolist():
            self.noted.pop(r, None)


def by_column(noted: Iterable[tuple[int, Noted]]) -> dict[Column, list[int]]:
    """The ranges that have the same: nearly all of a cut have, as a rule."""
    found: dict[Column, list[int]] = {}
    for r, one in noted:
        found.setdefault(one.column, []).append(r)
    return found


def _home(r: int, rounds: Rounds, shards: Shards) -> dict[str, Any] | None:
    groups = [
        {"app": app, "decided": group.decided, "workers": list(group.workers), "roster": group.roster,
         "members": [list(each) for each in sorted(group.members.items())],
         "last": [list(each) for each in sorted(group.last.items())]}
        for app, group in sorted(rounds.groups_of(r).items())
    ]  # fmt: skip
    sets = [
        {"app": app, "name": name, "id": one.id, "spec": list(one.spec), "upcoming": one.upcoming, "done": one.done,
         "returned": [[shard, *used] for shard, used in sorted(one.returned.items())],
         "doing": [[worker, shard, doing.clock, *doing.before] for worker, mine in sorted(one.doing.items())
                   for shard, doing in sorted(mine.items())]}
        for app, named in sorted(shards.dump(r).items()) for name, one in sorted(named.items())
    ]  # fmt: skip
    return {"groups": groups, "shards": sets} if groups or sets else None
