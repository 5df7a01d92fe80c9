"""The kernels of a worker, compiled before it takes a place in a cluster: afterwards no step waits for a compiler."""

from __future__ import annotations

from functools import cache

import numpy as np

from coordinator.core.view import ServerInfo, View
from elasticps.client.core.cache_index import CacheIndex
from elasticps.client.core.routing import Routes, place_rows, plan_pull, plan_push
from elasticps.client.core.session import PushSession
from elasticps.client.filtering import RowMemory
from elasticps.client.pull import PullPart, PullsInFlight, ServerPull, joined
from elasticps.client.pull_batch import ANSWERS, take_answers
from elasticps.client.pull_layouts import Query
from elasticps.client.push_batch import Packer, PushSource
from elasticps.kernels import compiled_once
from elasticps.kernels.hashing import table_salt
from elasticps.wire.pool import Pool
from elasticps.wire.stream import STAGING_BYTES

_RANGES, _DIM = 2, 2


@cache
def warm() -> None:
    """Compiles them, or loads them from the cache, once in a process, by a push and a pull that go nowhere."""
    with compiled_once(__file__):
        nobody = np.full(_RANGES, -1, np.int32)
        info, since = ServerInfo("nobody", 1, "127.0.0.1:1"), np.ones(_RANGES, np.int64)
        view = View("warm", 1, _RANGES, 1, (info,), np.zeros((_RANGES, 1), np.int32), nobody, since, "")
        routes, salt, keys = Routes(View.decode(view.encode())), table_salt(1), np.arange(3)
        rows = np.zeros((len(keys), _DIM), np.float32)

        packer = Packer(Pool(STAGING_BYTES))
        sparse = PushSource(1, salt.view(np.int64).item(), _DIM, -1, keys, rows, rows[0])
        part = packer.pack([sparse, sparse._replace(floats=rows.size, grads=rows.reshape(-1))], routes)
        packer.fill(part, 0, 1)
        part.writes()  # what a push is cut from again when its ranges have another head
        plan = plan_push(keys, salt, routes)

        pulls = PullsInFlight(
            routes, PushSession(1, routes.view.ranges, 1), lambda frames: None, lambda member, request: None
        )
        finish, query = lambda pull, timeout: None, Query(1, salt, _DIM, "t")
        one, *others = [ServerPull(finish, query, keys, rows) for _ in range(3)]
        pulls.start([several := joined(finish, others), one], 0)
        several.layout.floats(several, None, 0, len(keys))
        several.layout.plan(several, PullPart(several, None, keys, len(keys), None), routes, routes.tails)
        pulls.adopt(routes)
        take_answers(np.zeros(STAGING_BYTES, np.uint8), 0, 0, pulls.landing.slots, np.empty(ANSWERS, np.int64))
        plan_pull(keys, salt, routes, routes.tails)
        place_rows(rows, plan.order, rows)


def warm_filters() -> None:
    """Those too that only some workers use: of filters that keep what they drop, and of caches."""
    keys, index = np.arange(3), CacheIndex(4, slots=True)
    RowMemory(len(keys), _DIM)
    where, _ = index.find(keys)
    index.judge(where, 1, 1, 1)
    index.pushed(keys, applies=True)
