"""Which range moves where: servers that drain are emptied, new servers get their share, loads stay even. Pure.

A move joins a server at the tail of a range's chain and takes another replica out of the chain. A chain is ordered by
age and never reordered: so the replica that leaves decides which one heads the range, and the new one is its tail.

Every state has a cost: replicas on draining servers, then zones that hold a range twice, then loads outside their
bounds, then distances from fair shares. A move is made only if it lowers the cost by a good deal, and each is the best
one left. So moves come to an end, differences of a range or two move nothing, and no range moves to a newcomer twice.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cached_property, lru_cache
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
_ROUNDING = 1e-6  # more than a sum of gains is off by
_GROUPS = 16  # with more zones than this, the bounds of gains do not look at zones
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
        movable &= field.draining[field.chains].any(axis=0)
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
    return np.ascontiguousarray(field.chains.T)


def missing(draft: Draft, sites: Mapping[Member, Node], draining: Collection[Member]) -> Counts:
    """Returns about how many ranges each member lacks, not counting fillings under way: int64 [members]. Balancing
    stops somewhere between the lower bound and the share, so this measures up to the middle of the two."""
    field = _Field(draft.chains, draft, sites, draining, ())
    held = (field.bands.share[0] + field.bands.low[0]) / 2
    less: Counts = np.maximum(0, np.rint(held) - field.loads[0]).astype(np.int64)
    return less


class _Field:
    """The state that moves start from, as if every filling under way were done. Arrays are over the draft's members.

    chains, replicas  int32 [R, P]: the members of each chain, head first; and R
    able, draining    bool: the members that may get ranges; those that give them away
    loads             int64 [3, members]: how many ranges each member holds, heads, ends; bands: where these may lie
    _zone, _zoned, _zones  each member's zone; whether there are zones, how many; _zone_of: a list, -1 for unknown ones
    _cut, _salt       pairs that do not reach each other; a hash of each name, which breaks ties
    _at_least, _worth what a move must improve; at first, and after the moves so far

    What a plan of many moves needs again for each move is kept from one to the next (`_refresh`):

    _more, _less      float64 [3, members]: by how much the cost falls when a load grows by one, or shrinks by one
    _out              float64 [R, P]: by how much the cost falls when a replica leaves its chain; _most [P]: the largest
    _bound            float64 [groups, P]: as `_most`, less the cost of a successor in its place, for a server of that
                      group (by zones: `_group`) that is no successor of the chain's members yet
    _stale            members of the chains that have changed since
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
        self.chains = np.ascontiguousarray(chains.T)  # numpy is slow along short rows
        self.replicas = chains.shape[1]
        self.able = np.array([m in sites for m in members], np.bool_)
        self.draining = np.array([m in draining for m in members], np.bool_)
        self._cut = draft.pairs(cut)[:-1, :-1] if cut else None
        self._salt = np.array([_hash(m.name) for m in members], np.uint64)
        zones: dict[str, int] = {}
        zone = [sites[m].zone if m in sites else "" for m in members]
        self._zone = np.array([zones.setdefault(z, len(zones)) if z else -1 - i for i, z in enumerate(zone)])
        self._zone_of: list[int] = np.maximum(-1, self._zone).tolist()
        self._zoned, self._zones = bool(zones), max(1, len(zones))
        self._at_least = self._worth = _WORTH if worth is None else worth
        self.loads = _loads(chains, n)
        self.bands = self._bands(draft, sites)
        self._more = self._less = np.zeros((0, n))
        groups = len(zones) if len(zones) <= _GROUPS else 0  # and one of servers whose zones are not looked at
        self._group = np.where((self._zone >= 0) & (groups > 0), self._zone, groups)
        self._out, self._most = np.zeros((self.replicas, len(chains))), np.zeros(len(chains))
        self._bound = np.zeros((groups + 1, len(chains)))
        self._stale = np.zeros(n, np.bool_)

    def _bands(self, draft: Draft, sites: Mapping[Member, Node]) -> Band:
        at = np.flatnonzero(self.able)
        live = self.able | self.draining
        replicas, ranges = self.chains.shape
        nodes = tuple(sites[draft.members[i]] for i in at)
        share = np.zeros(len(live))
        share[at] = held_shares(nodes, ranges, min(replicas, len(nodes)), int(self.loads[0, live].sum()))
        one = share * float(self.loads[1, live].sum()) / max(1.0, float(share.sum()))
        low = min(0.9, 0.5 + 0.54 / replicas)
        # A newcomer is the tail of all that it gets. To head a range it needs every other replica replaced after it:
        # R copies for one head. So heads and tails are evened out less than replicas, which keeps moves few.
        return Band.stack(
            Band.around(share, low, 1.14, _OUTSIDE, 1.0),
            Band.around(one, 0.5, 1.15, _OUTSIDE, 1.0 if replicas > 1 else 0.0),
            Band.around(one, 0.0, 1.3, _OUTSIDE / 3, 0.5 if replicas > 1 else 0.0),
        )

    @cached_property
    def _pairs(self) -> NDArray[np.int32]:
        """int32 [members, members]: in how many ranges a member stands right behind another one."""
        return _pairs(self.chains, len(self.able))

    @cached_property
    def _successors(self) -> Counts:
        """int64 [members]: how many different members stand right behind each."""
        successors: Counts = np.count_nonzero(self._pairs, axis=0)
        return successors

    def apply(self, move: Move) -> None:
        """Makes a move: changes the range's chain and all counts."""
        row = self.chains[:, move.r].copy()
        self._count(row, -1)
        self._stale[row] = True
        row = np.append(row[row != move.leaver], np.int32(move.target))
        self._count(row, 1)
        self._stale[row] = True
        self.chains[:, move.r] = row

    def _count(self, row: NDArray[np.int32], sign: int) -> None:
        self.loads[0, row] += sign
        self.loads[1, row[0]] += sign
        self.loads[2, row[-1]] += sign
        if self.replicas > 1:
            pairs, successors = self._pairs, self._successors
            before, after = row[:-1], row[1:]
            pairs[after, before] += sign
            successors[before] += sign * (pairs[after, before] == (sign > 0))

    def best(self, movable: Flags, startable: Flags, only: NDArray[np.int32], full: Flags, roomy: Flags) -> Move | None:
        """Returns the best move that may start now, of a range both movable and startable, to a server that is not
        full.

        only: for each range, the one server that it may go to, or -1. full: servers that are being filled with as many
        ranges as may be; roomy: servers with memory for one more.

        None if no move is worth it, or if a better one has to wait its turn: ranges for the neediest servers are not
        given to others meanwhile.
        """
        gain_in = self._refresh()
        above = (self.loads[:2] > self.bands.high[:2]).any(axis=0)
        self._worth = min(self._at_least, _WORTH_LESS) if bool((above & self.able).any()) else self._at_least
        may_start, late = movable & startable, movable & (~startable | (only >= 0))
        most = float(self._most.max(where=movable, initial=-np.inf))
        by_gain = np.argsort(-gain_in, kind="stable")
        able: Flags = self.able & roomy
        order: list[int] = by_gain[able[by_gain]].tolist()
        while order and most + gain_in[order[0]] >= self._worth:
            near = self._neediest(order, gain_in)
            free = np.array([i for i in near if not full[i]], np.int64)
            if free.size == 0:
                return None
            move = self._choose(free, may_start, only, gain_in[free])
            if move is not None or self._waits(free, late, startable, only, gain_in[free]):
                return move
            tried = set(free.tolist())
            order = [i for i in order if i not in tried]
        return None

    def _neediest(self, order: list[int], gain_in: Floats) -> list[int]:
        """Returns of each zone the servers that gain about as much as its neediest one; so a range always finds the
        zone it should have. order: all servers, by what they gain, most first."""
        most = max(2, _TARGETS // self._zones)
        least: dict[int, float] = {}
        count: dict[int, int] = {}
        chosen, open_zones = [], len(set(self._zone_of))
        for i in order:
            zone, gain = self._zone_of[i], float(gain_in[i])
            if count.get(zone, 0) == most:
                continue
            if gain < least.setdefault(zone, gain - _EQUAL):
                count[zone] = most
            else:
                count[zone] = count.get(zone, 0) + 1
                chosen.append(i)
            open_zones -= count[zone] == most
            if not open_zones:
                break
        return chosen

    def _choose(self, targets: Counts, may_start: Flags, only: NDArray[np.int32], gain_in: Floats) -> Move | None:
        """Returns the best move of a range that may start to one of the targets, None if none is worth it. gain_in: of
        the targets.

        Scores those that may gain most at first, and others only if none of these is better than they can be.
        """
        groups = self._group[targets]
        bound = np.full(len(only), -np.inf)
        for group in set(groups.tolist()):
            np.maximum(bound, self._bound[group] + gain_in[groups == group].max(), out=bound)
        bound[~may_start] = -np.inf
        before = np.zeros(len(self.able), np.bool_)
        if self.replicas > 1:
            before = np.asarray(self._pairs[targets].any(axis=0))
        known, floor = _NEW_PAIR + _PAIR_TOO_MANY, self._worth - _ROUNDING
        low, gain = max(float(bound.max()) - 1.5 * _NOISE, floor), -np.inf
        while True:
            rows = np.flatnonzero(bound >= low - known)
            rows = rows[(bound[rows] >= low) | before[self.chains[-2:].take(rows, axis=1)].any(axis=0)]
            if rows.size:
                scores = self._scores(targets, rows)
                gains = scores.max(axis=1) + gain_in[:, None]
                gains[(only[rows] >= 0) & (only[rows] != targets[:, None])] = -np.inf
                target, at = divmod(int(np.argmax(gains)), len(rows))
                gain = float(gains[target, at])
            if gain > low + _ROUNDING or low <= floor:
                break
            low = max(floor, min(gain, low) - _NOISE)
        if gain < self._worth:
            return None
        leaver = self.chains[int(np.argmax(scores[target, :, at])), rows[at]]
        return Move(int(rows[at]), int(targets[target]), int(leaver))

    def _waits(self, targets: Counts, late: Flags, startable: Flags, only: NDArray[np.int32], gain_in: Floats) -> bool:
        """Whether a move of a `late` range to one of the targets is worth it that cannot start yet."""
        rows = np.flatnonzero(late)
        if rows.size == 0:
            return False
        may = startable[rows] & ((only[rows] < 0) | (only[rows] == targets[:, None]))
        worth = self._scores(targets, rows).max(axis=1) + gain_in[:, None] >= self._worth
        return bool((worth & ~may).any())

    def _refresh(self) -> Floats:
        """Brings what is kept up to date with the loads; returns by how much the cost falls when a server joins a range
        [members]."""
        cost = self.bands.cost(self.loads + np.array([-1, 0, 1]).reshape(3, 1, 1))
        less, more = cost[1] - cost[0], cost[1] - cost[2]
        less[:, ~self.able] = more[:, ~self.able] = 0.0
        less[0, self.draining] = _DRAINING
        if len(self._more):
            self._stale |= ((more != self._more) | (less != self._less)).any(axis=0)
            rows = np.flatnonzero(self._stale[self.chains].any(axis=0))
        else:
            rows = np.arange(self.chains.shape[1])
        self._more, self._less = more, less
        self._stale[:] = False
        chains = self.chains[:, rows]
        out = less[0][chains]
        if self.replicas > 1:
            out += less[2][chains[-1]]
            out[0] += less[1][chains[0]] + more[1][chains[1]]
        zones = self._zone[chains]
        if self._zoned:
            out += _SAME_ZONE * ((zones[:, None] == zones).sum(axis=1) > 1)
        self._out[:, rows], self._most[rows] = out, out.max(axis=0)
        if self.replicas > 1:
            new = np.where(self._successors >= SPREAD, _NEW_PAIR + _PAIR_TOO_MANY, _NEW_PAIR)
            out[:-1] -= new[chains[-1]]
            out[-1] -= new[chains[-2]]
        self._bound[-1, rows] = out.max(axis=0)
        for group in range(len(self._bound) - 1):
            there = zones == group
            self._bound[group, rows] = (out - _SAME_ZONE * (there.sum(axis=0) > there)).max(axis=0)
        gain_in: Floats = more[0] + more[2] if self.replicas > 1 else more[0]
        return gain_in

    def _scores(self, targets: Counts, rows: Counts) -> Floats:
        """Returns the gain of each replaced replica [targets, R, rows]: that of its leaving, less the cost of a target
        in its place; minus infinity where the target cannot take it."""
        chains = self.chains.take(rows, axis=1)
        noise = _noise(rows, self._salt[targets].reshape(-1, 1))
        scores: Floats = self._out.take(rows, axis=1) - noise[:, None]
        impossible = (chains == targets[:, None, None]).any(axis=1)
        if self.replicas > 1:
            scores[:, :-1] -= self._new_pair(chains[-1], targets)[:, None]  # it will follow the tail,
            scores[:, -1] -= self._new_pair(chains[-2], targets)  # or if the tail leaves, the one before
        if self._zoned:
            same = self._zone[chains] == self._zone[targets, None, None]
            scores -= _SAME_ZONE * (same.sum(axis=1)[:, None] - same > 0)
        if self._cut is not None:
            impossible |= self._cut[chains[-1], targets[:, None]]  # the tail is to fill it
            if self.replicas > 1:
                scores[:, -1][self._cut[chains[-2], targets[:, None]]] = -np.inf
        scores.transpose(0, 2, 1)[impossible] = -np.inf
        return scores

    def _new_pair(self, before: NDArray[np.int32], targets: Counts) -> Floats:
        """Returns the cost of each target right behind each of these members [targets, before]."""
        cost = np.where(self._successors[before] >= SPREAD, _NEW_PAIR + _PAIR_TOO_MANY, _NEW_PAIR)
        return np.where(self._pairs[targets[:, None], before] == 0, cost, 0.0)


def _loads(chains: _Rows, n: int) -> Counts:
    """int64 [3, n]: the number of ranges that each member holds, heads and ends."""
    lengths = np.count_nonzero(chains >= 0, axis=1)
    last = chains[np.arange(len(chains)), np.maximum(lengths, 1) - 1]
    return np.stack([np.bincount(x.ravel() + 1, minlength=n + 1)[1:] for x in (chains, chains[:, 0], last)])


def _pairs(chains: _Rows, n: int) -> NDArray[np.int32]:
    """int32 [n, n]: the number of ranges, of chains [R, ranges], in which the first member stands right behind the
    second."""
    first, second = chains[:-1].ravel(), chains[1:].ravel().astype(np.int64)
    there = (first >= 0) & (second >= 0)
    return np.bincount(second[there] * n + first[there], minlength=n * n).reshape(n, n).astype(np.int32)


@lru_cache(maxsize=1 << 13)
def _hash(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")


def _noise(rows: Counts, salt: np.uint64 | NDArray[np.uint64]) -> Floats:
    """Returns a number from 0 to _NOISE for each range and a server, or several of them (the finalizer of
    splitmix64)."""
    x = rows.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) ^ salt
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    noise: Floats = (x >> np.uint64(11)).astype(np.float64) * (_NOISE / (1 << 53))
    return noise
