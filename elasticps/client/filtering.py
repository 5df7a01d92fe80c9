"""A worker's side of a table's filters: gradients made short, and what that drops kept for the next ones."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from elasticps.client.push_batch import PushSource
from elasticps.errors import ServerFull
from elasticps.kernels import njit
from elasticps.kernels.hashing import mix64
from elasticps.model.filters import Keys
from elasticps.model.spec import TableSpec
from elasticps.store.codec import Codec

MEMORY_BYTES = 64 << 20
"""Of a sparse table's rows, for feedback. Memory is taken as rows come."""
WAYS = 4  # places that a key may take


kernel = njit(nogil=True, cache=True)


class Feedback(NamedTuple):
    """Of what filters dropped: rows kept now, and how many were given up for others since the table was opened."""

    rows: int
    lost: int


class GradientScreen(Protocol):
    """What leaves floats of gradients out because of the weights that they are for (`elasticps.client.kkt_filter`)."""

    @property
    def feedback(self) -> bool:
        """Whether what it leaves out is kept."""

    def screen(self, keys: NDArray[np.int64], grads: NDArray[np.float32]) -> NDArray[np.float32]:
        """What is left of gradients [n, dim] of keys [n], each once."""

    def sent(self) -> None:
        """That is outstanding."""

    def forget(self, keys: NDArray[np.int64] | None) -> None:
        """Weights of `keys`, or all, are being changed by others than pushes."""


class Sent(Protocol):
    """A step that is outstanding, or was."""

    @property
    def done(self) -> bool:
        """Whether it is committed, and what was refused of it is known. Under BSP it may be pushed again after that,
        but not any more when the next one is made."""

    def refused_of(self, table: int, why: type[Exception] = Exception) -> NDArray[np.int64]:
        """Keys of a table's rows that were refused in any part of the step, with an error of a kind."""


class _Undo(NamedTuple):
    """What is put back if rows of a push are refused: rows [n, dim] to be added to what is kept for keys [n]. Then all
    that earlier pushes had left is kept again, and nothing of this push is: its caller still has that. not_finite: keys
    of rows that servers refuse for certain; these took nothing of what was kept."""

    step: Sent
    keys: NDArray[np.int64]
    rows: NDArray[np.float32]
    not_finite: NDArray[np.int64]


class PushFilter:
    """What one client pushes to a table with filters. keys int64 [n], gradients float32 [n, dim] -> distinct keys, and
    words [n, words]. What is sent again is sent as it was, so this runs once for each gradient."""

    def __init__(
        self, spec: TableSpec, screen: GradientScreen | None = None, *, table: int = 0, in_rounds: bool = False
    ) -> None:  # fmt: skip
        self._screen = screen
        self._table = table
        self._finite = spec.finite
        # Blocks of a tensor are there: only the share of a round can be refused for want of memory.
        self._undoes = in_rounds or spec.shape is None
        self._undo: _Undo | None = None  # of what has not left yet
        self._sent: list[_Undo] = []
        self._shape = (spec.blocks, spec.dim) if spec.shape is not None else None
        self.codec = Codec(spec.push, spec.dim)
        self.codec.decode(self.codec.encode(np.zeros((1, spec.dim), np.float32)))  # no step waits for a compiler
        self._rest: tuple[NDArray[np.int64], NDArray[np.float32]] | None = None  # of what has not left yet
        self._in_order = self._shape is None and any(isinstance(each, Keys) for each in spec.push)
        self._residual: RowMemory | BlockMemory | None = None
        if self.codec.feedback or (screen is not None and screen.feedback):
            self._residual = (
                BlockMemory(self._shape) if self._shape else RowMemory(MEMORY_BYTES // (4 * spec.dim + 8), spec.dim)
            )

    @property
    def feedback(self) -> Feedback:
        """What is kept."""
        return Feedback(0, 0) if self._residual is None else Feedback(self._residual.rows, self._residual.lost)

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
        screen = self._screen
        if self._residual is None and screen is None and not self.codec.sifts:
            return keys, self.codec.encode(grads)
        self._put_back()
        before = None if self._residual is None else self._residual.add(keys, np.zeros_like(grads))
        whole = grads if before is None else grads + before
        left = whole if screen is None else screen.screen(keys, whole)
        coded = self.codec.encode(left)
        arrives = self.codec.decode(coded)
        sent: NDArray[np.bool_] = np.ones(len(keys), np.bool_)
        if screen is not None or self.codec.sifts:
            sent = np.asarray(arrives.any(axis=1))
        if before is not None:
            with np.errstate(invalid="ignore"):  # of what is infinite
                rest = left - arrives if self.codec.feedback else np.zeros_like(whole)
                if screen is not None and screen.feedback:
                    rest += whole - left
            self._note(keys, before, rest, arrives, sent)
        return (keys, coded) if sent.all() else (keys[sent], coded[sent])

    def _note(
        self, keys: NDArray[np.int64], before: NDArray[np.float32], rest: NDArray[np.float32],
        arrives: NDArray[np.float32], sent: NDArray[np.bool_],
    ) -> None:  # fmt: skip
        """What is kept once this has left: float32 [n, dim] each. A gradient that is not finite adds nothing to what is
        kept, and takes nothing of it: where its row arrives so, no server can use anything of the row."""
        lost = ~np.isfinite(rest)
        not_finite = ~np.isfinite(arrives).all(axis=1)
        lost[not_finite] = True
        rest[lost] = before[lost]
        self._rest = keys, rest
        if self._undoes:
            before -= rest
            spoilt = keys[not_finite] if self._finite else _NO_KEYS
            if not sent.all():
                keys, before = keys[sent], before[sent]
            self._undo = _Undo(_NO_STEP, keys, before, spoilt)

    def _put_back(self) -> None:
        """Of steps that are done: what went with rows that were refused is kept again."""
        if self._residual is None or not self._sent:
            return
        parts: dict[Sent, list[_Undo]] = {}
        for undo in self._sent:
            parts.setdefault(undo.step, []).append(undo)
        self._sent = []
        for step, undoes in parts.items():
            if not step.done:
                self._sent += undoes
            elif len(refused := self._refused_of(step, undoes)):
                for undo in undoes:
                    some = np.isin(undo.keys, refused)
                    keys = undo.keys[some]
                    self._residual.keep(keys, self._residual.add(keys, undo.rows[some]))

    def _refused_of(self, step: Sent, undoes: list[_Undo]) -> NDArray[np.int64]:
        """Keys whose finite rows were refused, in all parts of a step that have them. Servers do not say in which part
        a row was refused. Where one part's row was not finite, that row was, and those of other parts were not, unless
        servers had no memory for them."""
        refused = step.refused_of(self._table)
        spoilt = np.isin(refused, np.concatenate([undo.not_finite for undo in undoes]))
        if not spoilt.any():
            return refused
        return np.union1d(refused[~spoilt], step.refused_of(self._table, ServerFull))

    def forget(self, keys: NDArray[np.int64] | None) -> None:
        """Forgets what is kept for keys, int64 [n], or for all, also what would be put back; but not what is pushed."""
        self._put_back()
        if self._residual is not None:
            self._residual.forget(keys)
        for undo in self._sent:
            undo.rows[slice(None) if keys is None else np.isin(undo.keys, keys)] = 0.0
        if self._screen is not None:
            self._screen.forget(keys)

    def source(
        self, table: int, salt: int, keys: NDArray[np.int64], grads: NDArray[np.float32], values: NDArray[np.float32]
    ) -> PushSource:
        """What pushing gradients sends; of a tensor all of it, flat, whose keys are its blocks."""
        if self._shape is not None:
            blocks = np.zeros(self._shape, np.float32)
            blocks.reshape(-1)[: grads.size] = grads
            grads = blocks
        keys, coded = self.encode(keys, grads)
        return PushSource(table, salt, coded.shape[1], -1, keys, coded, values)

    def sent(self, step: Sent) -> None:
        """What was encoded last is outstanding, as a part of a step: what that dropped is kept. Otherwise it has not
        been sent."""
        if self._residual is not None and self._rest is not None:
            self._residual.keep(*self._rest)
            self._rest = None
            if self._undo is not None:
                self._sent.append(self._undo._replace(step=step))
                self._undo = None
        if self._screen is not None:
            self._screen.sent()


class _NoStep:
    """Of what has not left."""

    done = False

    def refused_of(self, table: int, why: type[Exception] = Exception) -> NDArray[np.int64]:
        raise AssertionError("what was never sent was refused")


_NO_STEP = _NoStep()
_NO_KEYS = np.empty(0, np.int64)


def summed(keys: NDArray[np.int64], grads: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    distinct, first, where = np.unique(keys, return_index=True, return_inverse=True)
    if len(distinct) == len(keys):
        return keys, grads
    total, repeats = grads[first], np.ones(len(keys), np.bool_)
    repeats[first] = False
    np.add.at(total, where[repeats], grads[repeats])
    return distinct, total


class BlockMemory:
    """Of a tensor: all its blocks."""

    lost = 0

    def __init__(self, shape: tuple[int, int]) -> None:
        self.rows = shape[0]
        self._rows = np.zeros(shape, np.float32)

    def add(self, keys: NDArray[np.int64], rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """As `RowMemory.add`."""
        total: NDArray[np.float32] = rows + self._rows[keys]
        return total

    def keep(self, keys: NDArray[np.int64], rows: NDArray[np.float32]) -> None:
        """As `RowMemory.keep`."""
        self._rows[keys] = rows

    def forget(self, keys: NDArray[np.int64] | None) -> None:
        """As `RowMemory.forget`."""
        self._rows[slice(None) if keys is None else keys] = 0.0


class RowMemory:
    """Rows of `dim` floats by key, no more than `most`: a hash table in which a key has WAYS places, and takes
    another's when all are taken."""

    def __init__(self, most: int, dim: int) -> None:
        size = 1 << max(most.bit_length() - 1, WAYS.bit_length() - 1)
        self._keys, self._used = np.zeros(size, np.int64), np.zeros(size, np.bool_)
        self._rows = np.zeros((size, dim), np.float32)
        self._counts = np.zeros(2, np.int64)  # rows, lost
        none = np.empty(0, np.int64)  # no step waits for a compiler
        self.keep(none, self.add(none, self._rows[:0]))
        self.forget(none)

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

    def forget(self, keys: NDArray[np.int64] | None) -> None:
        """Keeps nothing for keys [n], or for none."""
        if keys is None:
            self._used[:] = False
            self._counts[0] = 0
        else:
            _forget(keys, self._keys, self._used, self._counts)


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
def _add(keys, rows, stored_keys, used, stored):  # type: ignore[no-untyped-def]
    for i in range(keys.shape[0]):
        at = _place(keys[i], stored_keys, used)
        if used[at] and stored_keys[at] == keys[i]:
            for j in range(rows.shape[1]):
                rows[i, j] += stored[at, j]


@kernel
def _keep(keys, rows, stored_keys, used, stored, counts):  # type: ignore[no-untyped-def]
    for i in range(keys.shape[0]):
        at = _place(keys[i], stored_keys, used)
        if not used[at]:
            used[at] = True
            counts[0] += 1
        elif stored_keys[at] != keys[i]:
            counts[1] += 1
        stored_keys[at] = keys[i]
        for j in range(rows.shape[1]):
            stored[at, j] = rows[i, j]


@kernel
def _forget(keys, stored_keys, used, counts):  # type: ignore[no-untyped-def]
    for i in range(keys.shape[0]):
        at = _place(keys[i], stored_keys, used)
        if used[at] and stored_keys[at] == keys[i]:
            used[at] = False
            counts[0] -= 1
