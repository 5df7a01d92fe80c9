"""Which process a fault hits, and whether the promises allow the fault now. Pure.

The promise is that a range may lose up to R-1 replicas and no acknowledged push. So a fault that can take a server's
copies away waits until every range has another full replica: without one, a lost push would prove nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from chaos.live.plan import VERBS, WORD_ROLES, Action
from coordinator.core.view import View


@dataclass(frozen=True)
class Situation:
    """The cluster when a fault's time has come.

    view     the newest one known; None before the first
    running  role -> names of the processes that run and are not paused
    down     members (name, incarnation) that are not to be counted on: killed, paused, cut off, or leaving
    leader   the coordinator that leads, "" if unknown
    heat     float [ranges], how much of the load each range gets; empty: all the same
    """

    view: View | None
    running: Mapping[str, Collection[str]]
    down: frozenset[tuple[str, int]] = frozenset()
    leader: str = ""
    heat: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))

    def role(self, name: str) -> str:
        """Returns the role of a process that runs, "" for any other."""
        return next((role for role, names in self.running.items() if name in names), "")


@dataclass(frozen=True)
class Choice:
    """The process that is hit; or "", and why none is yet."""

    name: str = ""
    why: str = ""


def choose(action: Action, scene: Situation) -> Choice:
    """Chooses the target of an action. Without a target, the action may be tried again later."""
    verb = VERBS[action.do]
    candidates = _candidates(action.target, scene, verb.roles)
    if not candidates:
        return Choice(why=f"{action.target}: there is none now")
    start = int(action.draw * len(candidates))
    why = ""
    for name in candidates[start:] + candidates[:start]:
        if not verb.hurts or scene.role(name) != "server":
            return Choice(name)
        if not (why := unsafe(name, scene)):
            return Choice(name)
    return Choice(why=why)


def unsafe(name: str, scene: Situation) -> str:
    """Says why this server must not be lost now; "" if it may."""
    view = scene.view
    if view is None:
        return "there is no view yet"
    gone = [i for i, server in enumerate(view.servers) if (server.name, server.incarnation) in scene.down]
    alive = ~np.isin(view.chains, [*gone, -1])
    if (without := int((~alive.any(axis=1)).sum())) > 0:
        return f"{without} ranges have no full replica that lives: one that was left out may have all that there is"
    me = view.index(name)
    if me < 0:
        return f"{name} is in no view yet" if name in scene.running.get("server", ()) else ""
    if (alone := int((~(alive & (view.chains != me)).any(axis=1)).sum())) > 0:
        return f"{name} has the only full replica of {alone} ranges"
    return ""


def heads_most(view: View, heat: NDArray[np.float64], column: str) -> str:
    """Returns the head (or tail) of the hottest range; of equally hot ranges, the server that heads (or ends) most."""
    members = view.heads if column == "head" else view.tails
    warmth = heat if heat.size == view.ranges else np.ones(view.ranges)
    hottest = np.flatnonzero(warmth == warmth.max())
    owners = members[hottest]
    owners = owners[owners >= 0]
    if not owners.size:
        return ""
    return view.servers[int(np.bincount(owners).argmax())].name


def _candidates(word: str, scene: Situation, roles: tuple[str, ...]) -> list[str]:
    """Returns every process that a plan's word can mean now, in a fixed order."""
    view, servers = scene.view, set(scene.running.get("server", ()))
    if word == "random":
        return sorted(scene.running.get(roles[0], ())) if roles else []
    if word in ("worker", "etcd", "reader"):
        return sorted(scene.running.get(word, ()))
    if word in ("leader", "standby"):
        there = sorted(scene.running.get("coordinator", ()))
        return [name for name in there if (name == scene.leader) == (word == "leader")]
    if word == "joining" or word in WORD_ROLES or "-of:" in word:
        names = [] if view is None else _in_view(word, view, scene.heat)
        return [name for name in names if name in servers]
    return [word] if scene.role(word) else []


def _in_view(word: str, view: View, heat: NDArray[np.float64]) -> list[str]:
    if word == "joining":
        return sorted(view.servers[i].name for i in np.unique(view.joining).tolist() if i >= 0)
    side, _, which = word.partition("-of:")
    if which in ("", "hottest"):
        return [name for name in (heads_most(view, heat, side),) if name]
    if int(which) >= view.ranges:
        return []
    index = int((view.heads if side == "head" else view.tails)[int(which)])
    return [view.servers[index].name] if index >= 0 else []


def group(word: str, target: str, scene: Situation) -> list[str]:
    """Returns the processes that a plan's `to` means, without the target itself."""
    roles = {"others": "server", "etcd": "etcd"} | {f"{role}s": role for role in ("server", "coordinator", "worker")}
    if word == "everyone":
        names = sorted(name for there in scene.running.values() for name in there)
    elif word in roles:
        names = sorted(scene.running.get(roles[word], ()))
    else:
        names = [word]
    return [name for name in names if name != target]


def whole(view: View, servers: Collection[str]) -> str:
    """Says why the view is not what it should end as with these servers; "" if it is: every range has as many replicas
    as so many servers can hold, all of them on these servers, and none is being filled."""
    listed = {server.name for server in view.servers}
    if absent := sorted(set(servers) - listed):
        return f"{', '.join(absent)} not in the view"
    needed = min(view.replicas, len(servers))
    if (short := int(((view.chains >= 0).sum(axis=1) < needed).sum())) > 0:
        return f"{short} ranges have fewer than {needed} replicas"
    if (joining := int((view.joining >= 0).sum())) > 0:
        return f"{joining} ranges are being filled"
    owners = {view.servers[i].name for i in np.unique(view.chains).tolist() if i >= 0}
    if gone := sorted(owners - set(servers)):
        return f"{', '.join(gone)} hold ranges but do not run"
    return ""
