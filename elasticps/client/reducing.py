"""Functions over all rows of a table or tensor: servers compute what each range gives, and here that is put together,
in the order of the ranges, so that it is the same whoever computed it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, Literal, overload

import numpy as np
from numpy.typing import NDArray

from elasticps.client.core.fan_out import Ask, Questions
from elasticps.client.core.routing import Routes
from elasticps.client.reads import Reads
from elasticps.errors import InputError, SpecError
from elasticps.store.reductions import COUNT, Reduction, reduction
from elasticps.wire.frames import Buffer, Header
from elasticps.wire.reducing import ReducedHeader, ReduceHeader, function_body
from replication.chain import Member

RANGES_AT_ONCE = 32

Floats = NDArray[np.float64]


class Reduced(ABC):
    """What can be reduced: a table, or a tensor."""

    _reads: Reads
    id: int

    @overload
    def reduce(self, how: Literal["count", "nonzero"]) -> int: ...
    @overload
    def reduce(self, how: Literal["sum", "l1", "l2", "linf", "max", "min"]) -> float: ...
    @overload
    def reduce(self, how: str, *constants: float) -> Any: ...
    def reduce(self, how: str, *constants: float) -> Any:
        """What a function makes of all rows, computed by the servers: "count" of rows, or of a tensor's floats; of the
        weights "sum", norms "l1", "l2" and "linf", "max", "min", and how many are not zero, "nonzero". Or that of a
        function of your own (`elasticps.store.register_reduction`): float64 [size], for finite `constants`.

        Rows as they are committed, with this client's own steps so far; a key never pushed has none. Numbers are summed
        in float64, in an order that depends on the rows alone: every replica gives the same bits. Training may go on
        meanwhile; then each row counts as it was at some moment. Without rows "max" is -inf and "min" inf.

        `SpecError` for a name that servers, or this process, do not know; `InputError`, `Timeout`, `UnknownTable`;
        `ServerError` if the function failed.
        """
        name, found = _checked(how, constants)
        if name == COUNT:
            return self._count()
        return _reduce(self._reads.after_own_steps(), self.id, self._reads.routes.view.ranges, name, found)

    @abstractmethod
    def _count(self) -> int:
        """Rows, or floats of a tensor."""


def _checked(name: object, constants: Sequence[object]) -> tuple[str, tuple[float, ...]]:
    """InputError unless this can be asked for; SpecError unless the function is known here."""
    if not isinstance(name, str):
        raise InputError(f"reduce takes a name, such as 'l2', or that of a registered function, got {name!r}")
    found = [_finite(name, each) for each in constants]
    if name != COUNT:
        reduction(name, found)
    elif found:
        raise InputError(f"reduce({COUNT!r}) takes no constants")
    return name, tuple(found)


def _finite(name: str, value: object) -> float:
    if isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool):
        with suppress(OverflowError):
            if math.isfinite(found := float(value)):
                return found
    raise InputError(f"reduce({name!r}): constants are finite numbers, got {value!r:.100}")


def _reduce(ask: Ask, table: int, ranges: int, name: str, constants: Sequence[float]) -> float | Floats:
    """What the function makes of all rows of a table, which was checked."""
    how, body = reduction(name, constants), function_body(name, constants)
    total: Floats | None = None
    for first in range(0, ranges, RANGES_AT_ONCE):
        some = range(first, min(first + RANGES_AT_ONCE, ranges))
        parts = {}
        for answer in ask(_to_tails(table, some, body), f"reducing table {table} with {name!r}"):
            parts[ReducedHeader.of(answer.header).range] = np.frombuffer(answer.body, np.float64).copy()
        for r in some:
            total = _merged(how, name, total, parts[r])
    return how.result(total)


def _merged(how: Reduction, name: str, total: Floats | None, part: Floats) -> Floats | None:
    if not len(part):
        return total
    if len(part) != how.size:
        raise SpecError(
            f"reduction {name!r} has {how.size} numbers here, and {len(part)} at the servers: load one module"
        )
    if total is None:
        return part
    how.merge(total, part)
    return total


def _to_tails(table: int, some: Iterable[int], body: bytes) -> Questions:
    def questions(routes: Routes) -> list[tuple[Member, Header, list[Buffer]]]:
        tails = routes.view.tails
        if any(tails[r] < 0 for r in some):  # nobody can say it now
            return []
        return [
            (routes.members[tails[r]], ReduceHeader(table, r, epoch=routes.epoch).header(len(body)), [body])
            for r in some
        ]

    return questions
