"""Views made by hand."""

from __future__ import annotations

import numpy as np

from coordinator.core.view import ServerInfo, View


def view(chains: list[list[int]], epoch: int = 1, servers: tuple[str, ...] = ("s0", "s1", "s2")) -> View:
    """Chains as indices into `servers`, head first; -1 for no replica."""
    ranges, replicas = len(chains), max(map(len, chains))
    padded = [c + [-1] * (replicas - len(c)) for c in chains]
    infos = tuple(ServerInfo(name, 1, f"127.0.0.1:{1000 + i}") for i, name in enumerate(servers))
    return View(cluster="c", epoch=epoch, ranges=ranges, replicas=replicas, servers=infos,
                chains=np.array(padded, np.int32), joining=np.full(ranges, -1, np.int32),
                since=np.full(ranges, epoch, np.int64), reason="test")  # fmt: skip
