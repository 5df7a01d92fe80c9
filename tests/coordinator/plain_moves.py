"""Dumb twins of the planner: that of the search for moves scores every range for every target, and computes all costs
again for each move."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coordinator.core.balance import (
    _DRAINING,
    _EQUAL,
    _NEW_PAIR,
    _PAIR_TOO_MANY,
    _SAME_ZONE,
    _TARGETS,
    _WORTH_LESS,
    Move,
    _Field,
    _noise,
)
from coordinator.core.ring import SPREAD, _preference, _Ring, _shuffled
from coordinator.core.share import Floats

_Rows = NDArray[np.int32]
_Flags = NDArray[np.bool_]


class PlainField(_Field):
    """Finds the same moves as `_Field`, slowly."""

    def best(
        self, movable: _Flags, startable: _Flags, only: NDArray[np.int32], full: _Flags, roomy: _Flags
    ) -> Move | None:
        chains, n = np.ascontiguousarray(self.chains.T), len(self.able)
        holds, heads, tails = (np.bincount(x.ravel(), minlength=n) for x in (chains, chains[:, 0], chains[:, -1]))
        assert np.array_equal(self.loads, [holds, heads, tails])
        more, less = [self.bands.cost(self.loads) - self.bands.cost(self.loads + by) for by in (1, -1)]
        more[:, ~self.able] = less[:, ~self.able] = 0.0
        less[0, self.draining] = _DRAINING
        gain_in, gain_out = more[0], less[0][chains]
        if self.replicas > 1:
            gain_in = more[0] + more[2]
            gain_out += less[2][chains[:, -1:]]
            gain_out[:, 0] += less[1][chains[:, 0]] + more[1][chains[:, 1]]
        zones = self._zone[chains]
        shared = (zones[:, :, None] == zones[:, None, :]).sum(axis=2) > 1
        base = gain_out + _SAME_ZONE * (shared & self._zoned)
        above = (holds > self.bands.high[0]) | (heads > self.bands.high[1])
        self._worth = min(self._at_least, _WORTH_LESS) if bool((above & self.able).any()) else self._at_least
        order = [int(i) for i in np.argsort(-gain_in, kind="stable") if self.able[i] and roomy[i]]
        while order:
            free = [i for i in self._first_of_zones(order, gain_in) if not full[i]]
            if not free:
                return None
            found: tuple[float, Move] | None = None
            waits = False
            for target in free:
                gains = self._plain_scores(target, chains, base)
                best = gains.max(axis=1) + gain_in[target]
                worth = movable & (best >= self._worth)
                may = startable & ((only < 0) | (only == target))
                waits |= bool((worth & ~may).any())
                at = int(np.argmax(np.where(movable & may, best, -np.inf)))
                if worth[at] and may[at] and (found is None or best[at] > found[0]):
                    found = float(best[at]), Move(at, target, int(chains[at, int(np.argmax(gains[at]))]))
            if found is not None or waits:
                return None if found is None else found[1]
            order = [i for i in order if i not in free]
        return None

    def _first_of_zones(self, order: list[int], gain_in: Floats) -> list[int]:
        first: dict[int, float] = {}
        count: dict[int, int] = {}
        chosen = []
        for i in order:
            zone = max(-1, int(self._zone[i]))
            near = gain_in[i] >= first.setdefault(zone, gain_in[i]) - _EQUAL
            if near and count.get(zone, 0) < max(2, _TARGETS // self._zones):
                count[zone] = count.get(zone, 0) + 1
                chosen.append(i)
        return chosen

    def _plain_scores(self, target: int, chains: _Rows, base: Floats) -> Floats:
        rows, n = np.arange(len(chains)), len(self.able)
        scores = base - _noise(rows, self._salt[target])[:, None]
        scores[(chains == target).any(axis=1)] = -np.inf
        if self.replicas > 1:
            pairs = np.zeros((n, n), np.int64)
            np.add.at(pairs, (chains[:, :-1].ravel(), chains[:, 1:].ravel()), 1)
            many = np.count_nonzero(pairs, axis=1) >= SPREAD
            new = np.where(pairs[:, target] == 0, np.where(many, _NEW_PAIR + _PAIR_TOO_MANY, _NEW_PAIR), 0.0)
            scores[:, :-1] -= new[chains[:, -1]][:, None]
            scores[:, -1] -= new[chains[:, -2]]
        if self._zoned:
            same = self._zone[chains] == self._zone[target]
            scores -= _SAME_ZONE * (same.sum(axis=1)[:, None] - same > 0)
        if self._cut is not None:
            scores[self._cut[chains[:, -1], target]] = -np.inf
            if self.replicas > 1:
                scores[self._cut[chains[:, -2], target], -1] = -np.inf
        return scores


class PlainRing(_Ring):
    """Chooses the same replicas as `_Ring`, from lists of all nodes."""

    def extend(self, rows: list[list[int]], copies: int) -> None:
        caps = self.caps(copies)
        for r in _shuffled(self.ranges):
            row = rows[r]
            at = self.circle.index(row[-1])
            free = [i for i in self.circle[at + 1 :] + self.circle[:at] if i not in row]
            used = {self.nodes[i].zone for i in row} - {""}
            candidates = [i for i in free if self.nodes[i].zone not in used] or free
            near = [i for i in candidates[:SPREAD] if self.load[i] < caps[i]]
            room = near or [i for i in candidates if self.load[i] < caps[i]][:1]
            if room:
                chosen = max(room, key=lambda i: _preference(r, self.nodes[i]))
            else:
                chosen = min(candidates, key=lambda i: self.load[i] / caps[i])
            row.append(chosen)
            self.load[chosen] += 1
