"""All calls of one thread, in any order, beside a model that knows only the order of the program.

The thread's client, the servers and the leader are the real ones, on virtual time: acknowledgements are slow, servers
die and connections break in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from chaos.sim.cluster import Cluster
from chaos.sim.network import Weather
from chaos.sim.run import virtual
from chaos.sim.threads import Threads
from coordinator.core.view import ClusterConfig
from elasticps.client.client import Client
from elasticps.client.steps import OpenStep
from elasticps.client.tables import DenseTensor, SparseTable
from elasticps.errors import InputError
from elasticps.model.caching import Cache
from elasticps.model.filters import BFloat16, KeyDeltas, KeysOnce, Threshold, Zstd
from elasticps.model.optimizers import Accumulate, Adagrad
from elasticps.model.spec import ASP, BSP, SSP, Consistency, Constant
from tests.sim.conftest import wait_for

DIM, FLOATS, KEYS = 2, 10, 12
LEAST = 5.0
SLOW = Weather(latency_s=0.004)  # of acknowledgements: several operations are under way
RESTART_S = 0.5
PATIENCE_S = 200.0
TABLES = ("plain", "filtered", "trained")
TENSOR = "tensor"
FILTERS: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    "none": ((), ()),
    "short floats": ((BFloat16(),), (BFloat16(),)),
    "keys once": ((KeysOnce(), Zstd()), (KeysOnce(),)),
    "deltas": ((KeyDeltas(),), (KeyDeltas(),)),
    "threshold": ((Threshold(LEAST),), ()),
}
"""Of pushes and of pulls. What is below the threshold is kept; all others lose nothing of these numbers."""
CONSISTENCIES: dict[str, Consistency] = {"asp": ASP(), "ssp": SSP(staleness=2), "bsp": BSP()}
Row = NDArray[np.float32]
States = list[tuple[Row, Row]]
"""What a row may be: weights, and slots."""


class ModelTable:
    """What a table holds after the operations so far. `now`: rows as steps and changes have left them; `opened`: rows
    that the open step has gradients of, as they are with these; `kept`: what is to be pushed with the next gradients
    of rows, as it is below `least`."""

    def __init__(self, init: float, trains: bool, dim: int, least: float = 0.0) -> None:
        self.kept: dict[int, float] = {}
        self._least = least
        self.now: dict[int, tuple[Row, Row]] = {}
        self.opened: dict[int, tuple[Row, Row]] = {}
        self._new = np.full(dim, init, np.float32), np.zeros(dim if trains else 0, np.float32)
        self._trains = trains

    def of(self, key: int) -> tuple[Row, Row]:
        return self.now.get(key, self._new)

    def states(self, key: int) -> States:
        """What may be shown of a row now."""
        return [self.of(key), *([self.opened[key]] if key in self.opened else [])]

    def push(self, grads: dict[int, float], share: float, lr: float) -> None:
        for key, gradient in grads.items():
            whole = self.kept.pop(key, 0.0) + gradient
            if abs(whole) < self._least:
                self.kept[key] = whole
                continue
            (w, s), amount = self.of(key), share * whole
            if self._trains:
                s = (s + amount * amount).astype(np.float32)
                self.opened[key] = (w - lr * amount / np.sqrt(s)).astype(np.float32), s
            else:
                self.opened[key] = (w + amount).astype(np.float32), s

    def commit(self) -> None:
        self.now |= self.opened
        self.opened = {}

    def load(self, key: int, value: float, slot: float) -> None:
        w, s = self._new
        self.now[key] = np.full_like(w, value), np.full_like(s, slot)
        self.kept.pop(key, None)

    def delete(self, keys: Iterable[int]) -> None:
        for key in keys:
            self.now.pop(key, None)
            self.kept.pop(key, None)


@dataclass
class Pending:
    """A pull on its way, and what each of its rows has been since."""

    result: Callable[[], Row]
    target: str
    keys: Sequence[int]
    seen: list[States]


@dataclass
class Story:
    """One program: what runs it, and what it expects."""

    ps: Client
    cluster: Cluster
    handles: dict[str, Any]
    open_table: Callable[[str], SparseTable]
    share: float  # of each gradient that counts: rounds take the mean of all workers'
    least: float = 0.0  # of gradients of the table with filters
    models: dict[str, ModelTable] = field(default_factory=dict)
    step: OpenStep | None = None
    pending: list[Pending] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in TABLES:
            self._forget(name)
        self.models[TENSOR] = ModelTable(0.0, False, 1)
        for at in range(FLOATS):
            self.models[TENSOR].load(at, 1.0, 0.0)

    def _forget(self, name: str) -> None:
        init, least = 3.0 if name == "trained" else 0.0, self.least if name == "filtered" else 0.0
        self.models[name] = ModelTable(init, name == "trained", DIM, least)

    # --- steps ------------------------------------------------------------------------------------------------------

    def _values(self, grads: dict[str, dict[int, float]]) -> dict[Any, Any]:
        values: dict[Any, Any] = {}
        for name, some in grads.items():
            if name == TENSOR:
                given = np.zeros(FLOATS, np.float32)
                given[list(some)] = list(some.values())
                values[self.handles[name]] = given
            else:
                keys = np.array(list(some), np.int64)
                rows = np.repeat(np.array(list(some.values()), np.float32)[:, None], DIM, axis=1)
                values[self.handles[name]] = (
                    np.tile(keys, 2),
                    np.concatenate([rows / 2, rows / 2]),
                )
        return values

    def _pushed(self, grads: dict[str, dict[int, float]], lr: float) -> None:
        for name, some in grads.items():
            self.models[name].push(some, self.share, lr)

    def push(self, grads: dict[str, dict[int, float]], lr: int, how: str) -> None:
        if self.step is not None:
            self.part(grads)
            return
        values = self._values(grads)
        if how == "pull":
            expected = {self.handles[name]: self._keys(name, range(KEYS)) for name in self.handles}
            step, pull = self.ps.push_pull(values, expected, lr=lr)
            self._pushed(grads, lr)
            self._commit()
            for name in self.handles:
                self._later(name, range(self._size(name)), partial(self._of_several, pull, name))
        else:
            step = self.ps.push(values, lr=lr)
            self._pushed(grads, lr)
            self._commit()
            if how == "wait":
                step.result()

    def begin(self, lr: int) -> None:
        if self.step is None:
            self.step, self._lr = self.ps.step(lr=lr), lr
            self.step.push({})

    def part(self, grads: dict[str, dict[int, float]]) -> None:
        """A row, and so a tensor, belongs into one part only."""
        assert self.step is not None
        new = {
            name: {key: amount for key, amount in some.items() if key not in self.models[name].opened}
            for name, some in grads.items()
            if name != TENSOR or not self.models[name].opened
        }
        self.step.push(self._values(new))
        self._pushed(new, self._lr)
        self._note()

    def commit(self, wait: bool) -> None:
        if self.step is not None:
            step, self.step = self.step.commit(), None
            self._commit()
            if wait:
                step.result()

    def _commit(self) -> None:
        for model in self.models.values():
            model.commit()
        self._note()

    # --- pulls ------------------------------------------------------------------------------------------------------

    def _size(self, name: str) -> int:
        return FLOATS if name == TENSOR else KEYS

    def _keys(self, name: str, keys: Iterable[int]) -> NDArray[np.int64] | None:
        return None if name == TENSOR else np.array(list(keys), np.int64)

    def _later(self, name: str, keys: Sequence[int], result: Callable[[], Row]) -> None:
        states = [self.models[name].states(key) for key in keys]
        self.pending.append(Pending(result, name, keys, [list(each) for each in states]))

    def _note(self) -> None:
        """Something has changed: pulls that are on their way may show it."""
        for each in self.pending:
            for key, seen in zip(each.keys, each.seen, strict=True):
                seen += self.models[each.target].states(key)

    def _of_several(self, pull: Any, name: str) -> Row:
        rows: Row = pull.result()[self.handles[name]]
        return rows

    def pull(self, name: str, keys: list[int], read: str, exact: bool, how: str) -> None:
        handle = self.handles[name]
        if isinstance(handle, DenseTensor):
            keys = list(range(FLOATS))
            if how == "take":
                self._later(name, keys, lambda: handle.take(keys, read=read, exact=exact))
            elif how == "many":
                self._later(name, keys, self.ps.pull_many([handle])[0].result)
            else:
                self._later(name, keys, handle.pull_async(read=read, exact=exact).result)
        elif how in ("many", "take"):
            requested = self.ps.pull_async({handle: np.array(keys, np.int64)}, read=read, exact=exact)
            self._later(name, keys, partial(self._of_several, requested, name))
        else:
            self._later(name, keys, handle.pull_async(np.array(keys, np.int64), read=read, exact=exact).result)
        if how != "later":
            self.collect(len(self.pending) - 1)

    def collect(self, at: int) -> None:
        """Waits for a pull."""
        if self.pending:
            each = self.pending.pop(at % len(self.pending))
            rows = each.result().reshape(len(each.keys), -1)
            for key, row, seen in zip(each.keys, rows, each.seen, strict=True):
                assert any(np.allclose(row, w, atol=1e-4) for w, _ in seen), (each.target, key, row, seen)

    def slots(self, name: str, keys: list[int]) -> None:
        found = self.handles[name].slots(keys)
        assert list(found) == (["sum"] if name == "trained" else [])
        for rows in found.values():
            for key, row in zip(keys, rows, strict=True):
                states = self.models[name].states(key)
                assert any(np.allclose(row, s, atol=1e-4) for _, s in states), (name, key, row, states)

    def fetch(self, name: str, keys: list[int]) -> None:
        if self.handles[name].cache is not None:
            self.handles[name].fetch(keys, 1)

    # --- what there is ----------------------------------------------------------------------------------------------

    def ask(self, name: str, what: str) -> None:
        table, model = self.handles[name], self.models[name]
        least, most = set(model.now), set(model.now) | set(model.opened)
        if what == "keys":
            found = np.concatenate([np.empty(0, np.int64), *table.keys(3)]).tolist()
            assert len(found) == len(set(found))
            assert least <= set(found) <= most, (found, least)
        elif what == "items":
            found = {int(key): row for keys, rows in table.items(3) for key, row in zip(keys, rows, strict=True)}
            assert least <= found.keys() <= most, (found, least)
            for key, row in found.items():
                assert any(np.allclose(row, w, atol=1e-4) for w, _ in model.states(key)), (name, key, row)
        elif what == "sum":
            total = table.reduce("sum")
            if not model.opened:
                assert np.isclose(total, sum(float(w.sum()) for w, _ in model.now.values()), atol=1e-2)
        else:
            asks: dict[str, Callable[[], int]] = {
                "len": lambda: len(table),
                "count": lambda: int(table.reduce("count")),
                "tables": lambda: self.ps.tables()[name].rows,
            }
            assert len(least) <= asks[what]() <= len(most), (name, least)

    # --- changes past the optimizer ---------------------------------------------------------------------------------

    @contextmanager
    def _behind(self) -> Iterator[None]:
        """What has to come behind all steps: not while one is open."""
        if self.step is None:
            yield
        else:
            with pytest.raises(InputError, match=r"is still open: commit it, .*before"):
                yield

    def load(self, name: str, keys: list[int], value: int, with_slots: bool) -> None:
        table, model = self.handles[name], self.models[name]
        if isinstance(table, DenseTensor):
            keys = list(range(FLOATS))
            with self._behind():
                table.load(np.full(FLOATS, value, np.float32))
        else:
            keys = sorted(set(keys))
            floats = np.full((len(keys), DIM), value, np.float32)
            slots = {"sum": floats * 0 + 4} if with_slots and name == "trained" else None
            with self._behind():
                table.load(keys, floats, slots=slots)
        if self.step is None:
            for key in keys:
                model.load(key, value, 4.0 if with_slots else 0.0)
            self._note()

    def delete(self, name: str, keys: list[int]) -> None:
        with self._behind():
            self.handles[name].delete(keys)
        if self.step is None:
            self.models[name].delete(keys)
            self._note()

    def clear(self, name: str, by_name: bool) -> None:
        with self._behind():
            if by_name:
                self.ps.clear_table(name)
            else:
                self.handles[name].clear()
        if self.step is None:
            self.models[name].delete(list({**self.models[name].now, **self.models[name].kept}))
            self._note()

    def drop(self, name: str) -> None:
        while self.pending:  # nobody can say any more what these were
            self.collect(0)
        with self._behind():
            self.ps.drop_table(name)
        if self.step is None:
            self._forget(name)
            self.handles[name] = self.open_table(name)

    # --- all else ---------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        self.ps.flush()

    def resume(self) -> None:
        self.ps.resume()

    def sleep(self, seconds: float) -> None:
        self.ps._parts._runtime.sleep(seconds)

    def kill(self, name: str) -> None:
        """A server dies soon, and comes back, if that loses nothing."""

        def dies() -> None:
            if self.cluster.whole(name):
                self.cluster.kill(self.cluster.servers[name].process, power=False)
                self.cluster.clock.after(RESTART_S, self.cluster.start_server, name)

        self.cluster.clock.after(0.002, dies)

    def tear(self, at: int) -> None:
        """A connection breaks."""
        sockets = list(self.cluster.network.sockets)
        self.cluster.network.reset(sockets[at % len(sockets)])

    def end(self) -> None:
        self.commit(wait=False)
        while self.pending:
            self.collect(0)
        self.ps.flush()
        for name in self.handles:
            self.pull(name, list(range(KEYS)), "tail", True, "now")
            self.pull(name, list(range(KEYS)), "tail", False, "now")
        for name in TABLES:
            self.ask(name, "items")
            self.slots(name, list(range(KEYS)))


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
def test_every_call_comes_behind_those_before_it(
    program: Program, consistency: str, filters: str, staleness: int | None, others: bool, seed: int
) -> None:
    run(program, CONSISTENCIES[consistency], FILTERS[filters], staleness, others, seed)
