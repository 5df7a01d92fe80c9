"""A worker's side of a table's filters: gradients made short, and what that drops kept for the next ones."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from elasticps.client.push_batch import Source
from elasticps.filters import Keys
from elasticps.hashing import mix64
from elasticps.kernels import njit
from elasticps.spec import TableSpec
from elasticps.store.codec import Codec

KEPT_BYTES = 64 << 20
"""Of a sparse table's rows, for feedback. Memory is taken as rows come."""
WAYS = 4  # places that a key may take


kernel = njit(nogil=True, cache=True)


class Feedback(NamedTuple):
    """Of what filters dropped: rows kept now, and how many were given up for others since the table was opened."""

    rows: int
    lost: int


class Screen(Protocol):
    """What leaves floats of gradients out because of the weights that they are for (`elasticps.client.screening`)."""

    @property
    def feedback(self) -> bool:
        """Whether what it leaves out is kept."""

    def screen(self, keys: NDArray[np.int64], grads: NDArray[np.float32]) -> NDArray[np.float32]:
        """What is left of gradients [n, dim] of keys [n], each once."""

    def sent(self) -> None:
        """That is outstanding."""


class PushFilter:
    """What one client pushes to a table with filters. keys int64 [n], gradients float32 [n, dim] -> distinct keys, and
    words [n, words]. What is sent again is sent as it was, so this runs once for each gradient."""

    def __init__(self, spec: TableSpec, screen: Screen | None = None) -> None:
        self._screen = screen
        self._shape = (spec.blocks, spec.dim) if spec.shape is not None else None
        self.codec = Codec(spec.push, spec.dim)
        self.codec.decode(self.codec.encode(np.zeros((1, spec.dim), np.float32)))  # no step waits for a compiler
        self._rest: tuple[NDArray[np.int64], NDArray[np.float32]] | None = None  # of what has not left yet
        self._in_order = self._shape is None and any(isinstance(each, Keys) for each in spec.push)
        self._kept: Kept | KeptBlocks | None = None
        if self.codec.feedback or (screen is not None and screen.feedback):
            self._kept = KeptBlocks(self._shape) if self._shape else Kept(KEPT_BYTES // (4 * spec.dim + 8), spec.dim)

    @property
    def feedback(self) -> Feedback:
        """What is kept."""
        return Feedback(0, 0) if self._kept is None else Feedback(self._kept.rows, self._kept.lost)

    def encode(
        self, keys: NDArray[np.int64], grads: NDArray[np.float32]
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """What is sent for these gradients, those of equal keys summed; in the order of keys, if these are to be made
        shorter."""
        keys, coded = self._encode(keys, grads)
        if self._in_order:
            order = np.argsort(keys)
            keys, coded = keys[order], coded[order]
        return keys, coded

    def _encode(
        self, keys: NDArray[np.int64], grads: NDArray[np.float32]
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        keys, grads = summed(keys, grads)
        if self._kept is None and self._screen is None and not self.codec.sifts:
            return keys, self.codec.encode(grads)
        whole = grads if self._kept is None else self._kept.add(keys, grads)
        if self._screen is not None:
            return self._screened(keys, whole, self._screen)
        coded = self.codec.encode(whole)
        arrives = self.codec.decode(coded)
        if self._kept is not None:
            whole -= arrives
            whole[~np.isfinite(whole).all(axis=1)] = 0.0
            self._rest = keys, whole
        if self.codec.sifts and not (sent := arrives.any(axis=1)).all():
            return keys[sent], coded[sent]
        return keys, coded

    def _screened(
        self, keys: NDArray[np.int64], whole: NDArray[np.float32], screen: Screen
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        left = screen.screen(keys, whole)
        coded = self.codec.encode(left)
        arrives = self.codec.decode(coded)
        if self._kept is not None:
            rest = np.zeros_like(whole)
            for dropped, keeps in ((whole - left, screen.feedback), (left - arrives, self.codec.feedback)):
                if keeps:
                    rest += dropped
            rest[~np.isfinite(rest).all(axis=1)] = 0.0
            self._rest = keys, rest
        sent = arrives.any(axis=1)
        return keys[sent], coded[sent]

    def source(
        self, table: int, salt: int, keys: NDArray[np.int64], grads: NDArray[np.float32], values: NDArray[np.float32]
    ) -> Source:
        """What pushing gradients sends; of a tensor all of it, flat, whose keys are its blocks."""
        if self._shape is not None:
            blocks = np.zeros(self._shape, np.float32)
            blocks.reshape(-1)[: grads.size] = grads
            grads = blocks
        keys, coded = self.encode(keys, grads)
        return Source(table, salt, coded.shape[1], -1, keys, coded, values)

    def sent(self) -> None:
        """What was encoded last is outstanding: what that dropped is kept. Otherwise it has not been sent."""
        if self._kept is not None and self._rest is not None:
            self._kept.keep(*self._rest)
            self._rest = None
        if self._screen is not None:
            self._screen.sent()


def summed(keys: NDArray[np.int64], grads: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    distinct, first, where = np.unique(keys, return_index=True, return_inverse=True)
    if len(distinct) == len(keys):
        return keys, grads
    total, repeats = grads[first], np.ones(len(keys), np.bool_)
    repeats[first] = False
    np.add.at(total, where[repeats], grads[repeats])
    return distinct, total


class KeptBlocks:
    """Of a tensor: all its blocks."""

    lost = 0

    def __init__(self, shape: tuple[int, int]) -> None:
        self.rows = shape[0]
        self._rows = np.zeros(shape, np.float32)

    def add(self, keys: NDArray[np.int64], rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """As `Kept.add`."""
        total: NDArray[np.float32] = rows + self._rows[keys]
        return total

    def keep(self, keys: NDArray[np.int64], rows: NDArray[np.float32]) -> None:
        """As `Kept.keep`."""
        self._rows[keys] = rows


class Kept:
    """Rows of `dim` floats by key, no more than `most`: a hash table in which a key has WAYS places, and takes
    another's when all are taken."""

    def __init__(self, most: int, dim: int) -> None:
        size = 1 << max(most.bit_length() - 1, WAYS.bit_length() - 1)
        self._keys, self._used = np.zeros(size, np.int64), np.zeros(size, np.bool_)
        self._rows = np.zeros((size, dim), np.float32)
        self._counts = np.zeros(2, np.int64)  # rows, lost
        self.keep(np.empty(0, np.int64), self.add(np.empty(0, np.int64), self._rows[:0]))

    @property
    def rows(self) -> int:
        return int(self._counts[0])

    @property
    def lost(self) -> int:
        return int(self._counts[1])

    def add(self, keys: NDArray[np.int64], rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """rows [n, dim] with what is kept for keys [n]."""
        total = np.array(rows, np.float32, order="C")
        _add(keys, total, self._keys, self._used, self._rows)
        return total

    def keep(self, keys: NDArray[np.int64], rows: NDArray[np.float32]) -> None:
        """Keeps rows [n, dim] for keys [n], instead of what was kept for them."""
        _keep(keys, rows, self._keys, self._used, self._rows, self._counts)


@kernel
def _place(key, keys, used):  # type: ignore[no-untyped-def]
    """The place of a key; else a free one that it may take; else another's."""
    size = keys.shape[0]
    hashed = mix64(np.uint64(key))
    first = np.int64(hashed & np.uint64(size - 1))
    free = np.int64(-1)
    for way in range(WAYS):
        at = first ^ way
        if used[at] and keys[at] == key:
            return at
        if not used[at] and free < 0:
            free = at
    return free if free >= 0 else first ^ np.int64(hashed >> np.uint64(62))


@kernel
def _add(keys, rows, kept_keys, used, kept):  # type: ignore[no-untyped-def]
    for i in range(keys.shape[0]):
        at = _place(keys[i], kept_keys, used)
        if used[at] and kept_keys[at] == keys[i]:
            for j in range(rows.shape[1]):
                rows[i, j] += kept[at, j]


@kernel
def _keep(keys, rows, kept_keys, used, kept, counts):  # type: ignore[no-untyped-def]
    for i in range(keys.shape[0]):
        at = _place(keys[i], kept_keys, used)
        if not used[at]:
            used[at] = True
            counts[0] += 1
        elif kept_keys[at] != keys[i]:
            counts[1] += 1
        kept_keys[at] = keys[i]
        for j in range(rows.shape[1]):
            kept[at, j] = rows[i, j]
