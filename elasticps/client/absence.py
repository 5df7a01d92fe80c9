"""Which servers are missed without a stand-in, and how to say so to people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from coordinator.core.data_loss import spans
from elasticps.client.connections import ServerPeer
from elasticps.client.core.routing import Routes
from replication.chain import Member

ABSENT_S = 3.0  # out of reach: a failover would have come by then


def absent_servers(routes: Routes, peers: Mapping[Member, ServerPeer], now_s: float) -> set[Member]:
    """Those that are, as far as this worker has tried them or the view says it, as long as others are there."""
    empty = dict(routes.view.empty)
    if not empty and not any(_away(peer, now_s) for peer in peers.values()):
        return set()
    out = [info.name in empty or (m in peers and _away(peers[m], now_s))
           for info, m in zip(routes.view.servers, routes.members, strict=True)]  # fmt: skip
    if not any(out):
        return set()
    away = np.array([*out, True])  # index -1, nobody, finds the last
    heads, tails = routes.view.heads, routes.view.tails
    waits = away[routes.view.as_chains.copies].all(axis=1)
    needed = set(np.unique(np.concatenate([heads[~waits], tails[~waits]])).tolist())
    return {routes.members[i] for i in np.flatnonzero(away[:-1]).tolist() if i not in needed} if needed else set()


def _away(peer: ServerPeer, now_s: float) -> bool:
    if peer.empty_as:
        return True
    return peer.down_since_s is not None and now_s - peer.down_since_s > ABSENT_S


def what_is_lost(peer: ServerPeer, routes: Routes, peers: Mapping[Member, ServerPeer]) -> str:
    """What is lost with a server that has come back empty; "" as long as somebody may still have it."""
    empty = dict(routes.view.empty)
    known = [empty.get(m.name, 0) or (m in peers and peers[m].empty_as) for m in routes.members]
    gone = np.array([*map(bool, known), True])
    mine = (routes.view.chains == routes.index_of[peer.member]).any(axis=1)
    ranges = np.flatnonzero(mine & gone[routes.view.chains].all(axis=1))
    if not (peer.empty_as and len(ranges)):
        return ""
    return (
        f"its data are lost: it came back as incarnation {peer.empty_as} and has begun empty, and no other server "
        f"has the rows of ranges {spans(ranges)}, of any table (`elasticps restore --ranges all-lost` brings them back "
        "from a checkpoint)"
    )


def name_peers(missing: Iterable[ServerPeer], routes: Routes, peers: Mapping[Member, ServerPeer]) -> str:
    """Says which servers are not connected, and why."""
    return ", ".join(f"{p.info.name} at {p.info.address} ({what_is_lost(p, routes, peers) or p.trouble})"
                     for p in missing)  # fmt: skip


def explain_wait(
    routes: Routes, peers: Mapping[Member, ServerPeer], now_s: float, owing: Mapping[Member, int],
    waited_for: set[Member], headless: int,
) -> str:  # fmt: skip
    """Says which servers are waited for. owing: the oldest step that each has not committed; waited_for: who owes
    an answer; headless: how many ranges nobody heads."""
    parts = []
    for member in sorted({*owing, *waited_for}):
        index, peer = routes.index_of[member], peers.get(member)
        headed = np.flatnonzero(routes.view.heads == index)
        if peer is None:
            state = "not connected yet"
        elif peer.down_since_s is None:
            state = "connected, not answering"
        else:
            state = what_is_lost(peer, routes, peers) or (
                f"unreachable for {now_s - peer.down_since_s:.1f} s ({peer.trouble})"
            )
        clock = f", owes step {owing[member]}" if member in owing else ""
        parts.append(f"server {member.name} at {routes.view.servers[index].address}, head of {len(headed)} ranges "
                    f"({spans(headed)}): {state}{clock}")  # fmt: skip
    if headless:
        parts.append(f"{headless} ranges have no server")
    return f"{'; '.join(parts) or 'nothing is outstanding'}; the cluster's view is at epoch {routes.epoch}"
