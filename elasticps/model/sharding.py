"""How samples are cut into shards and shuffled: values and arithmetic, the same for workers and servers.

Shuffling takes no memory: the permutation of an epoch is a cipher on 0 … n-1 (a Feistel network over the smallest even
number of bits that holds n, walked until it lands below n: Black and Rogaway, "Ciphers with arbitrary finite domains",
CT-RSA 2002), so each worker computes the indices of its own shards and all agree.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from elasticps.errors import InputError

MAX_SHARDS = (1 << 32) - 2
MAX_SAMPLES = 1 << 62
GROUP_BITS = 16  # of the id of a set: the range whose log has it


class ShardSpec(NamedTuple):
    """How samples are cut: `size` per shard, the last of an epoch may have fewer. seed: None for no shuffling."""

    samples: int
    size: int
    epochs: int
    seed: int | None

    @property
    def per_epoch(self) -> int:
        return -(-self.samples // self.size)

    @property
    def total(self) -> int:
        return self.per_epoch * self.epochs

    @property
    def possible(self) -> bool:
        """Whether there can be such shards."""
        numbers = self.samples, self.size, self.epochs
        return (
            min(numbers) > 0 and max(numbers) <= MAX_SAMPLES and 0 <= (self.seed or 0) < 1 << 64
            and self.total <= MAX_SHARDS
        )  # fmt: skip


def checked_spec(samples: object, size: object, epochs: object, seed: object) -> ShardSpec:
    """The arguments of `Client.shards`, checked."""
    for what, value in (("num_samples", samples), ("shard_size", size), ("epochs", epochs)):
        if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 1:
            raise InputError(f"{what} must be a whole number above 0, got {value!r}")
        if value > MAX_SAMPLES:
            raise InputError(f"{what} must be at most 2^62, got {value!r}")
    whole = isinstance(seed, int | np.integer) and not isinstance(seed, bool)
    if seed is not None and not (whole and 0 <= seed < 1 << 64):  # type: ignore[operator]
        raise InputError(f"shuffle_seed must be None or a whole number from 0 to 2^64 - 1, got {seed!r}")
    spec = ShardSpec(int(samples), int(size), int(epochs), None if seed is None else int(seed))  # type: ignore[call-overload]
    if not spec.possible:
        raise InputError(f"{spec.total} shards are too many: the limit is 2^32 - 2; take larger ones")
    return spec


def permuted(positions: NDArray[np.int64], samples: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Which sample stands at each of `positions`, int64 [n], in the shuffled order of an epoch."""
    bits = max(1, ((samples - 1).bit_length() + 1) // 2)
    half, mask = np.uint64(bits), np.uint64((1 << bits) - 1)
    keys = np.random.SeedSequence([seed, epoch]).generate_state(6, np.uint64).astype(np.uint64)
    out = positions.astype(np.uint64)
    walking = np.arange(len(out))
    while len(walking):
        left, right = out[walking] >> half, out[walking] & mask
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        out[walking] = left << half | right
        walking = walking[out[walking] >= samples]
    return out.astype(np.int64)


def _mix(z: Any) -> Any:
    """SplitMix64's finaliser, as in `elasticps.kernels.hashing`: uint64 [n] -> uint64 [n]."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
