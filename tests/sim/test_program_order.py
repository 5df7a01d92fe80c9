"""All calls of one thread, in any order, beside a model that knows only the order of the program.

The thread's client, the servers and the leader are the real ones, on virtual time: acknowledgements are slow, servers
die and connections break in between.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from chaos.sim.cluster import Cluster
from chaos.sim.network import Weather
from chaos.sim.run import virtual
from chaos.sim.threads import Threads
from coordinator.core.view import ClusterConfig
from elasticps.client.client import Client
from elasticps.client.tables import SparseTable
from elasticps.model.caching import Cache
from elasticps.model.filters import BFloat16, KeyDeltas, KeysOnce, Threshold, Zstd
from elasticps.model.optimizers import Accumulate, Adagrad
from elasticps.model.spec import ASP, BSP, SSP, Consistency, Constant
from tests.sim.conftest import wait_for
from tests.sim.program import DIM, FLOATS, KEYS, TABLES, TENSOR, Story

LEAST = 5.0
SLOW = Weather(latency_s=0.004)  # of acknowledgements: several operations are under way
PATIENCE_S = 200.0
FILTERS: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    "none": ((), ()),
    "short floats": ((BFloat16(),), (BFloat16(),)),
    "keys once": ((KeysOnce(), Zstd()), (KeysOnce(),)),
    "deltas": ((KeyDeltas(),), (KeyDeltas(),)),
    "threshold": ((Threshold(LEAST),), ()),
}
"""Filters of pushes and of pulls. Threshold retains small gradients; all others are exact for these numbers."""
CONSISTENCIES: dict[str, Consistency] = {"asp": ASP(), "ssp": SSP(staleness=2), "bsp": BSP()}
keys_of = st.lists(st.integers(0, KEYS - 1), min_size=1, max_size=6)
table = st.sampled_from(TABLES)
target = st.sampled_from([*TABLES, TENSOR])
grads = st.dictionaries(
    target, st.dictionaries(st.integers(0, FLOATS - 1), st.sampled_from([2.0, -4.0, 6.0]), min_size=1, max_size=6),
    min_size=1, max_size=3,
)  # fmt: skip
rate = st.sampled_from([1, 2])
CALLS: dict[str, tuple[int, list[st.SearchStrategy[Any]]]] = {
    "push": (12, [grads, rate, st.sampled_from(["", "", "", "wait", "pull"])]),
    "begin": (2, [rate]),
    "commit": (6, [st.booleans()]),
    "pull": (
        10,
        [
            target,
            keys_of,
            st.sampled_from(["tail", "any"]),
            st.booleans(),
            st.sampled_from(["now", "later", "take", "many"]),
        ],
    ),
    "collect": (2, [st.integers(0, 3)]),
    "slots": (3, [table, keys_of]),
    "fetch": (2, [table, keys_of]),
    "ask": (12, [table, st.sampled_from(["keys", "items", "len", "count", "sum", "tables"])]),
    "load": (8, [target, keys_of, st.integers(-9, 9), st.booleans()]),
    "delete": (5, [table, keys_of]),
    "clear": (4, [table, st.booleans()]),
    "drop": (4, [table]),
    "flush": (1, []),
    "resume": (1, []),
    "sleep": (4, [st.sampled_from([0.0, 0.002, 0.02])]),
    "kill": (2, [st.sampled_from(["s0", "s1", "s2"])]),
    "tear": (2, [st.integers(0, 40)]),
}
"""Methods of a `Story`: how often they are called, and with what."""
NAMES = [name for name, (weight, _) in CALLS.items() for _ in range(weight)]
call = st.sampled_from(NAMES).flatmap(lambda name: st.tuples(st.just(name), *CALLS[name][1]))
before = st.none() | st.integers(0, 1 << 16)
"""What a call has to come behind: nothing more, or a push of `some_grads`."""
Program = list[tuple[int | None, tuple[Any, ...]]]


def some_grads(seed: int) -> dict[str, dict[int, float]]:
    """Gradients of all targets, of half of the keys."""
    random = np.random.default_rng(seed)
    return {
        name: {int(key): float(random.choice([2, -4, 6])) for key in random.choice(FLOATS, FLOATS // 2, replace=False)}
        for name in (*TABLES, TENSOR)
    }


def run(
    program: Program, consistency: Consistency, filters: tuple[tuple[Any, ...], tuple[Any, ...]],
    staleness: int | None, others: bool, seed: int,
) -> None:  # fmt: skip
    """Runs a program to its end. others: a second worker trains, too, whose gradients are nothing."""
    over, training = list[bool](), list[bool]()
    cache = None if staleness is None or isinstance(consistency, BSP) else Cache(rows=8, staleness=staleness)

    def open_table(ps: Client, name: str) -> SparseTable:
        if name == "trained":
            return ps.table(name, dim=DIM, optimizer=Adagrad(lr=1.0, eps=1e-30), init=Constant(3.0), cache=cache)
        if name == "filtered":
            return ps.table(name, dim=DIM, optimizer=Accumulate(), push=filters[0], pull=filters[1], cache=cache)
        return ps.table(name, dim=DIM, optimizer=Accumulate())

    def main(threads: Threads) -> None:
        with found.connect(threads, "w0", consistency, 3, "app") as ps:
            handles: dict[str, Any] = {name: open_table(ps, name) for name in TABLES}
            handles[TENSOR] = ps.tensor(TENSOR, init=np.ones(FLOATS, np.float32), optimizer=Accumulate())
            ps.resume()
            while others and not training:
                threads.sleep(0.01)
            share = 0.5 if others and isinstance(consistency, BSP) else 1.0
            least = LEAST if any(isinstance(each, Threshold) for each in filters[0]) else 0.0
            story = Story(ps, found, handles, lambda name: open_table(ps, name), share, least)
            for before, (call, *arguments) in program:
                if before is not None:
                    story.push(some_grads(before), 1, "")
                getattr(story, call)(*arguments)
            story.end()
            over.append(True)

    def other(threads: Threads) -> None:
        with found.connect(threads, "w1", consistency, 3, "app") as ps:
            ps.resume()
            training.append(True)
            while not over:
                ps.push({}).result()
                threads.sleep(0.002)

    with virtual() as install:
        found = Cluster(seed, SLOW, ClusterConfig(ranges=8, replicas=2, min_servers=3))
        install(found)
        found.start_leader("c0")
        for i in range(3):
            found.start_server(f"s{i}")
        found.start_worker("w0", main)
        if others:
            found.start_worker("w1", other)
        wait_for(found, lambda: bool(over), PATIENCE_S)
        found.end()


@settings(max_examples=12, phases=[Phase.explicit, Phase.generate, Phase.shrink])
@given(
    program=st.lists(st.tuples(before, call), min_size=10, max_size=30),
    consistency=st.sampled_from(list(CONSISTENCIES)),
    filters=st.sampled_from(list(FILTERS)),
    staleness=st.sampled_from([None, 0, 2]),
    others=st.booleans(),
    seed=st.integers(0, 1 << 16),
)
def test_a_worker_s_calls_take_effect_in_their_order(
    program: Program, consistency: str, filters: str, staleness: int | None, others: bool, seed: int
) -> None:
    run(program, CONSISTENCIES[consistency], FILTERS[filters], staleness, others, seed)
