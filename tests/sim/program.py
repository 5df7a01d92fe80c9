"""A program of one thread: its calls on a client beside a model that knows only the order of the program."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from chaos.sim.cluster import Cluster
from elasticps.client.client import Client
from elasticps.client.steps import OpenStep
from elasticps.client.tables import DenseTensor, SparseTable
from elasticps.errors import InputError

DIM, FLOATS, KEYS = 2, 10, 12
RESTART_S = 0.5
TABLES = ("plain", "filtered", "trained")
TENSOR = "tensor"
Row = NDArray[np.float32]
States = list[tuple[Row, Row]]
"""The values that a row may have: weights and slots."""


class ModelTable:
    """The expected content of a table.

    `now`: its rows after all closed steps and changes; `opened`: rows with gradients of the open step, as they are with
    these; `retained`: gradients below `least`, which are pushed with the next gradients of their rows.
    """

    def __init__(self, init: float, trains: bool, dim: int, least: float = 0.0) -> None:
        self.retained: dict[int, float] = {}
        self._least = least
        self.now: dict[int, tuple[Row, Row]] = {}
        self.opened: dict[int, tuple[Row, Row]] = {}
        self._new = np.full(dim, init, np.float32), np.zeros(dim if trains else 0, np.float32)
        self._trains = trains

    def of(self, key: int) -> tuple[Row, Row]:
        return self.now.get(key, self._new)

    def states(self, key: int) -> States:
        """The values that a pull of a row may show now."""
        return [self.of(key), *([self.opened[key]] if key in self.opened else [])]

    def push(self, grads: dict[int, float], share: float, lr: float) -> None:
        for key, gradient in grads.items():
            whole = self.retained.pop(key, 0.0) + gradient
            if abs(whole) < self._least:
                self.retained[key] = whole
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
        self.retained.pop(key, None)

    def delete(self, keys: Iterable[int]) -> None:
        for key in keys:
            self.now.pop(key, None)
            self.retained.pop(key, None)


@dataclass
class Pending:
    """A pull on its way, and the values that each of its rows has had since it began."""

    result: Callable[[], Row]
    target: str
    keys: Sequence[int]
    seen: list[States]


@dataclass
class Story:
    """A program under way: runs its calls on the client and on the model, and compares the results."""

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
    def _refused_while_open(self) -> Iterator[None]:
        """A change that comes after all steps: it is refused while a step is open."""
        if self.step is None:
            yield
        else:
            with pytest.raises(InputError, match=r"is still open: commit it, .*before"):
                yield

    def load(self, name: str, keys: list[int], value: int, with_slots: bool) -> None:
        table, model = self.handles[name], self.models[name]
        if isinstance(table, DenseTensor):
            keys = list(range(FLOATS))
            with self._refused_while_open():
                table.load(np.full(FLOATS, value, np.float32))
        else:
            keys = sorted(set(keys))
            floats = np.full((len(keys), DIM), value, np.float32)
            slots = {"sum": floats * 0 + 4} if with_slots and name == "trained" else None
            with self._refused_while_open():
                table.load(keys, floats, slots=slots)
        if self.step is None:
            for key in keys:
                model.load(key, value, 4.0 if with_slots else 0.0)
            self._note()

    def delete(self, name: str, keys: list[int]) -> None:
        with self._refused_while_open():
            self.handles[name].delete(keys)
        if self.step is None:
            self.models[name].delete(keys)
            self._note()

    def clear(self, name: str, by_name: bool) -> None:
        with self._refused_while_open():
            if by_name:
                self.ps.clear_table(name)
            else:
                self.handles[name].clear()
        if self.step is None:
            self.models[name].delete(list({**self.models[name].now, **self.models[name].retained}))
            self._note()

    def drop(self, name: str) -> None:
        while self.pending:  # nobody can say any more what these were
            self.collect(0)
        with self._refused_while_open():
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
