"""Which ranges have no replica left, and whether their data can come back. Pure.

The last replica of a range stays in the view when it dies, and the range waits for it. Its data come back only with the
same incarnation: a server that registers again as a newer incarnation begins empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coordinator.core.view import ServerInfo, View
from replication.chain import Member

_SHOWN = 8  # spans of ranges


@dataclass(frozen=True)
class DataLoss:
    """The ranges of a view that are lost, or may be.

    lost     ranges [n] all replicas of which have come back empty: their data are gone
    waiting  ranges [n] without a replica that is registered, one of which may still come back as it was
    empty    the members that have come back empty, and as which incarnation
    away     the members, of chains of those ranges, that are not registered
    coming   ranges [n] that are being restored from a checkpoint
    """

    lost: NDArray[np.int64]
    waiting: NDArray[np.int64]
    empty: dict[Member, int]
    away: tuple[Member, ...]
    coming: NDArray[np.int64]

    def __bool__(self) -> bool:
        return bool(self.lost.size or self.waiting.size or self.coming.size)

    @property
    def lines(self) -> list[str]:
        """Says for people what happened, and what to do."""
        lines = []
        if self.lost.size:
            who = ", ".join(
                f"{m.name} came back as incarnation {now} and has begun empty" for m, now in self.empty.items()
            )
            lines.append(
                f"the data of {self.lost.size} ranges ({spans(self.lost)}) are lost, in all tables: {who}. Pushes and "
                "pulls of their keys fail or wait; all others can be read. `elasticps restore --ranges all-lost` "
                "brings them back from the newest checkpoint"
            )
        if self.waiting.size:
            who = ", ".join(m.name for m in self.away)
            lines.append(
                f"{self.waiting.size} ranges ({spans(self.waiting)}) have no replica that can be reached, and wait for "
                f"{who}: if it is only cut off or frozen, bring it back and nothing is lost; started again, it begins "
                "empty"
            )
        if self.coming.size:
            lines.append(f"{self.coming.size} ranges ({spans(self.coming)}) come back from a checkpoint")
        return lines


def find_loss(view: View, registered: Iterable[ServerInfo]) -> DataLoss:
    """Finds what a view has lost, given the servers that are registered now."""
    now = {server.name: server.incarnation for server in registered}
    here = np.array([*(now.get(s.name) == s.incarnation for s in view.servers), False])
    empty = np.array([*(now.get(s.name, 0) > s.incarnation for s in view.servers), True])
    copies = view.as_chains.copies
    coming = view.chains[:, 0] < 0
    without = ~here[copies].any(axis=1) & ~coming
    lost = without & empty[copies].all(axis=1)  # index -1, nobody, finds the last
    used = np.unique(copies[without])
    members = [view.servers[i].member for i in used.tolist() if i >= 0]
    return DataLoss(
        np.flatnonzero(lost),
        np.flatnonzero(without & ~lost),
        {m: now[m.name] for m in members if now.get(m.name, 0) > m.incarnation},
        tuple(m for m in members if m.name not in now),
        np.flatnonzero(coming),
    )


def describe_loss(loss: Mapping[str, Any]) -> list[str]:
    """Says for people what is missing in recovered ranges, from an entry below `losses/`."""
    ranges = np.array(loss["ranges"], np.int64)
    lines = [
        f"{len(ranges)} ranges ({spans(ranges)}) began anew in epoch {loss['epoch']}, from checkpoint {loss['cut']} "
        f"at {loss['url']}: {loss['rows']:,} rows"
    ]
    if loss["lacking"]:
        lines.append(f"it has nothing of tables made since: {', '.join(loss['lacking'])}")
    missing = [one for one in loss["workers"] if one["to"] > one["have"]]
    lines += [f"of worker {one['name']} steps {one['have'] + 1} to {one['to']} are missing there" for one in missing]
    return lines if missing else [*lines, "no step is missing there"]


def spans(ranges: NDArray[np.int64]) -> str:
    """Formats ascending ranges as people write them: "0-3, 7", not too long."""
    parts = np.split(ranges, np.flatnonzero(np.diff(ranges) != 1) + 1) if ranges.size else []
    texts = [f"{part[0]}" if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts]
    more = len(texts) - _SHOWN
    return ", ".join(texts[:_SHOWN]) + (f" and {more} more spans" if more > 0 else "")
