"""Questions about all rows of a table, which servers answer range by range: how many there are, their keys, and
functions over them, put together in the order of the ranges, so that the result is the same whoever computed it.

Keys of a range are listed in the order of their hashes, which is the same at every replica: a listing goes on where the
last part ended, and misses none when servers come, go or die.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from elasticps.wire.headers import KeysHeader, ListKeysHeader
from elasticps.wire.reducing import ReducedHeader, ReduceHeader, function_body
from replication.chain import Member

LISTED_AT_ONCE = 16


def count_rows(ask: Ask, table: int, ranges: int) -> int:
    """Rows of a table."""
    answers = ask(_listing(table, dict.fromkeys(range(ranges), 0), 0), f"counting the rows of table {table}")
    return sum(KeysHeader.of(answer.header).rows for answer in answers)


def list_keys(ask: Ask, table: int, ranges: int, keys: int) -> Iterator[NDArray[np.int64]]:
    """All keys of a table, each once, in arrays of about so many; keys that are new meanwhile may be among them."""
    found: list[NDArray[np.int64]] = []
    left = list(range(ranges))
    begun: dict[int, int] = {}  # where each range's list goes on
    while left or begun:
        while left and len(begun) < LISTED_AT_ONCE:
            begun[left.pop(0)] = 0
        for answer in ask(_listing(table, begun, keys), f"listing the keys of table {table}"):
            answer_header = KeysHeader.of(answer.header)
            found.append(np.frombuffer(answer.body, np.int64))
            if answer_header.place:
                begun[answer_header.range] = answer_header.place
            else:
                del begun[answer_header.range]
            if sum(map(len, found)) >= keys:
                yield np.concatenate(found)
                found.clear()
    if any(map(len, found)):
        yield np.concatenate(found)


def _listing(table: int, begun: Mapping[int, int], keys: int) -> Questions:
    begun = dict(begun)

    def questions(routes: Routes) -> list[tuple[Member, Header, list[Buffer]]]:
        tails = routes.view.tails
        if any(tails[r] < 0 for r in begun):  # nobody can say it now
            return []
        return [
            (routes.members[tails[r]], ListKeysHeader(table, r, place, keys, epoch=routes.epoch).header(), [])
            for r, place in begun.items()
        ]

    return questions


REDUCED_AT_ONCE = 32

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
    for first in range(0, ranges, REDUCED_AT_ONCE):
        some = range(first, min(first + REDUCED_AT_ONCE, ranges))
        parts = {}
        for answer in ask(_reducing(table, some, body), f"reducing table {table} with {name!r}"):
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


def _reducing(table: int, some: Iterable[int], body: bytes) -> Questions:
    def questions(routes: Routes) -> list[tuple[Member, Header, list[Buffer]]]:
        tails = routes.view.tails
        if any(tails[r] < 0 for r in some):  # nobody can say it now
            return []
        return [
            (routes.members[tails[r]], ReduceHeader(table, r, epoch=routes.epoch).header(len(body)), [body])
            for r in some
        ]

    return questions
