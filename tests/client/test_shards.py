"""What a worker does with shards that it was given, without a cluster."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace
from typing import Any, cast

from elasticps.client.data_shards import Parts, Shards
from elasticps.client.protocol.fan_out import Answer
from elasticps.client.runtime import Runtime
from elasticps.sharding import ShardSpec
from elasticps.wire.frames import Header, Kind


class Owner:
    """A client whose lease is, each time it looks, the next one of `leases`."""

    app = "app"
    timeout = 5.0

    def __init__(self, *leases: int) -> None:
        self.leases = list(leases)
        self.asked = 0

    def attach(self, shard: tuple[int, int] | None) -> None:
        """Nothing is pushed here."""

    def settle_all(self) -> None:
        """Nothing is outstanding."""

    def registered(self) -> int:
        return self.leases.pop(0)

    def ask_all(self, *_: object) -> list[Answer]:
        self.asked += 1
        document = {"set": 1, "held": [[self.asked, 0, 0, 0]], "done": 0, "total": 9, "decided": [0, []]}
        return [Answer(Header(Kind.SHARDS), json.dumps(document).encode())]


def shards_of(owner: Owner) -> Shards:
    session = SimpleNamespace(committed=0)
    parts = Parts(Runtime(), cast(Any, owner), cast(Any, session), cast(Any, None), None, owner, threading.RLock())
    return Shards(owner, parts, "train", ShardSpec(9, 1, 1, None))


def test_a_shard_is_not_trained_if_the_lease_ran_out_while_it_was_asked_for() -> None:
    owner = Owner(7, 7, 0, 0, 0)
    assert next(shards_of(owner)).index == 2
    assert owner.asked == 2


def test_without_the_coordination_store_shards_are_trained_all_the_same() -> None:
    owner = Owner(0, 0, 0)
    assert next(shards_of(owner)).index == 1
    assert owner.asked == 1
