"""Which key goes to which server, and in what order. Pure: arrays in, arrays out.

A push is ordered by `rank`: ranges grouped by head, then by the rest of the chain, so that a head can forward slices
of what it received. A pull only needs its keys grouped by the server that answers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from coordinator.core.view import View
from elasticps.kernels import njit
from elasticps.kernels.hashing import hash_key, range_shift
from replication.chain import Member

FRAME_BYTES = 1 << 20  # aimed at per PUSH frame: while the server applies one, the next is copied and sent


@dataclass(frozen=True)
class HeadShare:
    """The ranks `start`..`stop` that one server heads; `server` indexes `view.servers`."""

    server: int
    start: int
    stop: int


class Readers:
    """Who answers pulls. `of` int32 [P]: index of each range's server, -1 for none; `only`: that of all ranges if it is
    one, else -1."""

    def __init__(self, of: NDArray[np.int32]) -> None:
        self.of = np.array(of, np.int32)  # of a view it may be read-only: another type for compiled code
        first = int(self.of[0])
        self.only = first if bool((self.of == first).all()) else -1


class Routes:
    """A view as the client uses it. Ranges without a head stand in no share."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.epoch = view.epoch
        self.members = view.as_chains.members
        self.index_of = {member: i for i, member in enumerate(self.members)}
        self.shift = range_shift(view.ranges)
        by_chain = np.lexsort([np.arange(view.ranges), *view.chains.T[::-1]])  # last key sorts first: the head
        self.range_at = by_chain.astype(np.int64)  # rank -> range
        self.rank_of = np.empty(view.ranges, np.int64)  # range -> rank
        self.rank_of[by_chain] = np.arange(view.ranges)
        heads = view.heads[by_chain]
        edges = np.flatnonzero(np.diff(heads)) + 1
        bounds = [0, *edges.tolist(), view.ranges]
        shares = [HeadShare(int(heads[a]), a, b) for a, b in itertools.pairwise(bounds)]
        self.share_of = {s.server: s for s in shares if s.server >= 0}
        self.heads = [self.members[s.server] for s in self.share_of.values()]  # by share
        self.headless = bool((view.heads < 0).any())  # ranges begin anew
        self.bounds = np.array([(s.start, s.stop) for s in self.shares], np.int64).reshape(-1, 2)
        self.share_index = {s.server: i for i, s in enumerate(self.shares)}
        self.tails = Readers(view.tails)
        self._replicas: tuple[int, Readers] | None = None

    @property
    def shares(self) -> tuple[HeadShare, ...]:
        return tuple(self.share_of.values())

    @cached_property
    def serving(self) -> list[Member]:
        """Servers that head or answer for some range."""
        used = np.unique(np.concatenate([self.view.heads, self.view.tails]))
        return [self.members[i] for i in used.tolist() if i >= 0]

    @cached_property
    def holding(self) -> list[Member]:
        """Servers that have, or get, a copy of some range."""
        used = np.unique(np.append(self.view.chains, self.view.joining))
        return [self.members[i] for i in used.tolist() if i >= 0]

    def heads_of(self, ranges: Iterable[int]) -> list[Member]:
        """The servers that head these ranges, each once, without ranges that have no head."""
        heads = dict.fromkeys(int(self.view.heads[r]) for r in ranges)
        return [self.members[head] for head in heads if head >= 0]

    def replicas(self, worker: int) -> Readers:
        """For each range one of its full replicas, so that the workers and ranges together load all of them alike."""
        if self._replicas is None or self._replicas[0] != worker:
            chains = self.view.chains
            ranges = np.arange(len(chains))
            length = np.maximum((chains >= 0).sum(axis=1), 1)
            # ranges of one chain must not all go to one replica, so the range decides as a mixed number
            mixed = (ranges.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(40)
            turn = (mixed.astype(np.int64) + worker) % length
            self._replicas = worker, Readers(chains[ranges, turn])
        return self._replicas[1]

    def same_heads(self, other: Routes) -> bool:
        """Whether every range has the same head in both views."""
        if self.members == other.members:
            return bool(np.array_equal(self.view.heads, other.view.heads))
        where = {member: i for i, member in enumerate(other.members)}
        mapped = np.array([*(where.get(m, -2) for m in self.members), -1], np.int32)  # the last one for headless ranges
        return bool(np.array_equal(mapped[self.view.heads], other.view.heads))


@lru_cache(maxsize=4)
def routes_of(view: View) -> Routes:
    """Returns the routes of a view; they are worked out once, also for many workers of one process."""
    return Routes(view)


@dataclass(frozen=True)
class PushPlan:
    """A table's keys in rank order. `order` int64 [m]: the first position of each distinct key; `following` int64
    [n]: the next position of the same key or -1, empty when no key repeats; `offsets` int64 [P + 1] into `order`."""

    order: NDArray[np.int64]
    following: NDArray[np.int64]
    offsets: NDArray[np.int64]


def plan_push(keys: NDArray[np.int64], salt: np.uint64, routes: Routes) -> PushPlan:
    """Orders keys int64 [n] by rank, stably, each distinct key once."""
    n = len(keys)
    order = np.empty(n, np.int64)
    following = np.empty(n, np.int64)
    offsets = np.empty(len(routes.rank_of) + 1, np.int64)
    m, repeats = plan_ranks(keys, salt, routes.shift, routes.rank_of, order, following, offsets)
    return PushPlan(order[:m], following if repeats else following[:0], offsets)


@njit(nogil=True, cache=True)
def plan_ranks(keys, salt, shift, rank_of, order, following, offsets):  # type: ignore[no-untyped-def]
    """`plan_push` into arrays that are there; returns how many keys are distinct, and how many repeat."""
    n = keys.shape[0]
    s = np.uint64(shift)
    ranks = np.empty(n, np.int32)
    offsets[:] = 0
    increasing = True
    for i in range(n):
        ranks[i] = rank_of[hash_key(keys[i], salt) >> s]
        if i and keys[i] <= keys[i - 1]:
            increasing = False
    repeats = 0
    if not increasing:
        repeats = _chain_repeats(keys, salt, following, ranks)
    for i in range(n):
        if ranks[i] >= 0:
            offsets[ranks[i] + 1] += 1
    for r in range(offsets.shape[0] - 1):
        offsets[r + 1] += offsets[r]
    at = offsets[:-1].copy()
    for i in range(n):
        r = ranks[i]
        if r >= 0:
            order[at[r]] = i
            at[r] += 1
    return n - repeats, repeats


@njit(nogil=True, cache=True)
def _chain_repeats(keys, salt, following, ranks):  # type: ignore[no-untyped-def]
    """Links equal keys in their order of appearance and takes all but the first out of `ranks` (-1)."""
    n = keys.shape[0]
    capacity = 16
    while capacity < 2 * n:
        capacity *= 2
    mask = capacity - 1
    first = np.full(capacity, -1, np.int32)
    newest = np.empty(capacity, np.int32)
    repeats = 0
    for i in range(n):
        following[i] = -1
        slot = np.int64(hash_key(keys[i], salt) & np.uint64(mask))
        while first[slot] >= 0 and keys[first[slot]] != keys[i]:
            slot = (slot + 1) & mask
        if first[slot] < 0:
            first[slot] = i
        else:
            following[newest[slot]] = i
            ranks[i] = -1
            repeats += 1
        newest[slot] = i
    return repeats


@njit(nogil=True, cache=True)
def take_sum(grads, order, following, out):  # type: ignore[no-untyped-def]
    """out[j] = grads[order[j]], plus the gradients of the same key that follow it, added in their order."""
    repeats = following.shape[0] > 0
    for j in range(order.shape[0]):
        i = order[j]
        source, target = grads[i], out[j]
        for d in range(target.shape[0]):
            target[d] = source[d]
        if repeats:
            i = following[i]
            while i >= 0:
                source = grads[i]
                for d in range(target.shape[0]):
                    target[d] += source[d]
                i = following[i]


@njit(nogil=True, cache=True)
def _plan_pull(keys, salt, shift, reader_of, order, offsets):  # type: ignore[no-untyped-def]
    n = keys.shape[0]
    s = np.uint64(shift)
    readers = np.empty(n, np.int32)
    offsets[:] = 0
    for i in range(n):
        r = reader_of[hash_key(keys[i], salt) >> s] + 1
        readers[i] = r
        offsets[r + 1] += 1
    for r in range(offsets.shape[0] - 1):
        offsets[r + 1] += offsets[r]
    at = offsets[:-1].copy()
    for i in range(n):
        r = readers[i]
        order[at[r]] = i
        at[r] += 1


def plan_pull(
    keys: NDArray[np.int64], salt: np.uint64, routes: Routes, readers: Readers
) -> list[tuple[int, NDArray[np.int64]]]:
    """Groups keys int64 [n] by reader, stably: (server, positions int64 [m]) for each; server -1 where nobody reads."""
    order = np.empty(len(keys), np.int64)
    offsets = np.empty(len(routes.members) + 2, np.int64)
    _plan_pull(keys, salt, routes.shift, readers.of, order, offsets)
    edges = offsets.tolist()
    return [(i - 1, order[a:b]) for i, (a, b) in enumerate(itertools.pairwise(edges)) if a < b]


@njit(nogil=True, cache=True)
def place_rows(rows, order, out):  # type: ignore[no-untyped-def]
    """out[order[j]] = rows[j]."""
    for j in range(order.shape[0]):
        source, target = rows[j], out[order[j]]
        for d in range(target.shape[0]):
            target[d] = source[d]


def cut_ranks(sizes: NDArray[np.int64], limit: int = FRAME_BYTES) -> list[tuple[int, int]]:
    """Cuts consecutive ranges of ranks, of the given sizes (bytes), into runs of about `limit` bytes, at least a rank.

    The first run is a quarter of that, so that the server can begin while the others are still being copied.
    """
    total = int(sizes.sum())
    if total <= limit // 2:
        return [(0, len(sizes))]
    ends = np.cumsum(sizes)
    cuts, start, aimed = [], 0, limit // 4
    while start < len(sizes):
        done = int(ends[start - 1]) if start else 0
        left = total - done
        stop = max(start + 1, int(np.searchsorted(ends, done + aimed, side="right")))
        if left <= aimed + aimed // 2:
            stop = len(sizes)
        cuts.append((start, stop))
        start, aimed = stop, limit
    return cuts
