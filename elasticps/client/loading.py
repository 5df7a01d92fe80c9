"""Rows that go into a table past its optimizer: a tensor's initial values, rows and optimizer state that a user loads,
and deletions. An optimizer's state of a dense tensor is stored in blocks: here it becomes arrays of the tensor's shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from elasticps.client.core.fan_out import Questions, of_heads
from elasticps.client.core.routing import Routes, plan_push
from elasticps.client.inputs import checked_floats
from elasticps.client.writes import Part, PushFrame, Write
from elasticps.errors import InputError
from elasticps.model.spec import TableSpec
from elasticps.wire.frames import MAX_DIM, Buffer, Header
from elasticps.wire.headers import EraseHeader, InitHeader
from replication.chain import Member
from replication.messages import OperationKind

Writes = Sequence[Callable[[Routes], Write]]
"""What is to be written, by the routes of a view: tables that go together."""
NO_STEP_VALUES = np.empty(0, np.float32)


class GivenRows:
    """Rows of keys int64 [n], each key once, with values float32 [n, dim], in the order of a view's ranks."""

    def __init__(self, keys: NDArray[np.int64], values: NDArray[np.float32]) -> None:
        self.keys, self.dim = keys, values.shape[1]
        self._bytes, self._row = values.data.cast("B") if values.size else memoryview(b""), 4 * values.shape[1]

    def gradients(self, start: int, stop: int) -> list[Buffer]:
        return [self._bytes[start * self._row : stop * self._row]]

    def complete(self) -> None:
        pass


def rows(table: int, salt: np.uint64, keys: NDArray[np.int64], values: NDArray[np.float32], routes: Routes) -> Write:
    """Distinct keys int64 [n] of a table and their rows float32 [n, dim]."""
    plan = plan_push(keys, salt, routes)
    return Write(table, GivenRows(keys[plan.order], values[plan.order]), plan.offsets, NO_STEP_VALUES)


def with_slots(
    name: str, values: NDArray[np.float32], slots: Mapping[str, object], shapes: Mapping[str, int]
) -> NDArray[np.float32]:
    """Rows float32 [n, dim] with all their slots behind them; shapes: how many floats each has. Raises InputError."""
    table = f"table {name!r}"
    if slots.keys() != shapes.keys():
        raise InputError(f"{table} has slots {', '.join(shapes) or '(none)'}, not {', '.join(slots)}")
    parts = [checked_floats(f"{table}: slot {slot}", slots[slot], (len(values), n)) for slot, n in shapes.items()]
    joined = np.concatenate([values, *parts], axis=1)
    if joined.shape[1] > MAX_DIM:
        raise InputError(f"{table}: rows with slots of more than {MAX_DIM:,} floats cannot be loaded")
    return joined


def fill(writes: Writes, worker: int, *, replace: bool) -> Questions:
    """Sends what `writes` give to the heads. replace: also for rows that there are; their slots begin anew."""
    return _to_heads(writes, lambda epoch, cut: InitHeader(epoch, worker, cut.items, cut.ranges is None, replace))


def delete(writes: Writes, worker: int, number: int) -> Questions:
    """The same with keys alone, whose rows go: a worker's deletion of that number."""
    kind = OperationKind.DELETE
    return _to_heads(
        writes,
        lambda epoch, cut: EraseHeader(
            epoch, worker, number, kind, blocks=cut.items, all_ranges=cut.ranges is None
        ),
    )  # fmt: skip


def erase(table: int, kind: OperationKind, worker: int, number: int = 0) -> Questions:
    """Tells the heads that all rows of a table go, or the table itself."""
    return of_heads(EraseHeader(0, worker, number, kind, table).header())


def _to_heads(writes: Writes, header_of: Callable[[int, PushFrame], InitHeader | EraseHeader]) -> Questions:
    def questions(routes: Routes) -> Iterator[tuple[Member, Header, list[Buffer]]]:
        if routes.headless:  # their rows would be sent to nobody, and count as written
            return
        part = Part([write(routes) for write in writes], routes)
        for server in routes.share_of:
            for cut in part.whole(server, routes):
                header = header_of(routes.epoch, cut).header(sum(map(len, cut.buffers)))
                yield routes.members[server], header, cut.buffers

    return questions


def of_blocks(spec: TableSpec, rows: NDArray[np.float32]) -> dict[str, NDArray[np.float32]]:
    """Slots by name, of the slots of all blocks, float32 [blocks, floats]. A slot that has a float for each weight
    becomes an array of the tensor's shape. Any other, such as Adam's `step`, becomes float32 [k], of one block, where
    all blocks have the same, else [blocks, k]."""
    found, at, shape = {}, 0, spec.shape or ()
    for name, floats in spec.optimizer.slot_shapes(spec.dim).items():
        part = rows[:, at : at + floats]
        at += floats
        if per_weight(spec, name):
            found[name] = part.ravel()[: spec.size].reshape(shape)
        else:
            same = len(part) > 0 and bool((part == part[:1]).all())
            found[name] = part[0].copy() if same else part.copy()
    return found


def with_weights(spec: TableSpec, values: NDArray[np.float32], slots: Mapping[str, object]) -> NDArray[np.float32]:
    """Rows of all blocks, weights and slots, of a tensor's values and what `of_blocks` gives. InputError."""
    tensor = f"tensor {spec.name!r}"
    shapes = spec.optimizer.slot_shapes(spec.dim)
    if slots.keys() != shapes.keys():
        raise InputError(f"{tensor} has slots {', '.join(shapes) or '(none)'}, not {', '.join(slots)}")
    given: dict[str, object] = {}
    for name, floats in shapes.items():
        what = f"{tensor}: slot {name}"
        if per_weight(spec, name):
            flat = checked_floats(what, slots[name], values.shape)
            given[name] = _in_blocks(spec, flat, spec.optimizer.slot_fill)
        else:
            whole = (spec.blocks, floats)
            one = getattr(slots[name], "shape", None) == (floats,)  # the same for all blocks
            part = checked_floats(what, slots[name], (floats,) if one else whole)
            given[name] = np.ascontiguousarray(np.broadcast_to(part, whole))
    return with_slots(spec.name, _in_blocks(spec, values, 0.0), given, shapes)


def per_weight(spec: TableSpec, name: str) -> bool:
    """Whether a slot grows with the number of weights; by its length alone a tensor of one float would not show it."""
    return spec.optimizer.slot_shapes(1)[name] != spec.optimizer.slot_shapes(2)[name]


def _in_blocks(spec: TableSpec, values: NDArray[np.float32], fill: float) -> NDArray[np.float32]:
    """float32 [blocks, dim]: the last block is padded with `fill`, as a new tensor's is."""
    blocks = np.full((spec.blocks, spec.dim), fill, np.float32)
    blocks.reshape(-1)[: spec.size] = values.ravel()
    return blocks
