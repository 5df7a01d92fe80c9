"""Maps a key to its range: a 64-bit hash per (table, key), whose top bits are the range.

The mixer is the finaliser of SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators",
OOPSLA 2014): a bijection, so two keys of one table never share a hash. The table id salts it, else block 0 of every
dense tensor would land in one range.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from elasticps.kernels import njit
from elasticps.model.key_share import SHARE_SALT

HASH_END = 1 << 62  # a key's place in a range is the upper 62 bits of its hash, which fit a signed word
_M1 = np.uint64(0xBF58476D1CE4E5B9)
_M2 = np.uint64(0x94D049BB133111EB)
_SHARE_SALT, _S32 = np.uint64(SHARE_SALT), np.uint64(32)
_S30, _S27, _S31 = np.uint64(30), np.uint64(27), np.uint64(31)
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


@njit(nogil=True, cache=True, forceinline=True)
def mix64(z: np.uint64) -> np.uint64:
    """SplitMix64's finaliser: a bijection of uint64."""
    z = (z ^ (z >> _S30)) * _M1
    z = (z ^ (z >> _S27)) * _M2
    return z ^ (z >> _S31)


@njit(nogil=True, cache=True, forceinline=True)
def hash_key(key: np.int64, salt: np.uint64) -> np.uint64:
    """Hash of one key of the table that `salt` stands for."""
    return mix64(np.uint64(key) ^ salt)


@njit(nogil=True, cache=True, forceinline=True)
def share_index(key: np.int64, shares: int) -> np.int64:
    """Which of so many shares has a key, from 0: `model.key_share.share_of`, compiled."""
    return np.int64(((hash_key(key, _SHARE_SALT) >> _S32) * np.uint64(shares)) >> _S32)


def table_salt(table_id: int) -> np.uint64:
    """The salt of a table: hash of its id, computed with Python integers so that it needs no compiled kernel."""
    z = ((table_id + 1) * _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * int(_M1)) & _MASK
    z = ((z ^ (z >> 27)) * int(_M2)) & _MASK
    return np.uint64(z ^ (z >> 31))


def group_range(app: str, ranges: int) -> int:
    """The range whose log decides about the synchronous rounds of an application."""
    return int.from_bytes(blake2b(app.encode(), digest_size=8).digest(), "little") % ranges


def range_shift(ranges: int) -> int:
    """Right shift that turns a hash into its range, for P = `ranges`, a power of two of at least 2."""
    if ranges < 2 or ranges & (ranges - 1):
        raise ValueError(f"the number of ranges must be a power of two of at least 2, got {ranges}")
    return 64 - (ranges.bit_length() - 1)


@njit(nogil=True, cache=True)
def key_ranges(keys: NDArray[np.int64], salt: np.uint64, shift: int, out: NDArray[np.int32]) -> None:
    """Writes the range of every key: keys int64 [n] -> out int32 [n]."""
    s = np.uint64(shift)
    for i in range(keys.shape[0]):
        out[i] = np.int32(hash_key(keys[i], salt) >> s)
