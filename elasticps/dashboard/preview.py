"""What a change would move, drawn on the ring before anything is done: `scale --dry-run` and `drain` as a picture."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from coordinator.core.dry_run import dry_run
from coordinator.core.planner import Members
from coordinator.core.view import ClusterConfig, ServerInfo, View
from elasticps.dashboard.core import ring
from elasticps.dashboard.core.model import Model
from elasticps.errors import ConfigError, Error

SERVERS_MAX = 1024
WORK_MAX = 2_000_000  # ranges × servers: what is planned in a few seconds


class Previews:
    """Plans one preview at a time, in a thread, so that pages go on meanwhile."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._lock = asyncio.Lock()

    async def ask(self, request: Mapping[str, str]) -> dict[str, Any]:
        """request: {"servers": "5"} or {"drain": "s1"}. ConfigError for anything else, Error before the first view."""
        async with self._lock:
            view, config = self._model.view, self._model.config
            if view is None or config is None:
                raise Error("there is no view yet")
            members = _changed(self._model.members(), request)
            if view.ranges * len(members.servers) > WORK_MAX:
                raise Error(f"{view.ranges} ranges on {len(members.servers)} servers are too many to plan here")
            nbytes = {n: s.status["bytes"] for n, s in self._model.fleet.servers.items() if s.status is not None}
            return await asyncio.to_thread(preview, view, members, config, nbytes)


def _changed(members: Members, request: Mapping[str, str]) -> Members:
    """The members after the change."""
    from elasticps.local.scaling import by_number, change

    if request.keys() == {"drain"}:
        leaving = {s.member for s in members.servers if s.name == request["drain"]}
        if not leaving:
            raise ConfigError(f"there is no server {request['drain'][:100]!r}")
        return replace(members, draining=members.draining | leaving)
    if request.keys() != {"servers"} or not request["servers"].isdecimal() or len(request["servers"]) > 6:
        raise ConfigError("say how many servers, or which one to drain")
    names = sorted((s.name for s in members.servers), key=by_number)
    planned = change(names, {m.name for m in members.draining}, int(request["servers"]))
    new = tuple(ServerInfo(name, 1 << 40, "127.0.0.1:1") for name in planned.start)
    draining = {m for m in members.draining if m.name not in planned.keep}
    draining |= {s.member for s in members.servers if s.name in planned.drain}
    return replace(members, servers=(*members.servers, *new), draining=frozenset(draining))


def preview(view: View, members: Members, config: ClusterConfig, nbytes: Mapping[str, int]) -> dict[str, Any]:
    """The ring as it would be, and what would move for that."""
    found = dry_run(view, members, config, nbytes=nbytes)
    after = view if found.view is None else found.view
    return {
        "view": ring.draw(after),
        "counts": ring.counts(after),
        "copies": found.copies,
        "bytes": found.nbytes,
        "moves": [{"from": a, "to": b, "copies": n} for (a, b), n in sorted(found.moves.items())][:1000],
        "waiting": found.waiting,
        "converges": found.converges,
    }
