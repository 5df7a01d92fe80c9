"""Which range moves where: servers that drain are emptied, new servers get their share, loads stay even. Pure.

A move joins a server at the tail of a range's chain and takes another replica out of the chain. A chain is ordered by
age and never reordered: so the replica that leaves decides which one heads the range, and the new one is its tail.

Every state has a cost: replicas on draining servers, then zones that hold a range twice, then loads outside their
bounds, then distances from fair shares. A move is made only if it lowers the cost by a good deal, and each is the best
one left. So moves come to an end, differences of a range or two move nothing, and no range moves to a newcomer twice.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coordinator.core.draft import Draft, Flags, Pair
from coordinator.core.repair import Capacity, Limits
from coordinator.core.ring import SPREAD, Node
from coordinator.core.share import Band, Counts, Floats, held_shares
from replication.chain import Member

_DRAINING = 1000.0  # cost of a replica on a draining server
_SAME_ZONE = 100.0  # of a replica in a zone that has the range already
_OUTSIDE = 10.0  # of a range outside the bounds of a load
_WORTH = 1.1  # what a move has to gain; less while a load is above its bounds, which may take several moves to mend
_WORTH_LESS = 0.6
_WORTH_FRESH = 0.2  # where nothing is copied
_NEW_PAIR, _PAIR_TOO_MANY = 0.1, 0.5  # against a successor that a server does not have yet
_NOISE = 0.02  # equal moves are told apart by hashes, so that ranges that move are spread, and the same each time
_EQUAL = 2.0  # targets that gain about as much as the neediest
_ANY: Mapping[Member, Capacity] = {}
_TARGETS = 6  # servers that are compared at once, of all zones together; at least two of each

_Rows = NDArray[np.int32]


class Move(NamedTuple):
    """Range `r` gets `target`; `leaver` gives it up. Indices of members."""

    r: int
    target: int
    leaver: int


def start_moves(
    draft: Draft,
    sites: Mapping[Member, Node],
    draining: Collection[Member],
    limits: Limits,
    cut: Collection[Pair] = (),
    *,
    even: bool = True,
    capacity: Mapping[Member, Capacity] = _ANY,
    rows: Flags | None = None,
) -> list[Move]:
    """Starts the fillings of moves, as many as limits allow, and returns them.

    sites     the live servers that may hold ranges
    draining  live servers whose ranges go to those
    even      False: only ranges of draining servers move
    capacity  for how many more ranges servers have memory; a server that is not in it has no limit
    rows      bool [ranges]: the ranges that may move, by default all

    A tail fills one server at a time: it sends each operation once more for every server that it fills.
    """
    room = limits.fills - int(np.count_nonzero(draft.filling))
    if room <= 0 or not sites or (rows is not None and not rows.any()):
        return []
    field = _Field(draft.settled(draining), draft, sites, draining, cut)
    n = len(draft.members)
    tails, filling = draft.tails, draft.filling
    into = np.bincount(draft.joining[filling], minlength=n)
    out_of = np.bincount(tails[filling], minlength=n)
    fills = np.full(n, -1, np.int32)  # the server that each tail fills
    fills[tails[filling]] = draft.joining[filling]
    live = field.able | field.draining
    movable = ~filling & live[tails] & (draft.lengths == draft.replicas)
    if rows is not None:
        movable &= rows
    if not even:
        movable &= field.draining[field.chains].any(axis=1)
    most = np.array([capacity[m].moves if m in capacity else len(tails) for m in draft.members])
    moves: list[Move] = []
    while len(moves) < room:
        startable, full = out_of[tails] < limits.per_server, into >= limits.per_server
        move = field.best(movable, startable, fills[tails], full, into < most)
        if move is None:
            break
        draft.fill(move.r, move.target, move.leaver)
        movable[move.r] = False
        into[move.target] += 1
        out_of[tails[move.r]] += 1
        fills[tails[move.r]] = move.target
        field.apply(move)
        moves.append(move)
    return moves


def even_out(chains: _Rows, members: tuple[Member, ...], nodes: Mapping[Member, Node]) -> _Rows:
    """Evens out chains that hold no data yet, by the same rules, until no move is worth it."""
    draft = Draft.fresh(chains, members)
    field = _Field(draft.settled(()), draft, nodes, (), (), _WORTH_FRESH)
    movable = draft.lengths == draft.replicas
    anyone, nobody = np.full(len(chains), -1, np.int32), np.zeros(len(members), np.bool_)
    while (move := field.best(movable, movable, anyone, nobody, ~nobody)) is not None:
        field.apply(move)
    return field.chains


def missing(draft: Draft, sites: Mapping[Member, Node], draining: Collection[Member]) -> Counts:
    """Returns about how many ranges each member lacks, not counting fillings under way: int64 [members]. Balancing
    stops somewhere between the lower bound and the share, so this measures up to the middle of the two."""
    field = _Field(draft.chains, draft, sites, draining, ())
    less: Counts = np.maximum(0, np.rint((field.held.share + field.held.low) / 2) - field.holds).astype(np.int64)
    return less


class _Field:
    """The state that moves start from, as if every filling under way were done. Arrays are over the draft's members.

    chains, replicas  int32 [P, R]: the members of each chain; and R
    able, draining    bool: the members that may get ranges; those that give them away
    holds, heads, tails, _pairs  how many ranges each member has, heads, ends; how many each pair shares
    held, _headed, _tailed       the bands in which these numbers may lie
    _zone, _zoned, _zones, _zone_shared  each member's zone; whether there are zones, how many; whether a replica
                                 shares its zone with another one of its chain
    _cut, _salt       pairs that do not reach each other; a hash of each name, which breaks ties
    _at_least, _worth what a move must improve; at first, and after the moves so far
    """

    def __init__(
        self,
        chains: _Rows,
        draft: Draft,
        sites: Mapping[Member, Node],
        draining: Collection[Member],
        cut: Collection[Pair],
        worth: float | None = None,
    ) -> None:
        members, n = draft.members, len(draft.members)
        self.chains = chains
        self.replicas = chains.shape[1]
        self.able = np.array([m in sites for m in members], np.bool_)
        self.draining = np.array([m in draining for m in members], np.bool_)
        self._cut = draft.pairs(cut)[:-1, :-1] if cut else None
        self._salt = np.array([_hash(m.name) for m in members], np.uint64)
        zones: dict[str, int] = {}
        zone = [sites[m].zone if m in sites else "" for m in members]
        self._zone = np.array([zones.setdefault(z, len(zones)) if z else -1 - i for i, z in enumerate(zone)])
        self._zoned, self._zones = bool(zones), max(1, len(zones))
        self._zone_shared = self._same_zone(chains) if zones else np.zeros(chains.shape, np.bool_)
        self._at_least = self._worth = _WORTH if worth is None else worth
        self.holds, self.heads, self.tails = _loads(chains, n)
        self._pairs = _pairs(chains, n)
        self._bands(draft, sites)

    def _bands(self, draft: Draft, sites: Mapping[Member, Node]) -> None:
        at = np.flatnonzero(self.able)
        live = self.able | self.draining
        ranges, replicas = self.chains.shape
        nodes = tuple(sites[draft.members[i]] for i in at)
        share = np.zeros(len(live))
        share[at] = held_shares(nodes, ranges, min(replicas, len(nodes)), int(self.holds[live].sum()))
        one = share * float(self.heads[live].sum()) / max(1.0, float(share.sum()))
        low = min(0.9, 0.5 + 0.54 / replicas)
        self.held = Band.around(share, low, 1.14, _OUTSIDE, 1.0)
        # A newcomer is the tail of all that it gets. To head a range it needs every other replica replaced after it:
        # R copies for one head. So heads and tails are evened out less than replicas, which keeps moves few.
        self._headed = Band.around(one, 0.5, 1.15, _OUTSIDE, 1.0 if replicas > 1 else 0.0)
        self._tailed = Band.around(one, 0.0, 1.3, _OUTSIDE / 3, 0.5 if replicas > 1 else 0.0)

    def apply(self, move: Move) -> None:
        """Makes a move: changes the range's chain and all counts."""
        row = self.chains[move.r]
        self._count(row, -1)
        staying = row[row != move.leaver]
        self.chains[move.r] = np.append(staying, np.int32(move.target))
        self._count(self.chains[move.r], 1)
        if self._zoned:
            self._zone_shared[move.r] = self._same_zone(self.chains[move.r : move.r + 1])

    def _count(self, row: NDArray[np.int32], sign: int) -> None:
        self.holds[row] += sign
        self.heads[row[0]] += sign
        self.tails[row[-1]] += sign
        self._pairs[row[:-1], row[1:]] += sign

    def best(self, movable: Flags, startable: Flags, only: NDArray[np.int32], full: Flags, roomy: Flags) -> Move | None:
        """Returns the best move that may start now, of a range both movable and startable, to a server that is not
        full.

        only: for each range, the one server that it may go to, or -1. full: servers that are being filled with as many
        ranges as may be; roomy: servers with memory for one more.

        None if no move is worth it, or if a better one has to wait its turn: ranges for the neediest servers are not
        given to others meanwhile.
        """
        gain_in, gain_out = self._gains()
        above = (self.holds > self.held.high) | (self.heads > self._headed.high)
        self._worth = min(self._at_least, _WORTH_LESS) if bool((above & self.able).any()) else self._at_least
        most = (gain_out + _SAME_ZONE * self._zone_shared).max(axis=1)
        order = [int(i) for i in np.argsort(-gain_in, kind="stable") if self.able[i] and roomy[i]]
        while order:
            rows = np.flatnonzero(movable & (most + gain_in[order[0]] >= self._worth))
            free = [i for i in self._neediest(order, gain_in) if not full[i]]
            if rows.size == 0 or not free:
                return None
            move, waits = self._choose(free, rows, startable[rows], only[rows], gain_in, gain_out[rows])
            if move is not None or waits:
                return move
            order = [i for i in order if i not in free]
        return None

    def _neediest(self, order: list[int], gain_in: Floats) -> list[int]:
        """Returns of each zone the servers that gain about as much as its neediest one; so a range always finds the
        zone it should have. order: all servers, by what they gain, most first."""
        first: dict[int, float] = {}
        count: dict[int, int] = {}
        chosen = []
        most = max(2, _TARGETS // self._zones)
        for i in order:
            zone = max(-1, int(self._zone[i]))
            if gain_in[i] >= first.setdefault(zone, gain_in[i]) - _EQUAL and count.get(zone, 0) < most:
                count[zone] = count.get(zone, 0) + 1
                chosen.append(i)
        return chosen

    def _choose(
        self,
        targets: list[int],
        rows: Counts,
        startable: Flags,
        only: NDArray[np.int32],
        gain_in: Floats,
        gain_out: Floats,
    ) -> tuple[Move | None, bool]:
        """Returns the best move to one of the targets, and whether one that is worth it cannot start yet."""
        found: tuple[float, Move] | None = None
        waits = False
        chains = np.ascontiguousarray(self.chains[rows].T)  # numpy is slow along short rows
        base = gain_out.T + _SAME_ZONE * self._zone_shared[rows].T if self._zoned else np.ascontiguousarray(gain_out.T)
        many = np.count_nonzero(self._pairs, axis=1) >= SPREAD
        for target in targets:
            gains = self._scores(target, rows, chains, base, many)
            best = gains.max(axis=0) + gain_in[target]
            worth = best >= self._worth
            may = startable & ((only < 0) | (only == target))
            waits |= bool((worth & ~may).any())
            at = int(np.argmax(np.where(may, best, -np.inf)))
            if worth[at] and may[at] and (found is None or best[at] > found[0]):
                leaver = chains[int(np.argmax(gains[:, at])), at]
                found = float(best[at]), Move(int(rows[at]), target, int(leaver))
        return (None if found is None else found[1]), waits

    def _gains(self) -> tuple[Floats, Floats]:
        """Returns by how much the cost falls when a server joins a range [members], and when one leaves it [ranges,
        replicas]."""
        more = [b.cost(q) - b.cost(q + 1) for b, q in self._kinds()]
        less = [b.cost(q) - b.cost(q - 1) for b, q in self._kinds()]
        for gains in (more, less):
            for gain in gains:
                gain[~self.able] = 0.0
        less[0][self.draining] = _DRAINING
        chains = self.chains
        gain_out = less[0][chains]
        if self.replicas == 1:
            return more[0], gain_out
        gain_out += less[2][chains[:, -1:]]
        gain_out[:, 0] += less[1][chains[:, 0]] + more[1][chains[:, 1]]
        return more[0] + more[2], gain_out

    def _kinds(self) -> tuple[tuple[Band, Counts], ...]:
        return (self.held, self.holds), (self._headed, self.heads), (self._tailed, self.tails)

    def _scores(self, target: int, rows: Counts, chains: _Rows, base: Floats, many: Flags) -> Floats:
        """Returns the gain of each replaced replica, [replicas, rows]: its `base`, less the cost of `target` in its
        place; minus infinity where `target` cannot take it. many: members that have many successors already."""
        scores = base - _noise(rows, self._salt[target])
        here = chains == target
        scores[:, here.any(axis=0)] = -np.inf
        if self.replicas > 1:
            new = np.where(self._pairs[:, target] == 0, np.where(many, _NEW_PAIR + _PAIR_TOO_MANY, _NEW_PAIR), 0.0)
            scores[:-1] -= new[chains[-1]]  # it will follow the tail, or if the tail leaves, the one before
            scores[-1] -= new[chains[-2]]
        if self._zoned:
            same = self._zone[chains] == self._zone[target]
            scores -= _SAME_ZONE * (same.sum(axis=0) - same > 0)
        if self._cut is not None:
            scores[:, self._cut[chains[-1], target]] = -np.inf  # the tail is to fill it
            if self.replicas > 1:
                scores[-1, self._cut[chains[-2], target]] = -np.inf
        return scores

    def _same_zone(self, chains: _Rows) -> Flags:
        """bool [ranges, replicas]: whether another replica of the range is in the same zone."""
        zones = self._zone[chains]
        shared: Flags = (zones[:, :, None] == zones[:, None, :]).sum(axis=2) > 1
        return shared


def _loads(chains: _Rows, n: int) -> tuple[Counts, Counts, Counts]:
    """Counts the ranges that each member holds, heads and ends."""
    lengths = np.count_nonzero(chains >= 0, axis=1)
    last = chains[np.arange(len(chains)), np.maximum(lengths, 1) - 1]
    held, heads, tails = (np.bincount(x.ravel() + 1, minlength=n + 1)[1:] for x in (chains, chains[:, 0], last))
    return held, heads, tails


def _pairs(chains: _Rows, n: int) -> Counts:
    """int64 [n, n]: the number of ranges in which the second member stands right behind the first."""
    first, second = chains[:, :-1].ravel().astype(np.int64), chains[:, 1:].ravel()
    there = (first >= 0) & (second >= 0)
    return np.bincount(first[there] * n + second[there], minlength=n * n).reshape(n, n)


@lru_cache(maxsize=1 << 13)
def _hash(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")


def _noise(rows: Counts, salt: np.uint64) -> Floats:
    """Returns a number from 0 to _NOISE for each range and a server (the finalizer of splitmix64)."""
    x = rows.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) ^ salt
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    noise: Floats = (x >> np.uint64(11)).astype(np.float64) * (_NOISE / (1 << 53))
    return noise
