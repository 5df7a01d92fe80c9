"""Shares of all keys, for fleets of readers that each hold a part of the rows."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from elasticps.errors import ConfigError
from elasticps.model.integer_keys import integer_keys

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
        pair = tuple(given) if isinstance(given, tuple | list) else ()
        return cls._of(pair if all(type(one) is int for one in pair) else (), given)

    @classmethod
    def parse(cls, text: str) -> KeyShare:
        """Of "2/8", or of "" for everything. ConfigError for what is no share."""
        if not text:
            return ALL_KEYS
        parts = text.split("/")
        return cls._of(tuple(int(part[:6]) for part in parts if part.isascii() and part.isdecimal()), text)

    @classmethod
    def _of(cls, pair: tuple[int, ...], given: object) -> KeyShare:
        """Of two numbers. ConfigError, with what was given, for all that are no share."""
        if len(pair) != 2 or not 1 <= pair[0] <= pair[1] <= MOST_SHARES:
            raise ConfigError(
                "a share is written as 2/8, or (2, 8), the second of eight; shares are counted from 1, up to "
                f"{MOST_SHARES} of them, so there is no {given}"
            )
        return cls(*pair)

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
    KeyShare.checked((1, of))
    z = integer_keys(keys).view(np.uint64) ^ np.uint64(SHARE_SALT)
    z = (z ^ (z >> _S30)) * _M1
    z = (z ^ (z >> _S27)) * _M2
    z = z ^ (z >> _S31)
    return (((z >> _S32) * np.uint64(of)) >> _S32).astype(np.int64) + 1
