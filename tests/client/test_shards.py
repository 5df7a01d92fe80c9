"""A worker and its shards, without a cluster."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from coordinator.core.view import WorkerInfo
from elasticps.client.core.data_shards import Need, ShardClaims
from elasticps.client.core.fan_out import Answer, Request
from elasticps.client.data_shards import Shards
from elasticps.client.runtime import Runtime
from elasticps.model.sharding import ShardSpec
from elasticps.wire.clocks import ClocksFrame
from elasticps.wire.frames import HEADER_BYTES, Header, Kind, unpack_header


class Owner:
    """A client whose lease is, each time it looks, the next one of `leases`."""

    timeout_s = 5.0

    def __init__(self, *leases: int) -> None:
        self.leases = list(leases)
        self.checked = 0

    barrier = None
    runtime = Runtime()
    worker = WorkerInfo(7, "w", 1, "app")

    def attach(self, shard: tuple[int, int] | None) -> None:
        """Nothing is pushed here."""

    def settle_all(self) -> None:
        """Nothing is outstanding."""

    def closed(self) -> int:
        return 0

    def registered(self) -> int:
        return self.leases.pop(0)

    def ask_all(self, *_: object) -> list[Answer]:
        self.checked += 1
        document = {"set": 1, "held": [[self.checked, 0, 0, 0]], "done": 0, "total": 9}
        return [Answer(Header(Kind.SHARDS), json.dumps(document).encode())]


def shards_of(owner: Owner) -> Shards:
    return Shards(cast(Any, owner), cast(Any, owner), cast(Any, owner), "train", ShardSpec(9, 1, 1, None))


def test_a_shard_is_not_trained_if_the_lease_ran_out_during_its_request() -> None:
    owner = Owner(7, 7, 0, 0, 0)
    assert next(shards_of(owner)).index == 2
    assert owner.checked == 2


def test_without_the_coordination_store_shards_are_trained_all_the_same() -> None:
    owner = Owner(0, 0, 0)
    assert next(shards_of(owner)).index == 1
    assert owner.checked == 1


def test_a_lost_worker_has_trained_a_shard_when_its_step_is_committed_and_not_before() -> None:
    claims = ShardClaims("app", "train", ShardSpec(9, 1, 1, None), False, 5.0, lambda: 0)
    script = claims.fetch()

    def pending(done: int) -> list[Answer]:
        held = [[0, 3, 2, 0]] * (not done)
        document = {"set": 1, "held": held, "done": done, "total": 1}
        return [Answer(Header(Kind.SHARDS), json.dumps(document).encode())]

    def clocks(wish: object, applied: int, committed: int) -> list[Answer]:
        assert isinstance(wish, Request)
        routes = SimpleNamespace(view=SimpleNamespace(ranges=1), headless=False, share_of={})
        wish.questions(cast(Any, routes))
        ranges, *progress = (np.array([value], np.int64) for value in (0, applied << 16, committed << 16))
        frame = ClocksFrame(ranges, progress[0], progress[1]).frame(0, 1)
        return [Answer(unpack_header(memoryview(frame), 0, len(frame)), frame[HEADER_BYTES:])]

    assert next(script) is Need.ATTACH_NOTHING
    assert isinstance(script.send([]), Request)
    waits = script.send(clocks(script.send(pending(done=0)), applied=2, committed=1))
    assert isinstance(waits, float)
    asks = script.send(clocks(script.send([]), applied=2, committed=2))
    assert isinstance(asks, Request)
    assert "shards" in asks.what
    with pytest.raises(StopIteration) as end:
        script.send(pending(done=1))
    assert end.value.value is False
