"""Input and output of collections: batches of lists of ids, one list for each feature and sample, and vectors.

Methods are named as in torchrec's classes, so that code takes objects of either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from elasticps.errors import InputError

_IDS = (torch.int64, torch.int32)
Given = Tensor | tuple[Tensor, Tensor]


class Jagged:
    """Lists of ids: of each feature one for each sample, as torchrec's KeyedJaggedTensor has them.

    keys: the features' names; values: ids, int64 or int32 [n], all those of the first feature before those of the
    second; lengths: how many ids each list has, int64 or int32 [features x samples], in the same order; weights: one
    for each id, float32 [n].
    """

    def __init__(self, keys: Sequence[str], values: Tensor, lengths: Tensor, weights: Tensor | None = None) -> None:
        self._keys = list(keys)
        self._values = values
        self._lengths = lengths
        self._weights = weights

    @classmethod
    def of(cls, features: Mapping[str, Given]) -> Jagged:
        """Makes a batch of {feature: ids}: ids [samples], one for each sample, or [samples, k], or (values, lengths).
        InputError if features have different numbers of samples."""
        values, lengths = [], []
        for name, given in features.items():
            if isinstance(given, tuple):
                if len(given) != 2:
                    raise InputError(f"feature {name!r} takes (values, lengths), got {len(given)} of them")
                values.append(given[0])
                lengths.append(given[1])
            elif given.ndim not in (1, 2):
                raise InputError(f"ids of feature {name!r} must be [samples] or [samples, k], got {list(given.shape)}")
            else:
                values.append(given.reshape(-1))
                lengths.append(torch.full((len(given),), given[:1].numel() if len(given) else 0))
        samples = {name: len(each) for name, each in zip(features, lengths, strict=True)}
        if len(set(samples.values())) > 1:
            raise InputError(f"all features must have the same samples, got {samples}")
        if not values:
            return cls([], torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))
        return cls(list(features), torch.cat(values), torch.cat([each.cpu() for each in lengths]))

    @classmethod
    def columns(cls, keys: Sequence[str], ids: Tensor) -> Jagged:
        """Makes a batch with one id of each feature for each sample: ids [samples, features]. InputError for another
        shape."""
        if ids.ndim != 2 or ids.shape[1] != len(keys):
            raise InputError(f"ids of {len(keys)} features must be [samples, {len(keys)}], got {list(ids.shape)}")
        return cls(keys, ids.t().reshape(-1), torch.ones(ids.numel(), dtype=torch.int64))

    def keys(self) -> list[str]:
        """The features' names."""
        return self._keys

    def values(self) -> Tensor:
        """All ids, int64 or int32 [n], feature after feature."""
        return self._values

    def lengths(self) -> Tensor:
        """How many ids each list has, [features x samples]."""
        return self._lengths

    def weights_or_none(self) -> Tensor | None:
        """The weight of each id, float32 [n]; None if ids have none."""
        return self._weights


class Lists(NamedTuple):
    """A checked batch. ids: int64 [n] on the CPU, whatever the device of `values` is; lengths: int64 [features x
    samples]; ends: int64 [features x samples + 1], where each list ends, and 0 before them."""

    keys: list[str]
    values: Tensor
    ids: NDArray[np.int64]
    lengths: NDArray[np.int64]
    ends: NDArray[np.int64]
    samples: int
    weights: Tensor | None

    def same(self, other: Lists) -> bool:
        """Whether another batch has the same features and lists; weights are not compared."""
        return (
            self.keys == other.keys
            and self.ids.tobytes() == other.ids.tobytes()  # a quarter of what np.array_equal takes
            and self.lengths.tobytes() == other.lengths.tobytes()
        )


def lists_of(given: Any) -> Lists:
    """Checks a batch: a `Jagged`, a KeyedJaggedTensor of torchrec, or a mapping that `Jagged.of` takes. InputError if
    it is none of these, or lengths do not fit."""
    if isinstance(given, Mapping):
        given = Jagged.of(given)
    try:
        keys, values, lengths = list(given.keys()), given.values(), given.lengths()
        weights = given.weights_or_none()
    except (AttributeError, TypeError):
        raise InputError(
            f"a collection takes a Jagged, a KeyedJaggedTensor or {{feature: ids}}, got {type(given).__name__}"
        ) from None
    if getattr(given, "variable_stride_per_key", bool)():
        raise InputError("all features must have the same samples: a stride for each key is not to be had")
    for what, tensor in (("ids", values), ("lengths", lengths)):
        if tensor.dtype not in _IDS or tensor.ndim != 1:
            raise InputError(f"{what} must be int64 or int32 of one dimension, got {tensor.dtype} {list(tensor.shape)}")
    if len(set(keys)) < len(keys):
        raise InputError(f"features must have different names, got {keys}")
    if len(lengths) % max(len(keys), 1) or (not keys and len(values)):
        raise InputError(f"{len(lengths)} lengths are not as many for each of {len(keys)} features")
    sizes = lengths.detach().to("cpu", torch.int64).numpy()
    ends = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=ends[1:])
    if ends[-1] != len(values) or (len(sizes) and sizes.min() < 0):
        raise InputError(f"lengths must be those of {len(values)} ids, they add up to {ends[-1]}")
    if weights is not None and weights.shape != values.shape:
        raise InputError(f"each id has one weight: {len(values)} ids, weights of shape {list(weights.shape)}")
    ids = values.detach().to("cpu", torch.int64).contiguous().numpy()
    return Lists(keys, values, ids, sizes, ends, len(sizes) // max(len(keys), 1), weights)


class KeyedTensor:
    """Vectors of features side by side, with methods as torchrec's KeyedTensor has them. dims: floats of each."""

    def __init__(self, keys: Sequence[str], dims: Sequence[int], values: Tensor) -> None:
        self._keys = list(keys)
        self._dims = list(dims)
        self._values = values

    def keys(self) -> list[str]:
        """The features' names."""
        return self._keys

    def values(self) -> Tensor:
        """All vectors, [samples, floats of all features]."""
        return self._values

    def length_per_key(self) -> list[int]:
        """How many floats each feature has."""
        return self._dims

    def to_dict(self) -> dict[str, Tensor]:
        """The vectors of each feature, [samples, dim]."""
        return dict(zip(self._keys, self._values.split(self._dims, dim=1), strict=True))

    def __getitem__(self, key: str) -> Tensor:
        at = self._keys.index(key) if key in self._keys else -1
        if at < 0:
            raise KeyError(f"there is no feature {key!r}, there are {self._keys}")
        return self._values.narrow(1, sum(self._dims[:at]), self._dims[at])


class JaggedTensor:
    """Vectors in lists, one list for each sample: values [n, dim], lengths [samples]."""

    def __init__(self, values: Tensor, lengths: Tensor) -> None:
        self._values = values
        self._lengths = lengths

    def values(self) -> Tensor:
        """All vectors, [n, dim], list by list."""
        return self._values

    def lengths(self) -> Tensor:
        """How many vectors each list has, int64 [samples], on the CPU."""
        return self._lengths

    def to_dense(self) -> list[Tensor]:
        """One tensor for each list, [length, dim]."""
        return list(self._values.split(self._lengths.tolist()))
