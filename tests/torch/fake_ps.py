"""Servers and client in memory, with the client's API: what the torch layer needs, as plainly as possible."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elasticps.model.spec import SGD, Adagrad, Adam, Constant, Init, ServerOptimizer, TableSpec, Zeros

Floats = NDArray[np.float32]


def initial_row(init: Init, key: int, dim: int) -> Floats:
    """Any function of (seed, key) does for a fake."""
    if isinstance(init, Zeros):
        return np.zeros(dim, np.float32)
    if isinstance(init, Constant):
        return np.full(dim, init.value, np.float32)
    row: Floats = np.random.default_rng([init.seed, key & 0xFFFFFFFF]).normal(size=dim).astype(np.float32)
    return row


def update(spec: ServerOptimizer, weight: Floats, slots: dict[str, Floats], gradient: Floats, lr: float) -> None:
    if isinstance(spec, SGD):
        weight -= lr * gradient
    elif isinstance(spec, Adagrad):
        total = slots.setdefault("sum", np.zeros_like(weight))
        total += gradient * gradient
        weight -= lr * gradient / (np.sqrt(total) + spec.eps)
    elif isinstance(spec, Adam):
        first, second = slots.setdefault("m", np.zeros_like(weight)), slots.setdefault("v", np.zeros_like(weight))
        updates = slots.setdefault("step", np.zeros((), np.float32))
        updates += 1
        first += (1 - spec.betas[0]) * (gradient - first)
        second += (1 - spec.betas[1]) * (gradient * gradient - second)
        corrected = np.sqrt(second / (1 - spec.betas[1] ** updates)) + spec.eps
        weight -= lr / (1 - spec.betas[0] ** updates) * first / corrected
    else:
        raise NotImplementedError(type(spec))


@dataclass(eq=False)
class Target:
    name: str
    spec: ServerOptimizer
    weights: dict[int, Floats] = field(default_factory=dict)
    slots: dict[int, dict[str, Floats]] = field(default_factory=dict)

    def apply(self, key: int, weight: Floats, gradient: Floats, clock: int, lr: float | None) -> None:
        rate = self.spec.rate(clock, lr)
        update(self.spec, self.weights.setdefault(key, weight), self.slots.setdefault(key, {}), gradient, rate)


@dataclass
class Done:
    value: Any
    clock: int = 0

    def result(self, timeout: float | None = None) -> Any:
        return self.value

    def done(self) -> bool:
        return True


@dataclass(eq=False)
class SparseTable:
    target: Target
    dim: int
    init: Init
    rate_set: Any = None
    pulls: list[list[int]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.target.name

    @property
    def optimizer(self) -> ServerOptimizer:
        return self.target.spec

    @property
    def spec(self) -> TableSpec:
        return TableSpec("t", self.dim, self.optimizer)

    def row(self, key: int) -> Floats:
        stored = self.target.weights.get(key)
        return initial_row(self.init, key, self.dim) if stored is None else stored

    def pull(self, keys: NDArray[np.int64], out: Floats | None = None, exact: bool = False) -> Floats:
        assert keys.dtype == np.int64
        assert len(np.unique(keys)) == len(keys) > 0
        self.pulls.append(keys.tolist())
        rows = np.array([self.row(key) for key in keys.tolist()], np.float32)
        if out is not None:
            out[...] = rows
        return rows

    def keys(self) -> Iterator[NDArray[np.int64]]:
        return (np.array([key]) for key in list(self.target.weights))

    def load(self, keys: NDArray[np.int64], rows: Floats) -> None:
        assert rows.dtype == np.float32
        for key, row in zip(keys.tolist(), rows, strict=True):
            self.target.weights[key], self.target.slots[key] = row.copy(), {}

    def drop_feedback(self) -> None:
        """Keeps none anyway."""

    def delete(self, keys: NDArray[np.int64]) -> None:
        for key in keys.tolist():
            self.target.weights.pop(key, None)

    def pull_async(self, keys: NDArray[np.int64], out: Floats, read: str = "tail", exact: bool = False) -> Done:
        out[...] = self.pull(keys)
        return Done(out)

    def push(self, value: tuple[NDArray[np.int64], Floats], clock: int, lr: float | None) -> None:
        keys, gradients = value
        assert keys.dtype == np.int64
        assert gradients.dtype == np.float32
        assert gradients.shape == (len(keys), self.dim)
        for key in np.unique(keys):
            total = gradients[keys == key].sum(axis=0, dtype=np.float32)
            self.target.apply(int(key), self.row(int(key)), total, clock, lr)


@dataclass(eq=False)
class DenseTensor:
    target: Target
    shape: tuple[int, ...]
    rate_set: Any = None

    @property
    def name(self) -> str:
        return self.target.name

    @property
    def optimizer(self) -> ServerOptimizer:
        return self.target.spec

    @property
    def spec(self) -> TableSpec:
        return TableSpec.dense("t", self.shape, self.optimizer)

    def pull(self, out: Floats | None = None) -> Floats:
        assert out is None
        copy: Floats = self.target.weights[0].copy()
        return copy

    def pull_async(self) -> Done:
        return Done(self.pull())

    def load(self, values: Floats) -> None:
        assert values.shape == self.shape
        self.target.weights[0], self.target.slots[0] = values.copy(), {}

    def push(self, value: Floats, clock: int, lr: float | None) -> None:
        assert value.dtype == np.float32
        assert value.shape == self.shape
        self.target.apply(0, self.target.weights[0], value, clock, lr)


@dataclass(eq=False)
class OpenStep:
    client: FakeClient
    clock: int
    lr: Mapping[Any, float]
    sent: set[str] = field(default_factory=set)
    committed: bool = False

    def push(self, grads: Mapping[Any, Any]) -> None:
        assert not self.committed
        names = [target.name for target in grads]
        assert self.sent.isdisjoint(names), f"twice in one step: {self.sent & set(names)}"
        self.sent.update(names)
        self.client.log.append(names)
        for target, value in grads.items():
            target.push(value, self.clock, self.lr.get(target))

    def commit(self) -> Done:
        assert not self.committed
        self.committed = True
        self.client.log.append(self.clock)
        return Done(None, self.clock)


@dataclass(eq=False)
class FakeClient:
    """`log` has the names of each part that left, and the clock of each commit."""

    targets: dict[str, Target] = field(default_factory=dict)  # shared by the workers of one cluster
    tables: dict[str, SparseTable] = field(default_factory=dict)
    filters: dict[str, dict[str, Any]] = field(default_factory=dict)
    log: list[list[str] | int] = field(default_factory=list)
    clock: int = 0
    collective: bool = False
    pulled: list[list[str]] = field(default_factory=list)  # names of the tables of each pull of several

    def table(
        self, name: str, dim: int, optimizer: ServerOptimizer, init: Init, dtype: str = "float32", cache: object = None,
        admission: object = None, eviction: object = (), usage: str = "", **filters: Any,
    ) -> SparseTable:  # fmt: skip
        target = self.targets.setdefault(name, Target(name, optimizer))
        assert target.spec == optimizer
        self.filters[name] = filters
        return self.tables.setdefault(name, SparseTable(target, dim, init))

    def tensor(self, name: str, init: Floats, optimizer: ServerOptimizer, **filters: Any) -> DenseTensor:
        assert init.dtype == np.float32
        target = self.targets.setdefault(name, Target(name, optimizer))
        assert target.spec == optimizer
        target.weights.setdefault(0, init.copy())
        self.filters[name] = filters
        return DenseTensor(target, init.shape)

    def tensors(
        self, values: Mapping[str, Any], *, optimizer: Callable[[str], ServerOptimizer], **filters: Any
    ) -> dict[str, DenseTensor]:
        return {name: self.tensor(name, init=v, optimizer=optimizer(name), **filters) for name, v in values.items()}

    def pull_many(self, tensors: list[DenseTensor], outs: list[Floats] | None = None) -> list[Done]:
        pulled = [tensor.pull_async() for tensor in tensors]
        for read, out in zip(pulled, outs or (), strict=outs is not None):
            out[...] = read.value
        return pulled

    def pull_async(self, keys: Mapping[Any, Any], out: Mapping[Any, Floats], **_: Any) -> Done:
        tables = {table: some for table, some in keys.items() if isinstance(table, SparseTable)}
        if tables:
            self.pulled.append([table.name for table in tables])
        dense = {tensor: tensor.pull() for tensor in keys if isinstance(tensor, DenseTensor)}
        return Done(dense | {table: table.pull(some, out[table]) for table, some in tables.items() if len(some)})

    def push_pull(
        self, grads: Mapping[Any, Any], keys: Mapping[Any, Any], out: Mapping[Any, Floats], *,
        step: OpenStep | None = None, lr: Mapping[Any, float] | None = None,
    ) -> tuple[Done, Done]:  # fmt: skip
        step = self.step(lr) if step is None else step
        if grads:
            step.push(grads)
        return step.commit(), self.pull_async(keys, out)

    def step(self, lr: Mapping[Any, float] | None = None) -> OpenStep:
        self.clock += 1
        return OpenStep(self, self.clock, lr or {})

    def push(self, grads: Mapping[Any, Any], lr: Mapping[Any, float] | None = None) -> Done:
        step = self.step(lr)
        if grads:
            step.push(grads)
        return step.commit()

    @property
    def committed(self) -> int:
        return self.clock

    def close(self) -> None:
        """Nothing to close."""

    @property
    def parts(self) -> list[list[str]]:
        return [entry for entry in self.log if isinstance(entry, list)]

    def weight(self, name: str) -> Floats:
        return self.targets[name].weights[0]
