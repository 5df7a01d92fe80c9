"""Lines to servers whose keys come and go."""

from __future__ import annotations

import asyncio
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np

from coordinator.core.view import ServerInfo, View
from coordinator.server_links import ServerLinks

MANY = [ServerInfo(f"s{i}", number, f"s{i}:1") for i in range(6) for number in (1, 2)]


def view(epoch: int, servers: tuple[ServerInfo, ...]) -> View:
    chains, none = np.zeros((2, 1), np.int32), np.full(2, -1, np.int32)
    return View("c", epoch, 2, 1, servers, chains, none, np.ones(2, np.int64), "")


async def test_keys_that_change_alone_are_followed_as_all_are() -> None:
    """One coordinator sees every change, its twin is told of all servers each time."""

    def dial(*_: Any) -> Any:
        raise AssertionError("no line is opened")

    for seed in range(30):
        random = Random(seed)
        one, twin = (ServerLinks(dial, lambda ill: None) for _ in range(2))
        servers: dict[str, ServerInfo] = {}
        shown: View | None = None
        for epoch in range(1, 40):
            servers = dict(servers)
            for server in random.sample(MANY, random.randint(0, 3)):
                if servers.get(server.name) is server:
                    del servers[server.name]
                else:
                    servers[server.name] = server
            if servers and random.random() < 0.2:
                shown = view(epoch, tuple(servers.values()))
            tracker: Any = SimpleNamespace(identity="c", state=SimpleNamespace(servers=servers), view=shown)
            one.look_at(tracker)
            twin.follow("c", () if shown is None else shown.servers, servers.values())
            assert one._calls.keys() == twin._calls.keys()
            watched = [
                {member: peer.registered for member, peer in links._detector._peers.items()} for links in (one, twin)
            ]
            assert watched[0] == watched[1]
        tasks = [task for links in (one, twin) for _, _, task in links._calls.values()] + [*one._ending, *twin._ending]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
