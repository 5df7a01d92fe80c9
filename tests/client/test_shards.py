"""What a worker does with shards that it was given, without a cluster."""

from __future__ import annotations

import json
from typing import Any, cast

from coordinator.view import WorkerInfo
from elasticps.client.data_shards import Shards
from elasticps.client.protocol.fan_out import Answer
from elasticps.client.runtime import Runtime
from elasticps.sharding import ShardSpec
from elasticps.wire.frames import Header, Kind


class Owner:
    """A client whose lease is, each time it looks, the next one of `leases`."""

    timeout_s = 5.0

    def __init__(self, *leases: int) -> None:
        self.leases = list(leases)
        self.asked = 0

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
        self.asked += 1
        document = {"set": 1, "held": [[self.asked, 0, 0, 0]], "done": 0, "total": 9, "decided": [0, []]}
        return [Answer(Header(Kind.SHARDS), json.dumps(document).encode())]


def shards_of(owner: Owner) -> Shards:
    return Shards(cast(Any, owner), cast(Any, owner), cast(Any, owner), "train", ShardSpec(9, 1, 1, None))


def test_a_shard_is_not_trained_if_the_lease_ran_out_while_it_was_asked_for() -> None:
    owner = Owner(7, 7, 0, 0, 0)
    assert next(shards_of(owner)).index == 2
    assert owner.asked == 2


def test_without_the_coordination_store_shards_are_trained_all_the_same() -> None:
    owner = Owner(0, 0, 0)
    assert next(shards_of(owner)).index == 1
    assert owner.asked == 1
