"""Bags of a collection: the rows of each feature and sample summed, side by side for all features of the batch.

On the CPU compiled code reads rows and writes the vectors where they belong, and spreads their gradient over the rows
again: a pass over the ids each, where torch's kernel for the gradient sorts them. On a GPU torch's own kernels do it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from elasticps.kernels import njit
from elasticps.torch.host import moved

_NO_WEIGHTS = np.empty(0, np.float32)


class Bags(NamedTuple):
    """The bags of some features, whose rows lie in one matrix.

    rows: float32 [keys, dim]; positions: int64, the row of each id, feature after feature; features: int64 [m, 3], of
    each feature its number in the batch, where its ids begin in `positions`, and the first column of its vectors;
    mode: "sum" or "mean"; weights: of the ids, float32, or None.
    """

    rows: Tensor
    positions: Tensor
    features: NDArray[np.int64]
    mode: str
    weights: Tensor | None


def pooled(groups: Sequence[Bags], ends: NDArray[np.int64], samples: int, columns: int) -> Tensor:
    """Pools all bags of a batch; returns float32 [samples, columns]. ends: where each list of the batch ends, int64,
    and 0 before them."""
    if all(bags.rows.is_cpu for bags in groups):
        rows, weights = [bags.rows for bags in groups], [bags.weights for bags in groups if bags.weights is not None]
        made: Tensor = _Pooled.apply(groups, ends, samples, columns, *rows, *weights)  # type: ignore[no-untyped-call]
        return made
    parts: dict[int, Tensor] = {}
    for bags in groups:
        offsets = np.zeros(len(bags.features) * samples + 1, np.int64)
        lists = bags.features[:, :1] * samples + np.arange(samples)
        np.cumsum((ends[lists + 1] - ends[lists]).reshape(-1), out=offsets[1:])
        vectors = functional.embedding_bag(
            bags.positions, bags.rows, moved(torch.from_numpy(offsets), bags.rows.device), mode=bags.mode,
            include_last_offset=True, per_sample_weights=bags.weights,
        )  # fmt: skip
        each = vectors.view(len(bags.features), samples, bags.rows.shape[1])
        if len(groups) == 1:
            return each.transpose(0, 1).reshape(samples, columns)
        parts |= dict(zip(bags.features[:, 2].tolist(), each, strict=True))
    return torch.cat([parts[column] for column in sorted(parts)], dim=1)


class _Pooled(torch.autograd.Function):
    """The bags of several groups, on the CPU. Takes the groups, what `pooled` does, and then their rows, and their
    weights if they have some, as autograd is to see them."""

    @staticmethod
    def forward(
        ctx: Any, groups: Sequence[Bags], ends: NDArray[np.int64], samples: int, columns: int, *tensors: Tensor
    ) -> Tensor:
        out = torch.empty(samples, columns, dtype=torch.float32, device="cpu")
        for bags in groups:
            given = bags.rows.detach().numpy(), bags.positions.numpy(), bags.features, ends, bags.mode == "mean"
            pool(*given, _floats(bags.weights), out.numpy())
        ctx.save_for_backward(*tensors)  # else a second backward pass would count all gradients twice
        ctx.bags = [(bags.positions, bags.features, bags.mode) for bags in groups]
        ctx.ends = ends
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        grads: list[Tensor | None] = []
        of_weights: list[Tensor | None] = []
        above = gradient.contiguous().numpy()
        count, saved = len(ctx.bags), ctx.saved_tensors
        for number, (positions, features, mode) in enumerate(ctx.bags):
            where = positions.numpy(), features, ctx.ends
            rows, weights = saved[number], saved[count + number] if len(saved) > count else None
            grads.append(None)
            if ctx.needs_input_grad[4 + number]:
                grads[-1] = of_rows = torch.empty_like(rows)
                spread(above, *where, mode == "mean", _floats(weights), of_rows.numpy())
            if weights is None:
                continue
            of_weights.append(None)
            if ctx.needs_input_grad[4 + count + number]:
                of_weights[-1] = found = torch.empty_like(weights, memory_format=torch.contiguous_format)
                weigh(above, *where, rows.detach().numpy(), found.numpy())
        return (None, None, None, None, *grads, *of_weights)


def _floats(weights: Tensor | None) -> NDArray[np.float32]:
    return _NO_WEIGHTS if weights is None else weights.detach().contiguous().numpy()


# -- compiled code


def _pool(rows: Any, positions: Any, features: Any, ends: Any, mean: bool, weights: Any, out: Any) -> None:
    """rows: float32 [keys, dim]; positions: int64, of the ids: their rows; features: int64 [m, 3], of each feature its
    number in the batch, where its ids begin in `positions`, and the first of its columns in `out`; ends: int64, where
    each list of the batch ends, and 0 before them; weights: of the ids, float32, or none; out: float32 [samples, …]."""
    samples, dim = out.shape[0], rows.shape[1]
    for f in range(features.shape[0]):
        first, column = features[f, 0] * samples, features[f, 2]
        shift = features[f, 1] - ends[first]
        for s in range(samples):
            start, stop = ends[first + s] + shift, ends[first + s + 1] + shift
            for d in range(dim):
                out[s, column + d] = np.float32(0.0)
            for i in range(start, stop):
                row = positions[i]
                if weights.shape[0]:
                    for d in range(dim):
                        out[s, column + d] += weights[i] * rows[row, d]
                else:
                    for d in range(dim):
                        out[s, column + d] += rows[row, d]
            if mean and stop > start + 1:
                share = np.float32(1.0) / np.float32(stop - start)
                for d in range(dim):
                    out[s, column + d] *= share


def _spread(gradient: Any, positions: Any, features: Any, ends: Any, mean: bool, weights: Any, out: Any) -> None:
    """gradient: of what `pool` gave; out: of the rows, float32 [keys, dim]. All else as for `pool`."""
    samples, dim = gradient.shape[0], out.shape[1]
    out[:] = np.float32(0.0)
    for f in range(features.shape[0]):
        first, column = features[f, 0] * samples, features[f, 2]
        shift = features[f, 1] - ends[first]
        for s in range(samples):
            start, stop = ends[first + s] + shift, ends[first + s + 1] + shift
            share = np.float32(1.0) / np.float32(stop - start) if mean and stop > start else np.float32(1.0)
            for i in range(start, stop):
                row = positions[i]
                scale = share * weights[i] if weights.shape[0] else share
                for d in range(dim):
                    out[row, d] += scale * gradient[s, column + d]


def _weigh(gradient: Any, positions: Any, features: Any, ends: Any, rows: Any, out: Any) -> None:
    """The gradient of the weights: out, of the ids, float32. All else as for `pool`."""
    samples, dim = gradient.shape[0], rows.shape[1]
    for f in range(features.shape[0]):
        first, column = features[f, 0] * samples, features[f, 2]
        shift = features[f, 1] - ends[first]
        for s in range(samples):
            for i in range(ends[first + s] + shift, ends[first + s + 1] + shift):
                total = np.float32(0.0)
                for d in range(dim):
                    total += gradient[s, column + d] * rows[positions[i], d]
                out[i] = total


_FLOATS, _IDS = "float32[:, ::1]", "int64[::1], int64[:, ::1], int64[::1]"
pool: Any = njit(f"({_FLOATS}, {_IDS}, boolean, float32[::1], {_FLOATS})", nogil=True, cache=True)(_pool)
spread: Any = njit(f"({_FLOATS}, {_IDS}, boolean, float32[::1], {_FLOATS})", nogil=True, cache=True)(_spread)
weigh: Any = njit(f"({_FLOATS}, {_IDS}, {_FLOATS}, float32[::1])", nogil=True, cache=True)(_weigh)
