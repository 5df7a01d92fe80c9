"""What a live table holds, range by range: how many rows, and their keys.

Keys of a range are listed in the order of their hashes, which is the same at every replica: whoever goes on with a
list needs no more than the place where the next part begins, and misses none when servers come, go or die.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from elasticps.client.core.fan_out import Ask, Questions
from elasticps.client.core.routing import Routes
from elasticps.wire.frames import Buffer, Header
from elasticps.wire.headers import KeysHeader, ListKeysHeader
from replication.chain import Member

RANGES_AT_ONCE = 16


def count(ask: Ask, table: int, ranges: int) -> int:
    """Rows of a table."""
    answers = ask(_to_tails(table, dict.fromkeys(range(ranges), 0), 0), f"counting the rows of table {table}")
    return sum(KeysHeader.of(answer.header).rows for answer in answers)


def parts(ask: Ask, table: int, ranges: int, keys: int) -> Iterator[NDArray[np.int64]]:
    """All keys of a table, each once, in arrays of about so many; keys that are new meanwhile may be among them."""
    kept: list[NDArray[np.int64]] = []
    left = list(range(ranges))
    places: dict[int, int] = {}  # of the ranges that are being listed
    while left or places:
        while left and len(places) < RANGES_AT_ONCE:
            places[left.pop(0)] = 0
        for answer in ask(_to_tails(table, places, keys), f"listing the keys of table {table}"):
            said = KeysHeader.of(answer.header)
            kept.append(np.frombuffer(answer.body, np.int64))
            if said.place:
                places[said.range] = said.place
            else:
                del places[said.range]
            if sum(map(len, kept)) >= keys:
                yield np.concatenate(kept)
                kept.clear()
    if any(map(len, kept)):
        yield np.concatenate(kept)


def _to_tails(table: int, places: Mapping[int, int], keys: int) -> Questions:
    places = dict(places)

    def questions(routes: Routes) -> list[tuple[Member, Header, list[Buffer]]]:
        tails = routes.view.tails
        if any(tails[r] < 0 for r in places):  # nobody can say it now
            return []
        return [
            (routes.members[tails[r]], ListKeysHeader(table, r, place, keys, epoch=routes.epoch).header(), [])
            for r, place in places.items()
        ]

    return questions
