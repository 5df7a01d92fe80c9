"""What a checkpoint brings back, as operations of ranges: rows, and then all else that belongs to a range. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from elasticps.kernels.hashing import group_range
from elasticps.model.sharding import GROUP_BITS, ShardSpec
from elasticps.server.core.barrier_state import BarrierGroup, RangeRounds
from elasticps.server.core.data_shards_state import MAX_SETS, Doing, RangeShards, ShardSet, Used
from elasticps.wire.frames import FrameError, text, whole, wholes

_MAX = 1 << 62
_MAX_WORKER = (1 << 32) - 1
MAX_NAME = 255


class RestoredRows(NamedTuple):
    """A RESTORE: rows of a table in one range, in the place of those with equal keys. keys int64 [n], rows uint8
    [n, stride]."""

    table: int
    keys: NDArray[np.int64]
    rows: NDArray[np.uint8]

    @property
    def nbytes(self) -> int:
        """Bytes of keys and rows."""
        return self.keys.nbytes + self.rows.nbytes


class RestoredState(NamedTuple):
    """A RESTORED: a range has all its rows, as they were at `cut`. workers, progress: its vector clocks; closed: each
    application's last synchronous round; groups, shards: of the applications whose group range it is, as a manifest has
    them."""

    cut: int
    workers: tuple[int, ...]
    progress: tuple[int, ...]
    closed: Mapping[str, int]
    groups: Sequence[Mapping[str, Any]]
    shards: Sequence[Mapping[str, Any]]

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> RestoredState:
        """From JSON. FrameError for what it cannot be."""
        workers, progress = wholes(said.get("workers"), _MAX_WORKER, 1), wholes(said.get("progress"), _MAX)
        if len(workers) != len(progress) or any(b <= a for a, b in pairwise(workers)):
            raise FrameError("a RESTORED has clocks of nobody")
        closed, groups, shards = (said.get(name) for name in ("closed", "groups", "shards"))
        if not isinstance(closed, dict) or not isinstance(groups, list) or not isinstance(shards, list):
            raise FrameError("a RESTORED has no rounds or shards")
        found = cls(whole(said.get("cut"), _MAX), workers, progress, closed, groups, shards)
        found.rounds()
        found.sets(2)
        return found

    def clocks(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(workers, progress), sorted by worker: int64 [n] each."""
        return np.array(self.workers, np.int64), np.array(self.progress, np.int64)

    def rounds(self) -> RangeRounds:
        """What is closed, and the groups: without members, since nobody who was one is there any more."""
        try:
            closed = {text(app, MAX_NAME): whole(clock, _MAX) for app, clock in self.closed.items()}
            groups = {
                text(one["app"], MAX_NAME): BarrierGroup(
                    {}, whole(one["decided"], _MAX), wholes(list(one["workers"]), _MAX_WORKER, 1),
                    {whole(worker, _MAX_WORKER, 1): whole(clock, _MAX) for worker, clock in one["last"]},
                )
                for one in self.groups
            }  # fmt: skip
        except (KeyError, TypeError, ValueError) as error:
            raise FrameError(f"a RESTORED's rounds cannot be read: {error!r}") from None
        return RangeRounds(closed, groups, [])

    def sets(self, ranges: int) -> RangeShards:
        """Sets of shards, numbered as a cluster with so many ranges does."""
        found: RangeShards = {}
        try:
            for number, one in enumerate(self.shards, 1):
                app, name = text(one["app"], MAX_NAME), text(one["name"], MAX_NAME)
                samples, size, epochs, seed = one["spec"]
                cut = whole(samples, _MAX), whole(size, _MAX), whole(epochs, _MAX)
                spec = ShardSpec(*cut, None if seed is None else whole(seed, (1 << 64) - 1))
                if not spec.possible or number > MAX_SETS:
                    raise FrameError(f"there can be no shards like {spec}")
                upcoming, done = whole(one["upcoming"], spec.total), whole(one["done"], spec.total)
                made = ShardSet(number << GROUP_BITS | group_range(app, ranges), spec, upcoming, done)
                for shard, worker, clock in (wholes(each, _MAX) for each in one["returned"]):
                    made.returned[shard] = Used(worker, clock)
                for worker, shard, clock, before, at in (wholes(each, _MAX) for each in one["doing"]):
                    made.doing.setdefault(worker, {})[shard] = Doing(clock, Used(before, at))
                found.setdefault(app, {})[name] = made
        except (KeyError, TypeError, ValueError) as error:
            raise FrameError(f"a RESTORED's shards cannot be read: {error!r}") from None
        return found
