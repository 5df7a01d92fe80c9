"""Validates what workers and other servers send against the tables here, before anything changes.

An operation that passes cannot fail when it is applied. `PushRows` is the head's verdict on each row of a push; the
verdict travels in the log, so all replicas apply the same rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from elasticps.errors import InputError, SpecError
from elasticps.kernels.hashing import HASH_END
from elasticps.model.policies import MAX_COUNT, MAX_TIME, SCORES
from elasticps.model.spec import TableSpec
from elasticps.server.core.barrier_state import RoundStep
from elasticps.server.core.operations import (
    ChangedPolicies,
    ChunkContent,
    Cleared,
    CreatedTables,
    RestoredKeys,
    RestoredRows,
    RowBlocks,
    WaitingKeys,
)
from elasticps.server.core.requests import RequestError
from elasticps.server.core.sweeps import SweptInterval
from elasticps.store import Store, Table
from elasticps.store.admission import BLOCKS, COUNT_MASK, NO_BLOCKS, check_sketch, sketch_width
from elasticps.store.eviction import MOST_SWEEPS, Measure, Sweep
from elasticps.store.native import MAX_STAMP
from elasticps.wire.frames import Block
from elasticps.wire.refusals import refused_rows, why
from replication.messages import Forward, Message, OperationKind, SnapshotChunk
from replication.refusals import Refusal


def unknown_table(server: str, table: int) -> RequestError:
    """Refusal of a request for a table that is not here."""
    return RequestError("unknown-table", f"server {server} has no table with id {table}: it was dropped")


def check_block(
    tables: Mapping[int, Table], block: Block, positions: NDArray[np.int64], server: str, kind: int
) -> None:
    """A block fits its table and the kind of operation, and its keys lie in ranges that have a position, in that order;
    positions: int64 [P]. Raises RequestError."""
    table = tables.get(block.table)
    if table is None:
        raise unknown_table(server, block.table)
    name, gradients = table.spec.name, kind == OperationKind.PUSH
    width = table.push.words + table.spec.push_width - table.spec.dim  # with a score, where the table keeps scores
    dims: tuple[int, ...] = (width if gradients else 0 if kind == OperationKind.DELETE else table.spec.dim,)
    if kind == OperationKind.LOAD:
        dims = table.put_widths
    expected = table.spec.optimizer.step_floats if gradients else 0
    if block.grads.shape[1] not in dims:
        raise RequestError("shape", f"table {name!r} takes rows of {dims[0]} words, these have {block.grads.shape[1]}")
    if len(block.step_values) != expected:
        raise RequestError("shape", f"table {name!r} takes {expected} step values, not {len(block.step_values)}")
    at = table.first_misplaced(block.keys, positions)
    if at >= 0:
        text = f"key {block.keys[at]} of table {name!r} is not in a range that the push ticks at server "
        raise RequestError("foreign", f"{text}{server}, or not in their order")


def not_finite(table: Table, block: Block) -> NDArray[np.bool_]:
    """bool [n]: which gradients of a valid block have NaN or infinity, if its table takes finite ones only; and which
    rows have a score that is none, as no client sends it: a score below 0 would make rows of older files unlike those
    that are evicted."""
    scored = table.spec.push_width > table.spec.dim
    wrong = np.zeros(len(block.keys), np.bool_)
    if table.spec.finite:
        wrong = ~np.asarray(np.isfinite(block.grads if scored else table.push.decode(block.grads)).all(axis=1))
    if scored:
        scores = block.grads[:, -1]
        wrong |= ~(scores >= 0) | np.isinf(scores)
    return wrong


def why_not_finite(table: Table, block: Block, mask: NDArray[np.bool_]) -> str:
    """Says what is wrong with the first of the rows [n] that `not_finite` has found."""
    at = int(np.argmax(mask))
    key, score = block.keys[at], block.grads[at, -1] if table.spec.push_width > table.spec.dim else 0.0
    if not 0 <= score < np.inf:
        return f"table {table.spec.name!r} takes finite scores of at least 0 only; that of key {key} is {score:g}"
    return f"table {table.spec.name!r} takes finite gradients only; that of key {key} is not"


def _check_gradients(store: Store, block: Block, positions: NDArray[np.int64], server: str, kind: int) -> None:
    """As `check_block`, for rows that another server has checked: InputError for gradients that are not finite."""
    check_block(store.tables, block, positions, server, kind)
    if kind == OperationKind.PUSH and (mask := not_finite(store.tables[block.table], block)).any():
        raise InputError(why_not_finite(store.tables[block.table], block, mask))


def wrong(store: Store, server: str, message: Message) -> str:
    """Why another server's message cannot be applied here, "" if it can. Creates the tables that it names."""
    try:
        if isinstance(message, Forward):
            _check_operation(store, server, message)
        elif isinstance(message, SnapshotChunk):
            _check_chunk(store, server, message.range, message.payload)  # type: ignore[arg-type]
    except (RequestError, SpecError, InputError) as error:
        return str(error)
    return ""


def _check_operation(store: Store, server: str, message: Forward) -> None:
    payload = message.operation.payload
    if isinstance(payload, CreatedTables):
        for new in payload.tables:
            store.create(TableSpec.from_json(new.spec), new.table, new.app)
    elif isinstance(payload, RowBlocks):
        for block in payload.blocks:
            _check_gradients(store, block, payload.positions, server, message.operation.kind)
    elif isinstance(payload, RestoredRows):
        check_rows(store, server, int(message.ranges[0]), payload)
    elif isinstance(payload, RestoredKeys):
        _check_keys(store, server, int(message.ranges[0]), payload)
    elif isinstance(payload, SweptInterval | ChangedPolicies):
        check_policies(store, server, payload)
    elif isinstance(payload, RoundStep):
        for sweep in payload.sweeps:
            check_policies(store, server, sweep)
    elif isinstance(payload, Cleared) and payload.table not in store.tables and payload.table not in store.dropped:
        raise unknown_table(server, payload.table)


def check_policies(store: Store, server: str, payload: SweptInterval | ChangedPolicies) -> None:
    """A sweep or a change of policies fits its table. Raises RequestError, SpecError."""
    table = store.tables.get(payload.table)
    if table is None:
        if payload.table not in store.dropped:
            raise unknown_table(server, payload.table)
        return
    if table.lifecycle is None:
        raise SpecError(f"table {table.spec.name!r} keeps no usage of its rows: it has no policies")
    if isinstance(payload, ChangedPolicies):
        spec = TableSpec.from_json(payload.spec)
        table.spec.with_policies(spec.admission, spec.eviction)
        check_sketch(spec.admission, store.ranges)
    elif payload.predicate.measure == Measure.SCORE and table.spec.usage != SCORES:
        raise SpecError(f"table {table.spec.name!r} keeps no scores of its rows")


def check_rows(store: Store, server: str, r: int, restored: RestoredRows) -> None:
    """Whole rows fit their table, and lie in range r. Raises RequestError, InputError."""
    table = store.tables.get(restored.table)
    if table is None:
        raise unknown_table(server, restored.table)
    positions = np.full(store.ranges, -1, np.int64)
    positions[r] = 0
    _check_whole_rows(table, r, restored.keys, restored.rows, positions)


def _check_keys(store: Store, server: str, r: int, restored: RestoredKeys) -> None:
    """Waiting keys fit their table, and lie in range r. Raises RequestError, InputError."""
    table = store.tables.get(restored.table)
    if table is None:
        raise unknown_table(server, restored.table)
    positions = np.full(store.ranges, -1, np.int64)
    positions[r] = 0
    _check_waiting(table, r, WaitingKeys(restored.keys, restored.words, 0, NO_BLOCKS), positions)


def _check_whole_rows(
    table: Table, r: int, keys: NDArray[np.int64], rows: NDArray[np.uint8], positions: NDArray[np.int64]
) -> None:
    if rows.shape[1] != table.stride:
        raise InputError(f"rows of table {table.spec.name!r} have {table.stride} bytes, not {rows.shape[1]}")
    if table.first_misplaced(keys, positions) >= 0:
        raise InputError(f"a piece of range {r} has keys of table {table.spec.name!r} that lie elsewhere")


def _check_chunk(store: Store, server: str, r: int, content: ChunkContent) -> None:
    positions = np.full(store.ranges, -1, np.int64)
    positions[r] = 0
    if not 0 <= content.base <= content.cut <= content.base + MAX_STAMP:
        raise InputError(f"a piece of range {r} has cut {content.cut} and stamps that count from {content.base}")
    if not 0 <= content.time <= MAX_TIME:
        raise InputError(f"a piece of range {r} is from second {content.time}, which cannot be")
    for number, spec, keys, rows, stamped, notes, floor, waiting in content.tables:
        if not spec and not len(keys):  # it was dropped
            continue
        policies = TableSpec.from_json(spec)
        table = store.create(policies, number)
        _check_whole_rows(table, r, keys, rows, positions)
        if waiting is not None:
            _check_waiting(table, r, waiting, positions)
            _check_sketch(table, r, policies, waiting)
            _check_sweeps(table, r, waiting.sweeps, content.cut)
        if stamped.max(initial=0) > content.cut - content.base:
            raise InputError(f"a piece of range {r} has rows of table {table.spec.name!r} from after cut {content.cut}")
        last = max(floor - 1, int(notes[:, 1].max(initial=0)))
        if min(floor, int(notes[:, 1].min(initial=0))) < 0 or last > content.cut:
            raise InputError(
                f"a piece of range {r} notes deletions from table {table.spec.name!r} after no cut that was"
            )
    for _, _, _, blocks in content.rounds.retained:
        for block in blocks:
            _check_gradients(store, block, positions, server, OperationKind.PUSH)


def _check_waiting(table: Table, r: int, waiting: WaitingKeys, positions: NDArray[np.int64]) -> None:
    """Candidates lie in range r. Raises InputError."""
    if table.lifecycle is None:
        raise InputError(f"a piece of range {r} has usage of table {table.spec.name!r}, which keeps none")
    if not len(waiting.keys):
        return
    counts = waiting.words & COUNT_MASK
    if table.first_misplaced(waiting.keys, positions) >= 0 or waiting.words.min() <= 0 or counts.max() > MAX_COUNT:
        raise InputError(f"a piece of range {r} has candidates of table {table.spec.name!r} that cannot be")


def _check_sketch(table: Table, r: int, spec: TableSpec, waiting: WaitingKeys) -> None:
    """Blocks are those of the sketch that range r has under the policies of `spec`. Raises InputError."""
    blocks = waiting.blocks
    if not blocks.size:
        return
    width = HASH_END // table.ranges
    first, uneven = divmod((waiting.low - r * width) * BLOCKS, width)
    fits = blocks.shape[1] == sketch_width(spec.admission, table.ranges)
    if not fits or uneven or not 0 <= first <= BLOCKS - len(blocks):
        raise InputError(f"a piece of range {r} has blocks of a sketch that table {table.spec.name!r} has not")


def _check_sweeps(table: Table, r: int, sweeps: Sequence[Sweep], cut: int) -> None:
    """Sweeps are of rows, and from before the range's next cut. Raises InputError."""
    cannot_be = any(
        not (0 <= sweep.cut <= cut and 0 <= sweep.low <= sweep.high <= HASH_END and sweep.predicate.now <= MAX_TIME)
        or sweep.predicate.of_candidates
        or (sweep.predicate.measure == Measure.SCORE and table.spec.usage != SCORES)
        for sweep in sweeps
    )
    if cannot_be or len(sweeps) > MOST_SWEEPS:
        raise InputError(f"a piece of range {r} has sweeps of table {table.spec.name!r} that cannot be")


Mask = NDArray[np.bool_]


class PushRows:
    """blocks: what is applied; refused: the rows that are not; error: why the first of them is not."""

    def __init__(self, blocks: list[Block]) -> None:
        self.blocks = blocks
        self.refused: list[Block] = []
        self.error: RequestError | None = None

    def refuse(self, error: RequestError, chosen: Sequence[Mask]) -> None:
        """Refuses the chosen rows of each block, bool [n]."""
        retained = []
        for block, mask in zip(self.blocks, chosen, strict=True):
            count = np.count_nonzero(mask)
            if count:
                self.refused.append(_some(block, mask))
                self.error = self.error or error
            if count < len(mask):
                retained.append(_some(block, ~mask) if count else block)
        self.blocks = retained

    def refuse_all(self, error: RequestError) -> None:
        """Refuses all rows that are left."""
        self.refuse(error, [np.ones(len(block.keys), np.bool_) for block in self.blocks])

    def refuse_unknown(self, tables: Mapping[int, Table], server: str) -> None:
        """Refuses rows of tables that are not here."""
        gone = [block.table not in tables for block in self.blocks]
        if any(gone):
            error = unknown_table(server, self.blocks[gone.index(True)].table)
            chosen = [np.full(len(block.keys), out) for block, out in zip(self.blocks, gone, strict=True)]
            self.refuse(error, chosen)

    def refuse_not_finite(self, tables: Mapping[int, Table]) -> None:
        """Refuses gradients with NaN or infinity, for tables that take none, and scores that are none."""
        chosen = [not_finite(tables[block.table], block) for block in self.blocks]
        for block, mask in zip(self.blocks, chosen, strict=True):
            if count := np.count_nonzero(mask):
                table, key = tables[block.table].spec.name, int(block.keys[np.argmax(mask)])
                text = why_not_finite(tables[block.table], block, mask)
                if count > 1:
                    text += f", nor those of {count - 1:,} more"
                self.refuse(RequestError("not-finite", text, table=table, key=key), chosen)
                return

    def refusal(self, acknowledged: int, ranges: int, before: Refusal | None = None) -> Refusal | None:
        """What is logged of the refused rows, joined with an earlier refusal; None if there is nothing.

        acknowledged: the clock up to which the worker knows its steps to be committed; ranges: of the cluster.
        """
        if self.error is None:
            return before
        rows = refused_rows(self.refused, ranges)
        if before is not None:
            return before._replace(rows=rows if before.rows is None else before.rows.joined(rows))
        return Refusal(why(self.error.document), acknowledged, rows)


def _some(block: Block, mask: Mask) -> Block:
    return block._replace(keys=block.keys[mask], grads=block.grads[mask])
