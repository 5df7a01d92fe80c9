"""Synchronous rounds (BSP): the average of all workers' gradients, one optimizer step, the same everywhere.

A worker's share of a round is logged and acknowledged like any push, but retained instead of applied. Once it is
committed in every range, the worker arrives at the head of its application's *group range*. When all have arrived, that
head decides, in the group range's log, that round n is made of the workers S. It announces the decision to the heads of
all ranges, which log that the round closes: there every replica averages the retained shares of the workers in S, in
the order of their ids, and makes one optimizer step. When all heads have, the workers hear that they are in round n. So
all ranges agree on who is in a round, whatever fails in between: the shares of a worker that is not in S are dropped
everywhere. A share is in the ranges that its step has rows for, and counts as zero in all others.

All of this changes by logged operations only, and moves with its ranges.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import nsmallest
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from elasticps.kernels.hashing import HASH_END, group_range
from elasticps.server.core.sweeps import SweptInterval
from elasticps.wire.frames import Block
from replication.chain import Ranges

MAX_REMEMBERED = 1 << 16  # workers whose last round is known
MOST_OPEN = 2  # rounds that a worker has shares in at once: it begins one when it has closed the one before everywhere


class Decoding(Protocol):
    """Decodes gradients that filters have coded."""

    def decode(self, coded: NDArray[np.float32]) -> NDArray[np.float32]:
        """Gradients [n, dim] of words [n, words]."""


class Selecting(Protocol):
    """A table, as rounds need it: selects keys, and decodes pushed gradients."""

    @property
    def push(self) -> Decoding: ...

    def select(self, keys: NDArray[np.int64], bounds: NDArray[np.int64]) -> NDArray[np.int64]:
        """Indices of the keys whose place is below their range's bound; bounds: int64 [ranges]."""


class RoundShare(NamedTuple):
    """A worker's share of a round: its rows in the ranges that are `live`, bool [P]."""

    worker: int
    live: NDArray[np.bool_]
    blocks: list[Block]


@dataclass
class BarrierGroup:
    """What an application's group range knows: members with the round above which each is counted; the last decision;
    for those who have been members, the last round that each was in; the newest roster that any of this was judged by;
    whether clocks may have been released for pulls under bounded delay (`delay_coordinator`).

    A head that knows only an older roster cannot tell who is gone from who is new, and takes nobody for lost.
    """

    members: dict[int, int] = field(default_factory=dict)
    decided: int = 0
    workers: tuple[int, ...] = ()
    last: dict[int, int] = field(default_factory=dict)
    roster: int = 0
    bounded: bool = False

    @property
    def in_rounds(self) -> bool:
        """Whether there are, or have been, synchronous rounds."""
        return bool(self.members or self.decided or self.last)

    def parts(self, most: int) -> Iterator[BarrierGroup]:
        """Splits it into groups of at most `most` members, workers and last rounds each; `extend` joins them again."""
        members, last = list(self.members.items()), list(self.last.items())
        for at in range(0, max(1, len(members), len(self.workers), len(last)), most):
            end = at + most
            yield BarrierGroup(
                dict(members[at:end]), self.decided, self.workers[at:end], dict(last[at:end]), self.roster,
                self.bounded,
            )  # fmt: skip

    def extend(self, part: BarrierGroup) -> None:
        """Joins the next part."""
        self.members.update(part.members)
        self.workers += part.workers
        self.last.update(part.last)


class RoundStep(NamedTuple):
    """BARRIER_JOIN, LEAVE, DECISION or CLOSE: workers become members, by the roster of version `clock`; one is none any
    more; a round is made of `workers`; it closes, and rows are forgotten by `sweeps`. A CLOSE names those workers of
    the round that have a share in the ranges, and how many the round has in all (`total`). A JOIN whose `total` is not
    0 comes before a clock is released for pulls under bounded delay."""

    app: str
    clock: int
    workers: tuple[int, ...]
    sweeps: tuple[SweptInterval, ...] = ()
    total: int = 0


class RangeRounds(NamedTuple):
    """What a piece of a range carries of rounds: closed rounds and groups by application, and retained shares by
    (application, round, worker). more: it goes on where the piece before ended, also in the midst of a group."""

    closed: dict[str, int]
    groups: dict[str, BarrierGroup]
    retained: list[tuple[str, int, int, list[Block]]]
    more: bool = False


class Rounds:
    """The state of all ranges held here. nbytes: what is retained takes."""

    def __init__(self, ranges: int) -> None:
        self.groups: dict[str, BarrierGroup] = {}
        self.nbytes = 0
        self._ranges = ranges
        self._closed: dict[str, NDArray[np.int64]] = {}
        self._retained: dict[tuple[str, int], list[RoundShare]] = {}

    # --- operations -------------------------------------------------------------------------------------------------

    def closed(self, app: str) -> NDArray[np.int64]:
        """The last round of an application that is closed, int64 [P]."""
        if app not in self._closed:
            self._closed[app] = np.zeros(self._ranges, np.int64)
        return self._closed[app]

    def active(self, app: str) -> bool:
        """Whether an application has closed a round in a range that is held here."""
        return app in self._closed and bool(self._closed[app].any())

    def keep(self, app: str, clock: int, worker: int, ranges: Ranges, blocks: list[Block]) -> None:
        """A worker's share of round `clock` in `ranges`; what comes after the round has closed is dropped."""
        live = np.zeros(self._ranges, np.bool_)
        live[ranges] = self.closed(app)[ranges] < clock
        if blocks and live.any():
            self._keep((app, clock), worker, live, blocks)

    def size(self, blocks: list[Block]) -> int:
        """Bytes that it takes to retain blocks."""
        return (
            self._ranges + sum(b.keys.nbytes + b.grads.nbytes + b.step_values.nbytes for b in blocks) if blocks else 0
        )

    def has_too_many_open(self, app: str, clock: int, worker: int, ranges: Ranges) -> bool:
        """Whether a worker has shares in more open rounds of these ranges, all headed here, than a correct client has.
        A range that is being filled may have more: clients do not wait for it to close rounds."""
        others = [shares for (of, number), shares in self._retained.items() if of == app and number != clock]
        if len(others) < MOST_OPEN:
            return False
        mine = (any(s.worker == worker and s.live[ranges].any() for s in shares) for shares in others)
        return sum(mine) >= MOST_OPEN

    def sharing(self, app: str, clock: int) -> set[int]:
        """The workers that have a share of a round which is open in some range held here."""
        return {share.worker for share in self._retained.get((app, clock), ())}

    def enter(self, app: str, roster: int, workers: Iterable[int], *, bounded: bool = False) -> None:
        """Workers, all in the roster of that version, are members from the round after the last decided one on.
        bounded: from now on clocks may be released."""
        group = self.groups.setdefault(app, BarrierGroup())
        group.roster = max(roster, group.roster)
        group.bounded |= bounded
        for worker in workers:
            group.members.setdefault(worker, group.decided)

    def leave(self, app: str, worker: int) -> None:
        """A worker is in no further round, until it enters again."""
        group = self.groups.get(app)
        if group is not None:
            group.members.pop(worker, None)

    def decide(self, app: str, clock: int, workers: Iterable[int]) -> None:
        """Round `clock` is made of `workers`; members that should have been in it and are not have left."""
        group = self.groups.setdefault(app, BarrierGroup())
        if clock != group.decided + 1:
            return
        group.decided, group.workers = clock, tuple(sorted(workers))
        chosen = set(group.workers)
        group.last.update(dict.fromkeys(group.workers, clock))
        last = group.last
        for worker in nsmallest(len(last) - MAX_REMEMBERED, last, key=lambda worker: (last[worker], worker)):
            del last[worker]  # away for the longest
        group.members = {w: above for w, above in group.members.items() if w in chosen or above >= clock}

    def close(
        self, app: str, clock: int, workers: Iterable[int], total: int, ranges: Ranges, tables: Mapping[int, Selecting]
    ) -> list[Block]:
        """Closes a round in `ranges`, where it is still open; the rows to apply, one block per table. workers: those of
        the round that have a share there; total: how many are in it."""
        closed = self.closed(app)
        closing = np.zeros(self._ranges, np.bool_)
        closing[ranges] = closed[ranges] < clock
        closed[ranges] = np.maximum(closed[ranges], clock)
        chosen = set(workers)
        shares = [s for s in self._retained.get((app, clock), ()) if s.worker in chosen]
        shares.sort(key=lambda share: share.worker)  # stable: a worker's parts stay in order
        average = _average([_decoded(_within(s, closing, tables), tables) for s in shares], total)
        self._drop(closing, [key for key in self._retained if key[0] == app and key[1] <= clock])
        return average

    # --- ranges -----------------------------------------------------------------------------------------------------

    def erase(self, ranges: Ranges) -> None:
        """Forgets everything about these ranges."""
        gone = np.zeros(self._ranges, np.bool_)
        gone[ranges] = True
        for closed in self._closed.values():
            closed[ranges] = 0
        for app in [a for a in self.groups if gone[group_range(a, self._ranges)]]:
            del self.groups[app]
        self._drop(gone, list(self._retained))

    def drop(self, table: int, ranges: Ranges | None, tables: Mapping[int, Selecting]) -> None:
        """Forgets what is retained for a table in these ranges, or everywhere."""
        bounds = np.full(self._ranges, 0 if ranges is None else HASH_END, np.int64)
        if ranges is not None:
            bounds[ranges] = 0
        for key, shares in list(self._retained.items()):
            left = [share._replace(blocks=list(_outside(share.blocks, table, bounds, tables))) for share in shares]
            self.nbytes -= sum(self.size(share.blocks) for share in shares)
            self._retained[key] = [share for share in left if share.blocks]
            self.nbytes += sum(self.size(share.blocks) for share in self._retained[key])
            if not self._retained[key]:
                del self._retained[key]

    def dump(self, r: int, low: int, high: int, tables: Mapping[int, Selecting]) -> RangeRounds:
        """What belongs to the keys of range r with places in low..high-1."""
        inside, below = (np.zeros(self._ranges, np.int64) for _ in range(2))
        inside[r], below[r] = high, low
        retained = [
            (app, clock, share.worker, blocks)
            for (app, clock), shares in self._retained.items()
            for share in shares
            if share.live[r] and (blocks := _between(share.blocks, below, inside, tables))
        ]
        closed = {app: int(rounds[r]) for app, rounds in self._closed.items() if rounds[r]}
        return RangeRounds(closed, self.groups_of(r), retained)

    def groups_of(self, r: int) -> dict[str, BarrierGroup]:
        """The groups that belong to range r, by application; not copies."""
        return {app: group for app, group in self.groups.items() if group_range(app, self._ranges) == r}

    def load(self, r: int, piece: RangeRounds) -> None:
        """Takes over what `dump` gave."""
        for app, clock in piece.closed.items():
            self.closed(app)[r] = max(clock, self.closed(app)[r])
        for app, group in piece.groups.items():
            if piece.more and app in self.groups:
                self.groups[app].extend(group)
            else:
                self.groups.setdefault(app, group)
        only = np.zeros(self._ranges, np.bool_)
        only[r] = True
        for app, clock, worker, blocks in piece.retained:
            if blocks and self.closed(app)[r] < clock:
                self._keep((app, clock), worker, only.copy(), blocks)

    def words(self, r: int) -> list[int]:
        """Numbers that replicas of a range must agree on, for digests."""
        return [number for app in sorted(self._closed) for number in (len(app), int(self._closed[app][r]))]

    def closed_in(self, r: int) -> list[tuple[str, int]]:
        """The last closed round of each application that has closed one in range r, by application."""
        return [(app, int(rounds[r])) for app, rounds in sorted(self._closed.items()) if rounds[r]]

    def retained_in(self, r: int, tables: Mapping[int, Selecting]) -> list[tuple[str, int, int]]:
        """(application, round, worker) of which rows are retained in range r."""
        only = np.zeros(self._ranges, np.bool_)
        only[r] = True
        every = ((*key, share) for key, shares in self._retained.items() for share in shares)
        return sorted({(app, clock, share.worker) for app, clock, share in every if _within(share, only, tables)})

    def _keep(self, key: tuple[str, int], worker: int, live: NDArray[np.bool_], blocks: list[Block]) -> None:
        own = [Block(b.table, b.keys.copy(), b.grads.copy(), b.step_values.copy()) for b in blocks]
        self._retained.setdefault(key, []).append(RoundShare(worker, live, own))
        self.nbytes += self.size(own)

    def _drop(self, gone: NDArray[np.bool_], keys: list[tuple[str, int]]) -> None:
        for key in keys:
            for share in self._retained[key]:
                share.live[gone] = False
            left = [share for share in self._retained[key] if share.live.any()]
            self.nbytes -= sum(self.size(share.blocks) for share in self._retained[key] if not share.live.any())
            if left:
                self._retained[key] = left
            else:
                del self._retained[key]


def _decoded(blocks: list[Block], tables: Mapping[int, Selecting]) -> list[Block]:
    return [block._replace(grads=tables[block.table].push.decode(block.grads)) for block in blocks]


def _within(share: RoundShare, ranges: NDArray[np.bool_], tables: Mapping[int, Selecting]) -> list[Block]:
    """A share's rows in those of `ranges`, bool [P], where it is live."""
    bounds = np.where(share.live & ranges, HASH_END, 0).astype(np.int64)
    return _between(share.blocks, np.zeros(len(bounds), np.int64), bounds, tables)


def _between(
    blocks: list[Block], low: NDArray[np.int64], high: NDArray[np.int64], tables: Mapping[int, Selecting]
) -> list[Block]:
    """Rows whose places are from their range's `low` to below its `high`, int64 [P] each."""
    found = []
    for table, keys, grads, values in blocks:
        chosen = tables[table].select(keys, high)
        if low.any():
            chosen = np.setdiff1d(chosen, tables[table].select(keys, low), assume_unique=True)
        if len(chosen):
            found.append(Block(table, keys[chosen], grads[chosen], values))
    return found


def _outside(
    blocks: list[Block], table: int, bounds: NDArray[np.int64], tables: Mapping[int, Selecting]
) -> Iterator[Block]:
    """Blocks with only those of a table's rows whose places are below the bounds of their ranges."""
    for block in blocks:
        if block.table != table:
            yield block
        elif bounds.any() and len(chosen := tables[table].select(block.keys, bounds)):
            yield Block(table, block.keys[chosen], block.grads[chosen], block.step_values)


def _average(shares: list[list[Block]], count: int) -> list[Block]:
    """((g1 + g2) + …) / count per key, in the order of the shares, in float32; a key that a share lacks counts as 0.

    Workers may differ in what else a step carries (their learning rates): for each key the first share that has it
    counts. It must depend on nothing but the key, because replicas hold, and close, different sets of ranges at once.
    """
    by_table: dict[int, list[Block]] = {}
    for blocks in shares:
        for block in blocks:
            by_table.setdefault(block.table, []).append(block)
    averages = []
    for table, blocks in by_table.items():
        keys, place = np.unique(np.concatenate([block.keys for block in blocks]), return_inverse=True)
        total = np.zeros((len(keys), blocks[0].grads.shape[1]), np.float32)
        at = 0
        for block in blocks:
            total[place[at : at + len(block.keys)]] += block.grads  # within a block no key comes twice
            at += len(block.keys)
        total /= np.float32(count)
        averages += [Block(table, keys[of], total[of], values) for of, values in _by_values(blocks, place, len(keys))]
    return averages


def _by_values(
    blocks: list[Block], place: NDArray[np.int64], count: int
) -> list[tuple[slice | NDArray[np.int64], NDArray[np.float32]]]:
    """Which of `count` keys are applied with which step values. place: where each of the blocks' keys stands."""
    distinct = {block.step_values.tobytes(): block.step_values for block in blocks}
    if len(distinct) == 1:
        return [(slice(None), blocks[0].step_values)]
    numbers = {text: number for number, text in enumerate(distinct)}
    chosen = np.empty(count, np.int64)
    at = len(place)
    for block in reversed(blocks):  # so that the first one that has a key writes last
        at -= len(block.keys)
        chosen[place[at : at + len(block.keys)]] = numbers[block.step_values.tobytes()]
    return [(np.flatnonzero(chosen == number), distinct[text]) for text, number in numbers.items()]
