"""The promise of tables that grow and forget: replicas carry out one log, and hold what a model of it holds.

Follows every operation that a server applies, in Python or in compiled code, by range and place. A head that is cut off
may log what nobody else has: of two operations at one place that of the newer epoch stays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from chaos.sim.checks.growth_content import checkpointed, compare, content_of
from chaos.sim.checks.growth_model import Content, Logged, RangeModel, TableModel
from chaos.sim.checks.violation import Violation
from elasticps.checkpoint.contents import Contents
from elasticps.errors import CheckpointError
from elasticps.kernels.hashing import key_ranges, range_shift, table_salt
from elasticps.model.policies import Capacity
from elasticps.model.spec import TableSpec
from elasticps.server.core.operations import RowBlocks, TimeMark
from elasticps.server.fast import layout as at
from elasticps.server.server import Server
from elasticps.store import Table
from replication.effects import Apply, Erase, Install
from replication.messages import OperationKind

KEYS = 96  # of a table
CAPACITY_SLACK = 0.02


class _Entry(NamedTuple):
    epoch: int
    op: Logged


class Shown(NamedTuple):
    """A pull of a tail: rows of keys, and its worker's newest step as it began."""

    who: str
    worker: int
    clock: int
    table: int
    keys: np.ndarray
    rows: np.ndarray


@dataclass
class _Followed:
    """What was seen of a server's operations. seqs: the newest place, by range; marks: progress by range and worker."""

    seqs: np.ndarray
    marks: dict[int, dict[int, int]] = field(default_factory=dict)


class Growth:
    """Follows the tables with policies of one story. true_s: cluster time by a correct clock; lag_s, lead_s: by so much
    the time in a log may be behind it, and ahead of it."""

    def __init__(
        self, ranges: int, true_s: Callable[[], float], broken: Callable[[Violation], None], lag_s: float,
        lead_s: float,
    ) -> None:  # fmt: skip
        self.specs: dict[int, TableSpec] = {}  # by id
        self.pushed: dict[tuple[int, int], dict[int, Content]] = {}  # by worker and clock, then by table
        self.shown: list[Shown] = []
        self.evicted = self.admitted = 0
        self._ranges, self._true_s, self._broken, self._lag_s, self._lead_s = ranges, true_s, broken, lag_s, lead_s
        self._logs: list[list[_Entry]] = [[] for _ in range(ranges)]
        self._servers: dict[Server, _Followed] = {}
        self._key_ranges: dict[int, np.ndarray] = {}  # of tables: the range of each key
        self._models: dict[int, RangeModel] = {}

    # --- servers ------------------------------------------------------------------------------------------------------

    def follow(self, server: Server) -> None:
        """Follows a server from its start."""
        self._servers[server] = _Followed(np.zeros(self._ranges, np.int64))
        handlers, fast = server.executor.handlers, server.fast
        apply, install, erase = handlers[Apply], handlers[Install], handlers[Erase]
        act, received = fast._act, fast.received  # one frame at a time, and a look after each

        def applied(effect: Apply) -> None:
            self._guard(self._note, server, effect)
            apply(effect)

        def installed(effect: Install) -> None:
            install(effect)
            self._guard(self._begin, server, [effect.range])

        def erased(effect: Erase) -> None:
            erase(effect)
            self._guard(self._begin, server, effect.ranges.tolist())

        def acted(reason: int, connection: Any) -> bool:
            self._guard(self._look, server)
            return reason == at.TURN or act(reason, connection)

        def taken(connection: Any, nbytes: int) -> None:
            received(connection, nbytes)
            self._guard(self._look, server)

        handlers |= {Apply: applied, Install: installed, Erase: erased}
        fast._act, fast.received = acted, taken  # type: ignore[method-assign]
        fast.h[at.H_TURN] = 0

    def _guard(self, check: Callable[..., None], *given: Any) -> None:
        try:
            check(*given)
        except Violation as violation:
            self._broken(violation)

    def _begin(self, server: Server, ranges: list[int]) -> None:
        """Ranges were filled, or erased: what has been seen of them is void."""
        seen = self._servers[server]
        for r in ranges:
            seen.seqs[r] = server.replica.seq[r]
            workers, progress = server.replica.clocks.column(r)
            seen.marks[r] = dict(zip(workers.tolist(), progress.tolist(), strict=True))

    def _look(self, server: Server) -> None:
        """Compiled code may have applied one frame, or several of different ranges."""
        seen, replica = self._servers[server], server.replica
        if np.array_equal(replica.seq, seen.seqs):
            return
        now_s = self._true_s()
        for r in np.flatnonzero(replica.seq != seen.seqs).tolist():
            workers, progress = replica.clocks.column(r)
            marks = seen.marks.get(r, {})
            ticked = [(w, p) for w, p in zip(workers.tolist(), progress.tolist(), strict=True) if marks.get(w) != p]
            if len(ticked) != 1 or replica.seq[r] != seen.seqs[r] + 1:
                raise AssertionError(f"{server.member} has applied {ticked} to range {r} at once")
            worker, after = ticked[0]
            self._add(server, r, int(replica.seq[r]), Logged("PUSH", worker, after, None, now_s))

    def _note(self, server: Server, effect: Apply) -> None:
        """Python is about to apply an operation."""
        operation, payload = effect.operation, effect.operation.payload
        for number, table in server.store.tables.items():
            if table.lifecycle is not None:
                self.specs.setdefault(number, table.lifecycle.spec)
        content = _content_of(payload) if isinstance(payload, RowBlocks) else None
        named = None if isinstance(payload, RowBlocks) else payload
        # A server that no leader has told the time yet has its own clock alone, for ranges that have no time yet.
        if (
            isinstance(payload, TimeMark)
            and server.leaders.clocks().known
            and self._logs_first(effect)
            and (payload.seconds > self._true_s() + self._lead_s)
        ):
            lead_s = payload.seconds - self._true_s()
            raise Violation("one wrong clock changes nothing", f"{server.member} logs a time {lead_s:.0f} s from now")
        op = Logged(
            OperationKind(operation.kind).name, operation.worker, operation.after, named, self._true_s(), content
        )
        for r, seq in zip(effect.ranges.tolist(), effect.seqs.tolist(), strict=True):
            self._add(server, r, seq, op)

    def _logs_first(self, effect: Apply) -> bool:
        """Whether no other server has applied the operation: this one has logged it."""
        return all(
            len(self._logs[r]) < seq for r, seq in zip(effect.ranges.tolist(), effect.seqs.tolist(), strict=True)
        )

    def _add(self, server: Server, r: int, seq: int, op: Logged) -> None:
        seen, log, epoch = self._servers[server], self._logs[r], server.replica.epoch
        seen.seqs[r] = seq
        if op.worker >= 0:
            seen.marks.setdefault(r, {})[op.worker] = op.after
        if len(log) < seq - 1:
            raise AssertionError(f"range {r} goes on at {seq}, and {len(log)} operations were seen")
        if len(log) == seq - 1:
            log.append(_Entry(epoch, op))
            return
        known = log[seq - 1]
        if known.op.name == op.name:
            if known.op.content is None and op.content is not None:  # in the order of its keys
                log[seq - 1] = _Entry(known.epoch, replace(known.op, content=op.content))
        elif epoch > known.epoch:
            del log[seq - 1 :]
            log.append(_Entry(epoch, op))
        elif epoch == known.epoch:
            raise Violation("one log", f"range {r} has {known.op.name} at {seq}, {server.member} applies {op.name}")

    # --- the end ------------------------------------------------------------------------------------------------------

    def check_end(self, servers: list[tuple[Server, int]]) -> None:
        """Compares every replica, (server, range), with the model; and what tails have shown with what was there."""
        for server, r in servers:
            model = self.model(r, int(server.replica.seq[r]))
            self._compare(server, r, model)
        for shown in self.shown:
            self._check_shown(shown)

    def check_checkpoint(self, contents: Contents) -> None:
        """Compares what a chain of increments has with the model of each range as the cut passed it."""
        cut = contents.manifest.cut
        try:
            found = {id_: checkpointed(contents, id_) for id_, spec in contents.manifest.tables.values() if spec.usage}
            times = contents.times(found)
        except CheckpointError as error:
            raise Violation("checkpoints can be read", f"checkpoint {cut}: {error}") from error
        for r in range(self._ranges):
            model = self.model_at(r, cut)
            if found and times[r] != model.time:
                raise Violation("cluster time", f"checkpoint {cut} has {times[r]} for range {r}, not {model.time}")
            for number, by_range in found.items():
                expected = model.table(number)
                if expected is not None:
                    compare(f"checkpoint {cut}, range {r}, table {number}", by_range[r], expected)

    def model_at(self, r: int, cut: int) -> RangeModel:
        """A range as a cut passed it."""
        passed = (
            at for at, (_, op) in enumerate(self._logs[r], 1)
            if op.what == "CUT" and op.payload.number == cut  # type: ignore[attr-defined]
        )  # fmt: skip
        return self.model(r, next(passed))

    def model(self, r: int, seq: int) -> RangeModel:
        """A range after `seq` operations."""
        model = self._models.get(r)
        if model is None or model.seq > seq:
            model = self._models[r] = RangeModel(self._ranges, self.specs, self._lag_s)
        for entry in self._logs[r][model.seq : seq]:
            model.apply(entry.op, self._in_range(entry.op, r))
        return model

    def _in_range(self, op: Logged, r: int) -> dict[int, Content]:
        pushed = self.pushed.get((op.worker, op.after >> 16)) if op.what == "PUSH" and op.worker > 0 else None
        content = pushed if op.content is None else op.content
        if op.content is not None and pushed is not None:
            for number, sent in pushed.items():
                same = op.content.get(number, Content([], sent.rows[:0]))
                self._check_content(op, number, sent, same)
        found = {}
        for number, (keys, rows) in (content or {}).items():
            chosen = [i for i, key in enumerate(keys) if self.place(number, key) == r]
            if chosen:
                found[number] = Content([keys[i] for i in chosen], rows[chosen])
        return found

    def _check_content(self, op: Logged, number: int, sent: Content, logged: Content) -> None:
        by_key = dict(zip(sent.keys, sent.rows.tolist(), strict=True))
        for key, row in zip(logged.keys, logged.rows.tolist(), strict=True):
            if by_key.get(key) != row:
                raise Violation("what is logged was pushed", f"{op.name} has {row} for key {key} of table {number}")

    def place(self, number: int, key: int) -> int:
        """The range of a key."""
        if number not in self._key_ranges:
            ranges = np.empty(KEYS, np.int32)
            key_ranges(np.arange(KEYS), table_salt(number), range_shift(self._ranges), ranges)
            self._key_ranges[number] = ranges
        return int(self._key_ranges[number][key])

    def _compare(self, server: Server, r: int, model: RangeModel) -> None:
        where = f"range {r} at {server.member} after {model.seq} operations"
        if any(t.lifecycle is not None for t in server.store.tables.values()) and server.store.times[r] != model.time:
            raise Violation("cluster time", f"{where}: {server.store.times[r]}, and {model.time} was logged")
        for number, table in server.store.tables.items():
            if table.lifecycle is None or number in model.dropped:
                continue
            expected = model.table(number)
            if expected is not None:
                compare(f"{where}, table {number}", content_of(table, r), expected)
                _compare_notes(f"{where}, table {number}", table, r, expected)

    def _check_shown(self, shown: Shown) -> None:
        for key, row in zip(shown.keys.tolist(), shown.rows, strict=True):
            model = self._models.get(self.place(shown.table, key))
            if model is None:
                continue
            steps = [seq for (worker, after), seq in model.step_positions.items()
                     if worker == shown.worker and after >> 16 <= shown.clock]  # fmt: skip
            least, weights = max(steps, default=0), tuple(row.tolist())
            known = model.read.get((shown.table, key), [])
            if not known and not any(weights):
                continue
            ends = [*(place.seq for place in known[1:]), 1 << 62]
            if not any(p.weights == weights and end > least for p, end in zip(known, ends, strict=True)):
                text = f"{shown.who} was shown {weights} of key {key} of table {shown.table} after step {shown.clock}"
                raise Violation("pulls of growing tables", f"{text}; it has been {known}, step at {least}")

    def check_capacity(self) -> str:
        """Says which table has more rows than it may at rest; "" if none."""
        for number in self.specs:
            here = [model.tables[number] for model in self._models.values() if number in model.tables]
            most = [[p.rows for p in table.evictions if isinstance(p, Capacity)] for table in here]
            count = sum(len(table.rows) for table in here)
            if most and all(most) and count > (bound := max(map(min, most)) * (1 + CAPACITY_SLACK)):
                return f"table {number} has {count} rows, and may have {bound:g}"
        return ""


def _content_of(payload: RowBlocks) -> dict[int, Content]:
    return {
        block.table: Content(block.keys.tolist(), block.grads.copy()) for block in payload.blocks if len(block.keys)
    }


def _compare_notes(where: str, table: Table, r: int, expected: TableModel) -> None:
    """Compares what replicas keep beside content: the policies in force, and notes for increments, in which no sweep is
    under a cut at which there was none, and none is missing."""
    assert table.lifecycle is not None
    spec = table.lifecycle.spec_of(r)
    if (spec.admission, tuple(spec.eviction)) != (expected.admission, expected.evictions):
        raise Violation("policies", f"{where} is under {spec.admission}, {spec.eviction}")
    noted, floor = table.deletions.sweeps(r), table.deletions.floor(r)
    swept = {(cut, by) for cut, by, _, _ in expected.swept}
    for sweep in noted:
        if (sweep.cut, sweep.predicate) not in swept:
            raise Violation("sweeps since a cut", f"{where} notes {sweep}, and there was none such")
    for cut, by, low, high in expected.swept:
        covered = any(
            one.cut >= cut and one.low <= low and high <= one.high and one.predicate.covers(by) for one in noted
        )
        if cut >= floor and not covered:
            raise Violation("sweeps since a cut", f"{where} lacks the sweep {by} after cut {cut}: it has {noted}")
