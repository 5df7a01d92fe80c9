"""What workers ask a cluster for most: what its servers have sampled while somebody looked, put together."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

SECONDS = 2.0  # for so long servers sample
FRESH_S = 5.0  # what was found so recently is told again, and nobody is asked
SHOWN, TABLES_SHOWN = 10, 16

Answers = Mapping[str, Mapping[str, Any] | None]
Ask = Callable[[float], Awaitable[Answers]]


def together(answers: Answers) -> dict[str, Any]:
    """Of HotResponses by server, None for no answer: the keys of each table, and the ranges, that most was asked of.

    Shares are of all keys that were looked at; a server tells only of its heaviest, so they may be a little too low.
    """
    sampled, ranges = 0, Counter[int]()
    tables: dict[str, tuple[int, Counter[int]]] = {}
    for answer in answers.values():
        if answer is None:
            continue
        sampled += answer["sampled"]
        ranges.update(dict(zip(answer["ranges"], answer["range_counts"], strict=True)))
        for table in answer["tables"]:
            seen, keys = tables.setdefault(table["name"], (0, Counter()))
            keys.update(dict(zip(table["keys"], table["counts"], strict=True)))
            tables[table["name"]] = seen + table["sampled"], keys
    heaviest = sorted(tables.items(), key=lambda item: (-item[1][0], item[0]))[:TABLES_SHOWN]
    return {
        "sampled": sampled,
        "servers": sum(answer is not None for answer in answers.values()),
        "silent": sorted(name for name, answer in answers.items() if answer is None),
        "ranges": _shares(ranges, sampled),
        "tables": [{"name": name, "sampled": seen, "keys": _shares(keys, seen)} for name, (seen, keys) in heaviest],
    }


def _shares(counts: Counter[int], total: int) -> list[tuple[str, float]]:
    """Keys as text: JavaScript's numbers hold no int64."""
    top: Iterable[tuple[int, int]] = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:SHOWN]
    return [(str(key), round(count / max(1, total), 5)) for key, count in top]


class Looks:
    """Servers sample once, however many people look at the same time."""

    def __init__(self, ask: Ask, clock: Callable[[], float]) -> None:
        self._ask = ask
        self._clock = clock
        self._lock = asyncio.Lock()
        self._found: tuple[float, dict[str, Any]] | None = None

    async def look(self) -> dict[str, Any]:
        """What was found last, if that was just now; else what is found in the next seconds."""
        async with self._lock:
            now = self._clock()
            if self._found is None or now - self._found[0] > FRESH_S:
                found = {"seconds": SECONDS, **together(await self._ask(SECONDS))}
                self._found = self._clock(), found
            return self._found[1]
