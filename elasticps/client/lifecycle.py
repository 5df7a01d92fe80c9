"""What a worker asks about the lives of a table's rows: their usage, sweeps, policies."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coordinator.core.capacities import allowances
from elasticps.client.core.fan_out import Answer, Ask, Questions, of_heads
from elasticps.errors import ServerError, SpecError
from elasticps.model.spec import TableSpec
from elasticps.store.usage import USAGE
from elasticps.system import html
from elasticps.wire.frames import (
    HEADER_BYTES,
    MAX_RANGES,
    FrameError,
    Kind,
    json_body,
    json_frame,
    row_counts,
    unpack_header,
    whole,
    wholes,
)

_MOST = 1 << 62
_SWEEPS = 8  # tries while ranges move: servers go on by themselves

ChangePolicies = Callable[[TableSpec], TableSpec]
"""Gives a table's spec with other policies, from the newest that is registered. SpecError if that cannot be."""


@dataclass(frozen=True)
class KeyUsage:
    """The usage of rows, NaN where there is no row: last_use float64 [n], seconds since 1970 of the last push; count
    float32 [n], pushes, fallen to what they were then; score float32 [n], NaN in tables without scores."""

    last_use: NDArray[np.float64]
    count: NDArray[np.float32]
    score: NDArray[np.float32]


class TableState(NamedTuple):
    """What a table's rows are like. rows, candidates: how many there are, and how many keys wait for one. admitted,
    evicted: rows that servers have made and forgotten since they started, the latter by reason. ages, counts: how many
    of some rows were used last 2^i to 2^(i+1) seconds ago, and how many have that count; bin 0 has what is below."""

    rows: int
    candidates: int
    admitted: int
    evicted: Mapping[str, int]
    ages: tuple[int, ...]
    counts: tuple[int, ...]

    def _repr_html_(self) -> str:
        gone = [(f"evicted: {reason}", count) for reason, count in self.evicted.items()]
        first = [("rows", self.rows), ("candidates", self.candidates), ("admitted", self.admitted), *gone]
        numbered = enumerate(zip(self.ages, self.counts, strict=True))
        binned = [(1 << i if i else 0, *both) for i, both in numbered if any(both)]
        heads = ("from", "rows of that age in s", "rows of that count")
        return html.described("TableState", first, html.table(heads, binned))


def usage_of(words: NDArray[np.float32]) -> KeyUsage:
    """What an answer of usage says: words [n, 3], of which the first are whole numbers."""
    numbers = words.view(np.uint32).reshape(-1, USAGE)
    count, score = (np.ascontiguousarray(numbers[:, i]).view(np.float32) for i in (1, 2))
    last_use = np.where(np.isnan(count), np.nan, numbers[:, 0].astype(np.float64))
    return KeyUsage(last_use, count, score)


def need_usage(spec: TableSpec) -> None:
    """SpecError unless rows of the table keep their usage."""
    if not spec.usage:
        raise SpecError(
            f"table {spec.name!r} keeps no usage of its rows: make a table with admission=…, eviction=… or "
            'usage="count", and load the rows into it'
        )


def _question(kind: Kind, table: int, document: dict[str, Any]) -> Questions:
    frame = json_frame(kind, document)
    header = unpack_header(frame)._replace(table=table)
    return of_heads(header, frame[HEADER_BYTES:])


def set_policies(table: int, spec: TableSpec) -> Questions:
    """Puts a table under the policies of its spec, at the heads of all ranges."""
    return _question(Kind.SET_POLICIES, table, {"spec": spec.to_json()})


def sweep(ask: Ask, table: int, name: str, dry_run: bool) -> dict[str, int]:
    """Sweeps a table at all heads, or counts what a sweep would forget: rows by reason.

    Rows go by age and norm first. Then each server gets the number of rows that it keeps of a capacity: that depends
    on how many all of them have.
    """
    what, total = {"what": "dry-run" if dry_run else "sweep"}, Counter[str]()
    for _ in range(_SWEEPS):
        if dry_run:
            total.clear()
        found, moved = _swept(ask, table, name, what, total)
        counts = {_server(one): (whole(one.get("headed"), MAX_RANGES), row_counts(one.get("left"))) for one in found}
        allowed = allowances(counts)
        if not moved and any(allowed.values()):
            heads = {_server(one): one.get("heads") for one in found}
            by_server = {server: [heads[server], *counts] for server, counts in allowed.items()}
            _, moved = _swept(ask, table, name, what | {"allowed": by_server}, total)
        if not moved:
            break
    return dict(total)


def _swept(
    ask: Ask, table: int, name: str, document: dict[str, Any], total: Counter[str]
) -> tuple[list[dict[str, Any]], bool]:
    """Asks all heads for a sweep, and adds up what goes: their answers, and whether ranges have moved meanwhile."""
    found = _documents(ask(_question(Kind.SWEEP, table, document), f"sweeping table {name!r}"))
    for one in found:
        total.update(_counts(one.get("going", {})))
    return found, any(one.get("moved") for one in found)


def _server(document: dict[str, Any]) -> str:
    return str(document.get("server"))


def state(ask: Ask, table: int, name: str) -> TableState:
    """What a table's rows are like, at the heads of all its ranges."""
    found = _documents(ask(_question(Kind.SWEEP, table, {"what": "state"}), f"looking at table {name!r}"))
    evicted: Counter[str] = Counter()
    for document in found:
        evicted.update(_counts(document.get("evicted")))
    rows, candidates, admitted = (sum(whole(one.get(key), _MOST) for one in found) for key in _NUMBERS)
    ages, counts = (
        tuple(np.sum([wholes(one.get(key), _MOST) for one in found], axis=0).tolist()) for key in ("ages", "counts")
    )
    return TableState(rows, candidates, admitted, dict(evicted), ages, counts)


_NUMBERS = ("rows", "candidates", "admitted")


def _documents(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    try:
        return [json_body(answer.body) for answer in answers]
    except FrameError as error:
        raise ServerError(f"a server's answer to a SWEEP cannot be read: {error}") from None


def _counts(found: object) -> dict[str, int]:
    if not isinstance(found, dict):
        raise ServerError(f"a server's answer to a SWEEP has no counts: {json.dumps(found)[:80]}")
    return {str(reason): whole(count, _MOST) for reason, count in found.items()}
