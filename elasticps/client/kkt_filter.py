"""A worker's side of the KKT filter: which weights were zero when it pulled them last, and what of a gradient leaves
them at zero."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from elasticps.client.filtering import BlockMemory, RowMemory
from elasticps.client.runtime import Lock
from elasticps.model.filters import KKT
from elasticps.model.spec import TableSpec

MEMORY_BYTES = 64 << 20
"""Of a sparse table's rows. Memory is taken as rows come; a key that gave way to others is sent whole."""

RECENT = 64  # pushes that are remembered: rows that were asked for before all of them show nothing
Keys = NDArray[np.int64]
Floats = NDArray[np.float32]


class Screened(NamedTuple):
    """Floats of gradients that a `KKT` has seen, zeros not counted, and how many of them it left out."""

    floats: int
    dropped: int


def screen_of(spec: TableSpec, lock: Callable[[], Lock]) -> KKTScreen | None:
    """That of a table's KKT filter, None without one."""
    return next((KKTScreen(spec, each, lock()) for each in spec.push if isinstance(each, KKT)), None)


class KKTScreen:
    """Of one table or tensor. `saw` may be told by any thread."""

    def __init__(self, spec: TableSpec, kkt: KKT, lock: Lock) -> None:
        self.feedback = kkt.feedback
        self.counts = Screened(0, 0)
        self._bound = np.float32(kkt.bound(spec.optimizer))
        self._lock = lock
        self._dim = spec.dim
        self._blocks = (0 if spec.shape is None else spec.blocks, spec.dim)
        self._zero: RowMemory | BlockMemory
        if spec.shape is None:
            self._zero = RowMemory(MEMORY_BYTES // (4 * spec.dim + 8), spec.dim)
        else:
            self._zero = BlockMemory(self._blocks)
        self._last: tuple[Keys, Screened] | None = None  # what leaves next, or does not
        self._sends = 0
        self._recent: deque[tuple[int, Keys]] = deque(maxlen=RECENT)  # the keys that each of these has sent

    def noting(self, keys: Keys) -> Callable[[Floats], None]:
        """Who is to be told of the rows of keys [n] that are asked for now: float32 [n, dim]. What this worker has
        pushed when they come is not in them."""
        return partial(self.saw, keys, sends=self._sends)

    def saw(self, keys: Keys, rows: Floats, sends: int | None = None) -> None:
        """Rows float32 [n, dim] of keys [n] have been pulled, behind so many pushes; None: behind all."""
        zero = (rows == 0).astype(np.float32)
        with self._lock:
            since = 0 if sends is None else self._sends - sends
            if since > len(self._recent):
                zero[:] = 0
            for number, sent in self._recent if since else ():
                if number > self._sends - since:
                    zero[np.isin(keys, sent)] = 0
            self._zero.keep(keys, zero)

    def screen(self, keys: Keys, grads: Floats) -> Floats:
        """Gradients [n, dim] of keys [n], each once, without those floats that leave their weight at zero: a copy."""
        with self._lock:
            zero = self._zero.add(keys, np.zeros_like(grads)) != 0
        small = (np.abs(grads) <= self._bound) & zero  # what is not finite is not small
        left = np.where(small, np.float32(0), grads)
        given, remain = int(np.count_nonzero(grads)), int(np.count_nonzero(left))
        sent = left.any(axis=1)
        self._last = keys[sent], Screened(self.counts.floats + given, self.counts.dropped + given - remain)
        return left

    def sent(self) -> None:
        """What was screened last is outstanding: of its rows nobody knows the weights before they are pulled again."""
        if self._last is not None:
            keys, self.counts = self._last
            self._last = None
            with self._lock:
                self._zero.keep(keys, np.zeros((len(keys), self._dim), np.float32))
                self._sends += 1
                self._recent.append((self._sends, keys))

    def forget(self, keys: Keys | None) -> None:
        """Weights of `keys`, or all, are being changed past this worker's steps: nobody knows them before they are
        pulled again."""
        with self._lock:
            self._zero.forget(keys)
            if keys is None:
                self._sends += RECENT + 1  # so that no pull under way shows anything
            else:
                self._sends += 1
                self._recent.append((self._sends, keys))

    def noting_tensor(self) -> Callable[[Floats], None]:
        """As `noting`, of a whole tensor."""
        return partial(self.saw_tensor, sends=self._sends)

    def saw_tensor(self, values: Floats, sends: int | None = None) -> None:
        """A whole tensor has been pulled."""
        assert isinstance(self._zero, BlockMemory)
        blocks = np.zeros(self._blocks, np.float32)
        blocks.reshape(-1)[: values.size] = values.reshape(-1)
        self.saw(np.arange(len(blocks)), blocks, sends)
