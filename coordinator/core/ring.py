"""Where ranges go: consistent hashing with virtual nodes and bounded loads. Pure.

Heads: each server puts tokens on a circle of 64-bit hashes, in proportion to its weight. A range sits at its place in
the hash space and belongs to the first token clockwise whose server is not full: "Consistent Hashing with Bounded
Loads" (Mirrokni, Thorup, Zadimoghaddam, SODA 2018). So loads are even whatever the tokens do, and few ranges move when
a server comes or goes.

Further replicas: on a second circle each server has one token; a chain goes on to one of the next few servers after its
last one. So a server exchanges data with few others (Copysets, Cidon et al., ATC 2013), and these change only near a
server that comes or goes. Zones come before balance: no zone holds a range twice while another could hold it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from itertools import chain, islice

import numpy as np
from numpy.typing import NDArray

TOKENS = 256  # per unit of weight
SLACK = 1.25  # a server's load stays below this multiple of its share, where whole ranges allow it
SPREAD = 3  # how many next servers a server's ranges go on to, where zones and loads allow it

_CIRCLE = 1 << 64


@dataclass(frozen=True)
class Node:
    """A server as the ring sees it: its name places it, `weight` > 0 sizes its share, `zone` "" is unknown."""

    name: str
    weight: float = 1.0
    zone: str = ""


def place(nodes: Sequence[Node], ranges: int, replicas: int) -> NDArray[np.int32]:
    """Places ranges: int32 [ranges, replicas] of indices into `nodes`, head first, -1 past the last node.

    Depends on the set of nodes only, not on their order. Replicas of a range are on distinct nodes, and in distinct
    zones where there are enough. Nodes without a zone count as each in its own. ValueError if two share a name.
    """
    if len({node.name for node in nodes}) != len(nodes):
        raise ValueError("the ring has a node name twice")
    chains = np.full((ranges, replicas), -1, dtype=np.int32)
    if not nodes:
        return chains
    order = sorted(range(len(nodes)), key=lambda i: nodes[i].name)
    ring = _Ring([nodes[i] for i in order], ranges)
    rows = [[head] for head in ring.heads()]
    for depth in range(1, min(replicas, len(nodes))):
        ring.extend(rows, depth + 1)
    back = np.asarray(order, dtype=np.int32)
    for r, row in enumerate(rows):
        chains[r, : len(row)] = back[row]
    return chains


class _Ring:
    """One placement in progress: `load[i]` counts the ranges that node i holds so far."""

    def __init__(self, nodes: Sequence[Node], ranges: int) -> None:
        self.nodes = nodes
        self.ranges = ranges
        self.total_weight = math.fsum(node.weight for node in nodes)
        self.load = [0] * len(nodes)
        self.circle = sorted(range(len(nodes)), key=lambda i: _tokens("order", nodes[i].name, 1)[0])
        self.at = {i: at for at, i in enumerate(self.circle)}

    def caps(self, copies: int) -> list[int]:
        """Returns how many ranges each node may hold when every range has `copies` replicas: in total enough for
        all."""
        shares = [copies * self.ranges * node.weight / self.total_weight for node in self.nodes]
        return [max(math.floor(SLACK * share), math.ceil(share)) for share in shares]

    def heads(self) -> list[int]:
        """Returns the head of each range."""
        circle = sorted(
            (token, i)
            for i, node in enumerate(self.nodes)
            for token in _tokens("head", node.name, max(1, round(TOKENS * node.weight)))
        )
        tokens = [token for token, _ in circle]
        caps = self.caps(1)
        heads = [-1] * self.ranges
        for r in _shuffled(self.ranges):
            at = bisect_left(tokens, r * _CIRCLE // self.ranges + _CIRCLE // (2 * self.ranges))
            while self.load[owner := circle[at % len(circle)][1]] >= caps[owner]:
                at += 1
            heads[r] = owner
            self.load[owner] += 1
        return heads

    def extend(self, rows: list[list[int]], copies: int) -> None:
        """Gives each chain its next replica: in a new zone if there is one, then within bounds, then near and idle."""
        caps = self.caps(copies)
        for r in _shuffled(self.ranges):
            row = rows[r]
            near = list(islice(self._new_zones(row), SPREAD))
            room = [i for i in near if self.load[i] < caps[i]]
            room = room or list(islice((i for i in self._new_zones(row) if self.load[i] < caps[i]), 1))
            if room:
                chosen = max(room, key=lambda i: _preference(r, self.nodes[i]))
            else:
                chosen = min(self._new_zones(row), key=lambda i: self.load[i] / caps[i])
            row.append(chosen)
            self.load[chosen] += 1

    def _new_zones(self, row: list[int]) -> Iterator[int]:
        """Yields the nodes that may follow in a chain, nearest first: of zones that it does not use yet, else any."""
        used = {self.nodes[i].zone for i in row} - {""}
        new = (i for i in self._after(row) if self.nodes[i].zone not in used)
        first = next(new, None)
        return self._after(row) if first is None else chain([first], new)

    def _after(self, row: list[int]) -> Iterator[int]:
        """Yields the nodes that a chain does not have yet, from the one next to its last."""
        circle, at = self.circle, self.at[row[-1]] + 1
        return (i for k in range(at - len(circle), at) if (i := circle[k]) not in row)


@lru_cache(maxsize=4 * 1024)
def _tokens(circle: str, name: str, count: int) -> tuple[int, ...]:
    """Returns `count` points of 64 bits; a larger count only adds points, so that a change of weight moves little."""
    digests = (blake2b(f"{circle}/{name}/{i}".encode()).digest() for i in range(-(-count // 8)))
    points = [int.from_bytes(digest[at : at + 8], "little") for digest in digests for at in range(0, 64, 8)]
    return tuple(points[:count])


@lru_cache(maxsize=1 << 16)
def _preference(r: int, node: Node) -> float:
    """Weighted rendezvous hashing: among the same candidates a range prefers the same one, in proportion to weight."""
    digest = blake2b(f"{r}/{node.name}".encode(), digest_size=8).digest()
    uniform = ((int.from_bytes(digest, "little") >> 12) + 0.5) / (1 << 52)  # exact, strictly between 0 and 1
    return node.weight / -math.log(uniform)


@lru_cache(maxsize=8)
def _shuffled(ranges: int) -> tuple[int, ...]:
    """Returns a fixed order of ranges that mixes near and far: a full node's overflow comes from all over the
    circle."""
    return tuple(sorted(range(ranges), key=lambda r: blake2b(r.to_bytes(4, "little"), digest_size=8).digest()))
