"""What an optimizer keeps of a dense tensor, which servers store in blocks: between rows of blocks and arrays of the
tensor's shape."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from elasticps.client import filling
from elasticps.client.inputs import checked_floats
from elasticps.errors import InputError
from elasticps.model.spec import TableSpec


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
    return filling.with_slots(spec.name, _in_blocks(spec, values, 0.0), given, shapes)


def per_weight(spec: TableSpec, name: str) -> bool:
    """Whether a slot grows with the number of weights; by its length alone a tensor of one float would not show it."""
    return spec.optimizer.slot_shapes(1)[name] != spec.optimizer.slot_shapes(2)[name]


def _in_blocks(spec: TableSpec, values: NDArray[np.float32], fill: float) -> NDArray[np.float32]:
    """float32 [blocks, dim]: the last block is padded with `fill`, as a new tensor's is."""
    blocks = np.full((spec.blocks, spec.dim), fill, np.float32)
    blocks.reshape(-1)[: spec.size] = values.ravel()
    return blocks
