"""The promise of a consistent cut: each range has exactly the steps 1 … c of each worker, whatever died meanwhile. And
the promise of a CUT: it passes each replica once, at the same place of the log, over the same content."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from chaos.sim.checks.rounds import Rounds
from chaos.sim.checks.sums import COLUMNS, KEYS, Rows, Sums, units
from chaos.sim.checks.violation import Violation
from elasticps.checkpoint.cuts import ConsistentCut
from elasticps.server.core.cut import Noted
from elasticps.server.core.operations import CutMark
from elasticps.server.server import Server
from replication.chain import Member, Ranges
from replication.progress import PART_BITS

ALL = np.arange(KEYS)


class CutContent(NamedTuple):
    """A range as a cut passed it at one replica: its place in the log, its notes, and the rows of all its keys by
    table."""

    seq: int
    noted: Noted | None
    rows: Mapping[int, tuple[np.ndarray, Rows]]


class CutCheck:
    """Checks the cuts of one story. tables: application and name by id, as the registry has them now."""

    def __init__(
        self,
        sums: Mapping[str, Sums],
        rounds: Mapping[str, Rounds],
        tables: Callable[[], Mapping[int, tuple[str, str]]],
    ) -> None:
        self._sums = sums
        self._rounds = rounds
        self._tables = tables
        self._passed: dict[tuple[int, int, Member], CutContent] = {}  # by cut, range, and the head that logged it
        self._at: set[tuple[int, int, Member]] = set()  # by cut, range and replica, as long as it keeps its copy

    def follow(self, server: Server, broken: Callable[[Violation], None]) -> None:
        """Follows a server from its start."""
        executor = server.executor
        before = executor.cut_passed

        def passed(ranges: np.ndarray, seqs: np.ndarray, mark: CutMark, inside: Mapping[int, int] | None) -> None:
            before(ranges, seqs, mark, inside)
            for r, seq in zip(ranges.tolist(), seqs.tolist(), strict=True):
                try:
                    self._pass(server, r, seq, mark, whole=r not in (inside or {}))
                except Violation as violation:
                    broken(violation)

        def erase(ranges: Ranges) -> None:
            erased(ranges)
            self._at -= {here for here in self._at if here[2] == server.member and here[1] in ranges}

        executor.cut_passed = passed
        erased, executor.cuts.erase = executor.cuts.erase, erase  # type: ignore[method-assign]

    def _pass(self, server: Server, r: int, seq: int, mark: CutMark, *, whole: bool) -> None:
        here = mark.number, r, server.member
        if here in self._at:
            raise Violation("a cut once", f"range {r} passes cut {mark.number} again at {server.member}")
        self._at.add(here)
        if not whole:
            return
        rows = {}
        for id_, table in server.store.tables.items():
            keys = ALL[table.ranges_of(ALL) == r]
            values = np.empty((len(keys), table.spec.dim), np.float32)
            table.gather(keys, values)
            rows[id_] = keys, values
        found = CutContent(seq, server.executor.cuts.noted.get(r), rows)
        key = mark.number, r, Member(mark.writer, mark.incarnation)
        first = self._passed.setdefault(key, found)
        # Of a cut that comes here when a newer one has passed other ranges nothing is noted.
        differs = first.seq != seq or (first.noted != found.noted and None not in (first.noted, found.noted))
        differs |= any(not np.array_equal(first.rows[i][1], found.rows[i][1]) for i in first.rows.keys() & rows.keys())
        if differs:
            raise Violation("a cut's place", f"range {r} at cut {mark.number} differs at {server.member}")

    # --- a cut that is said to be consistent ------------------------------------------------------------------------

    def consistent(self, cut: ConsistentCut) -> None:
        """Checks that every row of every range is the sum of exactly those steps that the cut says."""
        writer = {r: m for m, state in cut.states.items() for one in state.taken for r in one.ranges}
        contents = {r: self._passed[cut.number, r, m] for r, m in writer.items()}
        if sorted(contents) != list(range(cut.view.ranges)):
            raise Violation("a whole cut", f"cut {cut.number} lacks ranges: it has {sorted(contents)}")
        for id_, (app, name) in self._tables().items():
            if name == "sums" and app in self._sums:
                for r, content in contents.items():
                    if id_ in content.rows:
                        self._check_sums(self._sums[app], cut, r, *content.rows[id_])
            elif name == "means" and app in self._rounds and app not in cut.verdict.rounds_torn:
                rows = np.zeros((KEYS, COLUMNS), np.float32)
                for content in contents.values():
                    if id_ in content.rows:
                        keys, values = content.rows[id_]
                        rows[keys] = values
                self._rounds[app].result(f"cut {cut.number}", cut.verdict.rounds.get(app, 0), rows)

    def _check_sums(self, sums: Sums, cut: ConsistentCut, r: int, keys: np.ndarray, rows: Rows) -> None:
        counts = rows.astype(np.int64).T // units(keys)
        for column in sums.columns:
            out = cut.verdict.left_out.get(column.worker)
            progress = cut.verdict.clocks.get(column.worker, 0) << PART_BITS if out is None else out[r]
            if progress & ((1 << PART_BITS) - 1):
                continue  # it died in the midst of a step
            written = cut.written.get(column.worker, 0)
            if out is None and any(progress >> PART_BITS < c <= written for c in column.clocks):
                text = f"cut {cut.number} has {column.name} up to step {progress >> PART_BITS}"
                raise Violation("who holds has written", f"{text}, it held at {written}")
            expected = column.upto(progress >> PART_BITS)[keys]
            if not np.array_equal(counts[column.index], expected):
                at = int(np.flatnonzero(counts[column.index] != expected)[0])
                raise Violation(
                    "a cut's content",
                    f"{sums.app}: cut {cut.number} has {counts[column.index][at]} pushes of {column.name} (column "
                    f"{column.index}) to key {keys[at]} in range {r}, its steps up to {progress >> PART_BITS} have "
                    f"{expected[at]}",
                )
