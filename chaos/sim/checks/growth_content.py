"""The content of a table that grows and forgets, of one range, as a replica or a checkpoint has it; compared with the
model's, to the bit."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from chaos.sim.checks.growth_model import DIM, Candidate, TableModel, bits
from chaos.sim.checks.violation import Violation
from elasticps.checkpoint.contents import Contents
from elasticps.checkpoint.range_usage import RangeUsage, together
from elasticps.kernels.hashing import HASH_END
from elasticps.model.policies import SCORES
from elasticps.store import Table
from elasticps.store.layout import RowLayout
from elasticps.store.usage import USAGE


class TableContent(NamedTuple):
    """keys: int64 [n] of rows, with weights float32 [n, DIM] and usage uint32 [n, USAGE]; waiting: keys that wait for a
    row; sketch: uint8 [blocks, width], None if it is not to be compared."""

    keys: NDArray[np.int64]
    weights: NDArray[np.float32]
    usage: NDArray[np.uint32]
    waiting: dict[int, Candidate]
    sketch: NDArray[np.uint8] | None


def content_of(table: Table, r: int) -> TableContent:
    """Reads the content of range r at a replica."""
    assert table.lifecycle is not None
    keys = table.range_keys(r)
    weights = np.empty((len(keys), DIM), np.float32)
    table.gather(keys, weights)
    waiting = table.lifecycle.waiting
    return TableContent(
        keys,
        weights,
        table.read_usage(keys),
        _candidates(*waiting.list_interval(r, 0, HASH_END)),
        waiting.read_blocks(r, 0, HASH_END),
    )


def checkpointed(contents: Contents, number: int) -> dict[int, TableContent]:
    """Reads the content of a table in a checkpoint, over its whole chain, by range. Raises CheckpointError."""
    spec = contents.manifest.spec(number)
    layout, floats = RowLayout.of(spec), spec.usage_floats
    ranges = range(contents.manifest.ranges)
    keys: dict[int, list[NDArray[np.int64]]] = {r: [] for r in ranges}
    rows: dict[int, list[NDArray[np.uint8]]] = {r: [] for r in ranges}
    usages: dict[int, list[RangeUsage]] = {r: [] for r in ranges}
    for unit in contents.units(number):
        for piece in contents.read(unit):
            keys[piece.range].append(piece.keys)
            rows[piece.range].append(piece.rows)
            if piece.usage is not None:
                usages[piece.range].append(piece.usage)
    found = {}
    for r in ranges:
        there = np.concatenate([np.empty((0, layout.stride), np.uint8), *rows[r]])
        weights = there[:, : 4 * DIM].copy().view(np.float32)
        usage = np.zeros((len(there), USAGE), np.uint32)
        usage[:, :floats] = there[:, layout.usage_at : layout.usage_at + 4 * floats].copy().view(np.uint32)
        waits = together(usages[r])
        found[r] = TableContent(
            np.concatenate([np.empty(0, np.int64), *keys[r]]),
            weights,
            usage,
            _candidates(waits.keys, waits.words),
            waits.sketch,
        )
    return found


def _candidates(keys: NDArray[np.int64], words: NDArray[np.int64]) -> dict[int, Candidate]:
    return {k: Candidate(w & 0xFFFF, w >> 16) for k, w in zip(keys.tolist(), words.tolist(), strict=True)}


def compare(where: str, found: TableContent, expected: TableModel) -> None:
    """Raises Violation for the first difference between a content and the model's."""
    keys = found.keys.tolist()
    if sorted(keys) != sorted(expected.rows):
        more, less = sorted(set(keys) - expected.rows.keys()), sorted(expected.rows.keys() - set(keys))
        twice = sorted({key for key in keys if keys.count(key) > 1})
        raise Violation("rows", f"{where} has rows of keys {more} too many, lacks {less}, and has {twice} twice")
    scored = expected.spec.usage == SCORES
    for i, key in enumerate(keys):
        row, usage = expected.rows[key], found.usage[i].tolist()
        right = [row.last, bits(row.count), bits(row.score) if scored else usage[2]]
        if usage != right:
            raise Violation("usage", f"{where}: key {key} has {_usage_text(usage)}, not {_usage_text(right)}")
        if not np.array_equal(found.weights[i], row.weights):
            raise Violation(
                "weights", f"{where}: key {key} has {found.weights[i].tolist()}, not {row.weights.tolist()}"
            )
    if found.waiting != expected.waiting:
        raise Violation("candidates", f"{where} has {found.waiting}, not {expected.waiting}")
    if found.sketch is not None:
        at = zip(*np.nonzero(found.sketch), strict=True)
        sketch = {(int(b), int(p)): int(found.sketch[b, p]) for b, p in at}
        if sketch != {place: count for place, count in expected.sketch.items() if count}:
            raise Violation("a sketch", f"{where} has counters {sketch}, not {expected.sketch}")


def _usage_text(usage: list[int]) -> str:
    count, score = np.array(usage[1:], np.uint32).view(np.float32).tolist()
    return f"last use {usage[0]}, count {count}, score {score}"
