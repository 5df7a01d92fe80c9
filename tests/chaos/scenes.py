"""Views and scenes for tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from chaos.live.plan import Action
from chaos.live.targets import Situation
from coordinator.core.view import ServerInfo, View


def view_of(chains: Sequence[Sequence[str]], joining: Sequence[str] = (), epoch: int = 1, replicas: int = 2) -> View:
    """A view of servers called as the chains say, all of incarnation 1."""
    names = sorted({name for chain in chains for name in chain} | {name for name in joining if name})
    index = {name: i for i, name in enumerate(names)}
    servers = tuple(ServerInfo(name, 1, f"127.0.0.1:{7000 + i}") for i, name in enumerate(names))
    table = np.full((len(chains), replicas), -1, np.int32)
    for r, chain in enumerate(chains):
        table[r, : len(chain)] = [index[name] for name in chain]
    fillings = [index[name] if name else -1 for name in joining] or [-1] * len(chains)
    since = np.ones(len(chains), np.int64)
    return View("c", epoch, len(chains), replicas, servers, table, np.array(fillings, np.int32), since, "test")


def scene_of(view: View | None, *down: str, **running: Sequence[str]) -> Situation:
    """A scene in which all servers of the view run."""
    servers = [server.name for server in view.servers] if view is not None else []
    return Situation(view, {"server": servers, **running}, frozenset((name, 1) for name in down))


def action_of(do: str, target: str = "", draw: float = 0.0, at: float = 1.0, **values: float) -> Action:
    """An action at second 1; `for_` stands for `for`."""
    return Action(0, at, do, target, draw, {name.rstrip("_"): value for name, value in values.items()})
