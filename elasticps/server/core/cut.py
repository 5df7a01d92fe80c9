"""A checkpoint's consistent cut: `CutHold` decides which workers pause for it, `CutNotes` what each range held then.

A worker that is asked to hold begins no step and writes nothing else. It reports HELD when all that it has written is
committed, and its newest round is closed. Workers that train in rounds cannot stop at any step: once one of them has
pushed its share of a round, all others of its application have to come as far, or that one waits for them for ever. So
a worker that is asked to hold with a round open reports that at once, and the others are told up to which round they
still have to go.

A CUT stands at one place of a range's log, so every replica notes the same. The newest cut that a range has passed
belongs to its rows (`elasticps.store.cuts`): a new head does not cut the range again, and a joiner gets the number with
the rows. The notes are this server's alone, and of the newest cut only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from elasticps.admin.interface import WorkerHeld
from elasticps.server.core.barrier_state import Rounds, Selecting
from elasticps.server.core.data_shards import ShardLedger
from elasticps.server.core.operations import CutMark
from elasticps.wire.headers import HeldHeader, HoldHeader
from replication.chain import Ranges
from replication.progress import Progress
from replication.step_records import StepRecord

MOST_S = 60.0  # nobody is held for longer


class _Worker(NamedTuple):
    app: str
    held: HeldHeader


class CutHold:
    """One cut at a time: the newest that somebody asked for. A lower number is refused, and so is one that has been
    released, or whose time was over: its workers may have gone on."""

    def __init__(self) -> None:
        self.cut = 0
        self._until_s = 0.0
        self._workers: dict[int, _Worker] = {}
        self._rounds: dict[str, int] = {}  # by application: the newest round that somebody has pushed to

    def begin(self, cut: int, hold_s: float, now: float) -> bool:
        """Holds for a cut, or goes on holding until the time of the first call; returns whether it does."""
        if cut > self.cut and 0 < hold_s <= MOST_S:
            self.cut, self._until_s = cut, now + hold_s
            self._workers.clear()
            self._rounds.clear()
        return cut == self.cut and now < self._until_s

    def tells(self, app: str, now: float) -> HoldHeader | None:
        """What a worker of that application is told now, if it is to hold."""
        left_ms = int((self._until_s - now) * 1000)
        return HoldHeader(self.cut, left_ms, self._rounds.get(app, 0)) if left_ms > 0 else None

    @property
    def released(self) -> int:
        """The newest cut that workers were released from, 0 while they hold for it."""
        return 0 if self._until_s else self.cut

    def hear(self, app: str, held: HeldHeader, now: float) -> bool:
        """A worker holds, or is about to; whether the others of its application have to be told to come as far."""
        if held.cut != self.cut or now >= self._until_s:
            return False
        self._workers[held.worker] = _Worker(app, held)
        if not held.open or held.clock <= self._rounds.get(app, 0):
            return False
        self._rounds[app] = held.clock
        return True

    def held(self, cut: int, now: float) -> dict[int, WorkerHeld]:
        """The workers that hold for this cut, and what they report; those that still have to push to a round do
        not."""
        if cut != self.cut or now >= self._until_s:
            return {}
        return {
            id: WorkerHeld(held.clock, held.epoch, held.digest)
            for id, (app, held) in self._workers.items()
            if not held.open and (held.apart or held.clock >= self._rounds.get(app, 0))
        }

    def release(self, cut: int) -> bool:
        """Its workers may go on; whether they were held until now."""
        if cut != self.cut:
            return False
        was, self._until_s = self._until_s, 0.0
        return was > 0.0


class Column(NamedTuple):
    """What must be the same in all ranges of a consistent cut. workers, progress: int64 as bytes, sorted by worker;
    closed: each application's last closed round; retained: (application, round, worker) of shares
    whose round is open."""

    workers: bytes
    progress: bytes
    closed: tuple[tuple[str, int], ...]
    retained: tuple[tuple[str, int, int], ...]

    def clocks(self) -> dict[int, int]:
        """Progress by worker."""
        workers, progress = (np.frombuffer(data, np.int64).tolist() for data in (self.workers, self.progress))
        return dict(zip(workers, progress, strict=True))


class Noted(NamedTuple):
    """A range at a cut: the CUT, its place in the log, and what there was. home: rounds and shards of applications
    whose group range this is, as JSON has them; None for a range that is nobody's. records: of workers whose home this
    is, by worker."""

    mark: CutMark
    seq: int
    column: Column
    home: dict[str, Any] | None
    records: Sequence[tuple[int, StepRecord]] = ()


class CutNotes:
    """noted: by range, of cut `newest`."""

    def __init__(self) -> None:
        self.newest = 0
        self.noted: dict[int, Noted] = {}
        self._columns: dict[Column, Column] = {}  # one object for all ranges that have the same

    def note(
        self, mark: CutMark, r: int, seq: int, clocks: tuple[NDArray[np.int64], Progress], rounds: Rounds,
        shards: ShardLedger, tables: Mapping[int, Selecting], records: Sequence[tuple[int, StepRecord]] = (),
    ) -> None:  # fmt: skip
        """Keeps what there is in a range as the CUT is applied."""
        if mark.number < self.newest:
            return
        if mark.number > self.newest:
            self.newest = mark.number
            self.noted.clear()
            self._columns.clear()
        workers, progress = clocks
        closed, retained = tuple(rounds.closed_in(r)), tuple(rounds.retained_in(r, tables))
        column = Column(workers.tobytes(), progress.tobytes(), closed, retained)
        column = self._columns.setdefault(column, column)
        self.noted[r] = Noted(mark, seq, column, _home(r, rounds, shards), records)

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


def _home(r: int, rounds: Rounds, shards: ShardLedger) -> dict[str, Any] | None:
    groups = [
        {"app": app, "decided": group.decided, "workers": list(group.workers), "roster": group.roster,
         "members": [list(each) for each in sorted(group.members.items())],
         "last": [list(each) for each in sorted(group.last.items())]}
        for app, group in sorted(rounds.groups_of(r).items()) if group.in_rounds
    ]  # fmt: skip
    sets = [
        {"app": app, "name": name, "id": one.id, "spec": list(one.spec), "upcoming": one.upcoming, "done": one.done,
         "returned": [[shard, *used] for shard, used in sorted(one.returned.items())],
         "doing": [[worker, shard, doing.clock, *doing.before] for worker, mine in sorted(one.doing.items())
                   for shard, doing in sorted(mine.items())]}
        for app, named in sorted(shards.dump(r).items()) for name, one in sorted(named.items())
    ]  # fmt: skip
    return {"groups": groups, "shards": sets} if groups or sets else None
