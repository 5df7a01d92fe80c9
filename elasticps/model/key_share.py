"""Shares of all keys, for fleets of readers that each hold a part of the rows."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from elasticps.errors import ConfigError, InputError

MOST_SHARES = 1024
SHARE_SALT = 0x9E3779B97F4A7C15
_S27, _S30, _S31, _S32 = (np.uint64(n) for n in (27, 30, 31, 32))
_M1, _M2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


class KeyShare(NamedTuple):
    """Share `number` of `of`, counted from 1. A key is in the same share in every table; tensors are whole in each."""

    number: int = 1
    of: int = 1

    @classmethod
    def checked(cls, given: object) -> KeyShare:
        """Of a pair (2, 8), or of None for everything. ConfigError for what is no share."""
        if given is None:
            return ALL_KEYS
        whole = isinstance(given, tuple | list) and len(given) == 2 and all(type(one) is int for one in given)
        if whole and isinstance(given, tuple | list) and 1 <= given[0] <= given[1] <= MOST_SHARES:
            return cls(*given)
        raise ConfigError(
            f"a share is a pair such as (2, 8), the second of eight: from (1, 1) to ({MOST_SHARES}, {MOST_SHARES}), "
            f"got {given!r}"
        )

    @classmethod
    def parse(cls, text: str) -> KeyShare:
        """Of "2/8", or of "" for everything. ConfigError for what is no share."""
        number, slash, of = text.partition("/")
        if not text:
            return ALL_KEYS
        if not (slash and number.isascii() and number.isdecimal() and of.isascii() and of.isdecimal()):
            raise ConfigError(f"a share is written as 2/8, the second of eight, got {text!r}")
        share = int(number[:6]), int(of[:6])
        if not 1 <= share[0] <= share[1] <= MOST_SHARES:
            raise ConfigError(
                f"a share is written as 2/8, the second of eight; shares are counted from 1, up to {MOST_SHARES} of "
                f"them, so there is no {share[0]}/{share[1]}"
            )
        return cls(*share)

    @property
    def whole(self) -> bool:
        """Whether it has all keys."""
        return self.of == 1

    @property
    def ordinal(self) -> int:
        """Counted from 0."""
        return self.number - 1

    def includes(self, other: KeyShare) -> bool:
        """Whether it has all keys of another share."""
        return self.whole or self == other

    def for_shape(self, shape: object) -> KeyShare:
        """What of a table or tensor of this shape, None for a table, belongs to it: tensors are whole in each share."""
        return self if shape is None else ALL_KEYS

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"


ALL_KEYS = KeyShare()


def share_of(keys: NDArray[np.int64], of: int) -> NDArray[np.int64]:
    """Which of `of` shares has each of some keys, from 1: int64 [n] -> int64 [n]. So that clients of a fleet of readers
    know whom to ask. ConfigError unless 1 <= of <= 1024, InputError for keys that are no integers."""
    if type(of) is not int or not 1 <= of <= MOST_SHARES:
        raise ConfigError(f"there are 1 to {MOST_SHARES} shares, got {of!r}")
    given = np.asarray(keys)
    if given.size and (given.dtype.kind not in "iu" or given.dtype == np.uint64):
        raise InputError(f"keys must be int64, got {given.dtype}: keys are integers, and may be negative")
    z = np.ascontiguousarray(given, np.int64).view(np.uint64) ^ np.uint64(SHARE_SALT)
    z = (z ^ (z >> _S30)) * _M1
    z = (z ^ (z >> _S27)) * _M2
    z = z ^ (z >> _S31)
    return (((z >> _S32) * np.uint64(of)) >> _S32).astype(np.int64) + 1
