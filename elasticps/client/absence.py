"""Servers in whose place nobody stands: some ranges have no other replica, and they have been out of reach for a while.
Whatever needs those ranges waits; a worker that comes meanwhile uses the others."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from coordinator.core.data_loss import spans
from elasticps.client.connections import Peer
from elasticps.client.core.routing import Routes
from replication.chain import Member

ABSENT_S = 3.0  # out of reach: a failover would have come by then


def absent(routes: Routes, peers: Mapping[Member, Peer], now_s: float) -> set[Member]:
    """Those that are, as long as others are there."""
    out = [_away(peers[m], now_s) for m in routes.members]
    if not any(out):
        return set()
    away = np.array([*out, True])  # index -1, nobody, finds the last
    heads, tails = routes.view.heads, routes.view.tails
    waits = away[routes.view.as_chains.copies].all(axis=1)
    needed = set(np.unique(np.concatenate([heads[~waits], tails[~waits]])).tolist())
    return {routes.members[i] for i in np.flatnonzero(away[:-1]).tolist() if i not in needed} if needed else set()


def _away(peer: Peer, now_s: float) -> bool:
    if peer.empty_as:
        return True
    return peer.down_since_s is not None and now_s - peer.down_since_s > ABSENT_S


def lost(peer: Peer, routes: Routes, peers: Mapping[Member, Peer]) -> str:
    """What is lost with a server that has come back empty; "" as long as somebody may still have it."""
    gone = np.array([*(bool(peers[m].empty_as) for m in routes.members), True])
    mine = (routes.view.chains == routes.index_of[peer.member]).any(axis=1)
    ranges = np.flatnonzero(mine & gone[routes.view.chains].all(axis=1))
    if not (peer.empty_as and len(ranges)):
        return ""
    return (
        f"its data are lost: it came back as incarnation {peer.empty_as} and has begun empty, and no other server "
        f"has the rows of ranges {spans(ranges)}, of any table (`elasticps restore --ranges all-lost` brings them back "
        "from a checkpoint)"
    )


def explain(
    routes: Routes, peers: Mapping[Member, Peer], now_s: float, owing: Mapping[Member, int], asked: set[Member],
    headless: int,
) -> str:  # fmt: skip
    """Who is waited for, for people. owing: the oldest step that each has not committed; asked: who owes an answer;
    headless: ranges that nobody heads."""
    told = []
    for member in sorted({*owing, *asked}):
        peer = peers[member]
        headed = np.flatnonzero(routes.view.heads == routes.index_of[member])
        state = "connected, not answering" if peer.down_since_s is None else lost(peer, routes, peers) or (
            f"unreachable for {now_s - peer.down_since_s:.1f} s ({peer.trouble})"
        )  # fmt: skip
        clock = f", owes step {owing[member]}" if member in owing else ""
        told.append(f"server {member.name} at {peer.info.address}, head of {len(headed)} ranges "
                    f"({spans(headed)}): {state}{clock}")  # fmt: skip
    if headless:
        told.append(f"{headless} ranges have no server")
    return f"{'; '.join(told) or 'nothing is outstanding'}; the cluster's view is at epoch {routes.epoch}"
