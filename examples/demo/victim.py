"""Whom the demo kills. Whoever looks on may have killed a server himself a moment ago."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from coordinator.core.view import View


def choose(view: View, running: Collection[tuple[str, int]]) -> tuple[str, int] | None:
    """Of the servers that run and do not drain, by name and incarnation, the one that heads most ranges, and how many
    these are; None as long as each of them has the only full replica of something."""
    runs = [(server.name, server.incarnation) in running for server in view.servers]
    lives = np.isin(view.chains, np.flatnonzero(runs))
    heads = np.bincount(view.heads[view.heads >= 0], minlength=len(runs))
    for me in np.argsort(-heads, kind="stable"):
        if runs[me] and heads[me] and (lives & (view.chains != me)).any(axis=1).all():
            return view.servers[me].name, int(heads[me])
    return None
