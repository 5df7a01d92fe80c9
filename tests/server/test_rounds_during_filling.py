"""Synchronous rounds at a server that others are filling, each at its own speed."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from elasticps.server.core.requests import Body
from elasticps.server.fast.layout import H_ENABLED
from elasticps.server.network.connection import Connection
from elasticps.server.roles import snapshots
from elasticps.wire.frames import Header, Kind, json_body
from elasticps.wire.headers import PushHeader
from replication.progress import before_part
from tests.server.conftest import Group, Run, until

KEYS = list(range(3000))
HELD = (Kind.FORWARD, Kind.SNAPSHOT_CHUNK, Kind.ACK, Kind.RESYNC, Kind.CHUNK_ACK)


async def code(answer: Any) -> str:
    header, body = await asyncio.wait_for(answer, 10)
    return str(json_body(body)["code"]) if header.kind == Kind.ERROR else Kind(header.kind).name


def test_shares_are_accepted_while_ranges_are_filled_at_different_speeds(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found in a review. c is filled by a and b. What a tells it of range 0 comes to rest after round 1's share, what b
    tells it of range 6 after round 2's, and nobody waits for c there: both rounds are closed. The share of round 3 in
    the ranges of its own was refused, as if those before were open."""
    monkeypatch.setattr(snapshots, "PIECE_BYTES", 512)

    async def story(group: Group) -> None:
        for name in "abc":
            await group.start(name)
            group.servers[name].fast.h[H_ENABLED] = False

        def head(r: int) -> str:
            return "a" if r < 5 else "b" if r < 10 else "c"

        group.adopt(group.make_view(lambda r: [head(r)]))
        workers = {name: await group.connect(name) for name in "abc"}
        assert group.view is not None
        for name, worker in workers.items():
            assert await code(worker.init(group.view, name, KEYS, 1.0)) == "OK"
        c, waiting = group.servers["c"], {"a": deque[Any](), "b": deque[Any]()}
        handlers = c.handshake._peer.handlers
        real: dict[int, Callable[..., None]] = {kind: handlers[kind] for kind in HELD}

        def wait(conn: Connection, header: Header, body: Body) -> None:
            assert conn.member is not None
            waiting[conn.member.name].append((conn, header, body.copy()))

        handlers.update(dict.fromkeys(HELD, wait))

        async def hears(name: str, done: Callable[[Header], object]) -> None:
            """c takes what comes from that server, in order, until it has had enough."""
            header = None
            while header is None or not done(header):
                await until(lambda: waiting[name])
                conn, header, body = waiting[name].popleft()
                real[header.kind](conn, header, body)

        def has_share(clock: int, r: int) -> Callable[[Header], object]:
            return lambda _: any(s.live[r] for s in c.executor.rounds._retained.get(("default", clock), ()))

        group.adopt(group.make_view(lambda r: [head(r)], lambda r: "c" if r in (0, 6) else ""))
        view = group.view
        assert view is not None

        async def shares(clock: int) -> list[str]:
            share = PushHeader(0, view.epoch, clock, before_part(clock, 0), 1, round=True).header(0)
            requests = [w.ask(share, w._block(view, n, KEYS, 1.0)) for n, w in workers.items()]
            return [await code(answer) for answer in requests]

        ids = np.unique([w.id for w in workers.values()]).tolist()
        await hears("a", lambda header: header.kind == Kind.SNAPSHOT_CHUNK)
        assert await shares(1) == ["OK"] * 3
        await hears("a", has_share(1, 0))
        await group.close_round(1, ids)
        await hears("b", lambda header: header.kind == Kind.SNAPSHOT_CHUNK)
        assert await shares(2) == ["OK"] * 3
        await hears("b", has_share(2, 6))
        await group.close_round(2, ids)
        assert {clock for _, clock in c.executor.rounds._retained} == {1, 2}
        assert await shares(3) == ["OK"] * 3

    run(story)
