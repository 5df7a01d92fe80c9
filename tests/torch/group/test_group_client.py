"""Ranks in threads, with real sockets and memory between them, beside one worker that does the same alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import elasticps as eps
from elasticps.client import Shard
from elasticps.torch import (
    Embedding,
    EmbeddingBag,
    EmbeddingBagCollection,
    GroupClient,
    Optimizer,
    ShardedDataset,
    TableConfig,
)
from elasticps.torch.group.step import LITTLE
from tests.torch.fake_ps import FakeClient
from tests.torch.group.ranks import clients, together

STEPS = 4
BATCH = 6


def model_of(ps: Any) -> nn.Sequential:
    bags = EmbeddingBag(
        ps, "words", 4, "sum", optimizer=eps.Adagrad(lr=0.1), init=eps.Normal(std=0.1, seed=1), padding_idx=0
    )
    model = nn.Sequential(bags, nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
    with torch.no_grad():
        for parameter in model.parameters():  # threads share torch's generator
            parameter.copy_(torch.linspace(-0.5, 0.7, parameter.numel()).view_as(parameter))
    return model


class Several(nn.Module):
    """Two tables in one layer; one has no ids in some batches of one rank."""

    def __init__(self, ps: Any) -> None:
        super().__init__()
        tables = [TableConfig("words", 4, ["word", "other"]), TableConfig("users", 2)]
        self.rows = EmbeddingBagCollection(ps, tables, optimizer=eps.Adagrad(lr=0.1))
        self.top = nn.Linear(10, 1)
        with torch.no_grad():
            self.top.weight.copy_(torch.linspace(-0.5, 0.7, 10)[None])
            self.top.bias.zero_()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        users = (torch.empty(0, dtype=torch.int64), torch.zeros(len(ids), dtype=torch.int64))
        given = {"word": ids[:, 0], "other": ids[:, 1:], "users": ids[:, 2] if int(ids.sum()) else users}
        found: torch.Tensor = self.top(self.rows(given).values())
        return found


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of some batches rank 1 has nothing but padding."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    ids = torch.randint(0, 9, (BATCH, 3), generator=generator)
    return (ids * 0 if rank == 1 and step == 2 else ids), torch.randn(BATCH, 1, generator=generator)


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    ids, needed = batch(step, rank)
    return nn.functional.mse_loss(model(ids), needed)


def alone(ranks: int) -> FakeClient:
    """Trains one worker that adds up the gradients of all ranks in their order."""
    ps: Any = FakeClient()
    model = model_of(ps)
    optimizer = Optimizer(ps, model, eps.Adam(lr=0.05), overlap=False)
    for step in range(STEPS):
        optimizer.zero_grad()
        with optimizer.accumulate():
            for rank in range(ranks):
                loss_of(model, step, rank).backward()
        optimizer.step()
    return ps  # type: ignore[no-any-return]


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_collection_trains_bit_for_bit_as_with_one_worker(ranks: int) -> None:
    shared, single = FakeClient(), FakeClient()

    def train(ps: GroupClient) -> None:
        model = Several(ps)
        optimizer = Optimizer(ps, model, eps.Adam(lr=0.05))
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, step, ps.rank).backward()
            optimizer.step()

    with clients(shared, ranks) as group:
        together(train, group)
    model = Several(single)
    one: Any = single
    optimizer = Optimizer(one, model, eps.Adam(lr=0.05), overlap=False)
    for step in range(STEPS):
        optimizer.zero_grad()
        with optimizer.accumulate():
            for rank in range(ranks):
                loss_of(model, step, rank).backward()
        optimizer.step()
    assert len(shared.pulled) == STEPS
    for name, target in single.targets.items():
        assert set(target.weights) == set(shared.targets[name].weights)
        for key, row in target.weights.items():
            np.testing.assert_array_equal(shared.targets[name].weights[key], row)


def test_ranks_that_pull_other_tables_end_the_group() -> None:
    def pull(ps: GroupClient) -> None:
        tables = [ps.table(name, dim=2, optimizer=eps.SGD(lr=0.1), init=eps.Constant(1.0)) for name in "ab"]
        assert ps.pull({tables[0]: [1, 2], tables[1]: [ps.rank]})[tables[0]].tolist() == [[1.0, 1.0]] * 2
        ps.pull({tables[ps.rank]: [1]})

    with clients(FakeClient(), 2) as group, pytest.raises(eps.GroupLost, match="not of the same tables"):
        together(pull, group)


@pytest.mark.parametrize(
    ("options", "ranks"), [({}, 1), ({}, 2), ({"pipeline": True}, 3), ({"overlap": False, "pipeline": True}, 2)]
)
@pytest.mark.parametrize("little", [0, LITTLE])
def test_training_equals_that_of_one_worker_bit_for_bit(options: dict[str, Any], ranks: int, little: int) -> None:
    shared = FakeClient()

    def train(ps: GroupClient) -> dict[str, torch.Tensor]:
        model = model_of(ps)
        optimizer = Optimizer(ps, model, eps.Adam(lr=0.05), **options)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, step, ps.rank).backward()
            optimizer.step()
        optimizer.refresh()
        assert ps.clock == STEPS
        assert optimizer.last_step is not None
        assert optimizer.last_step.clock == STEPS
        return {name: value.clone() for name, value in model[1].state_dict().items()}

    with clients(shared, ranks, chunk=7, little=little) as group:
        states = together(train, group)
    expected = alone(ranks)
    assert shared.targets.keys() == expected.targets.keys()
    for name, target in expected.targets.items():
        mine = shared.targets[name]
        assert mine.weights.keys() == target.weights.keys()
        for key, row in target.weights.items():
            np.testing.assert_array_equal(mine.weights[key], row)
            for slot, values in target.slots[key].items():
                np.testing.assert_array_equal(mine.slots[key][slot], values)
    for state in states:
        for name, value in state.items():
            np.testing.assert_array_equal(value.numpy(), shared.weight(f"model.1.{name}"))


@pytest.mark.parametrize("mean", [False, True])
def test_sums_are_the_same_whichever_rank_adds_them(mean: bool) -> None:
    """All ranks together; rank 0 as long as there is little, and when there suddenly is more than there is room for."""
    found = []
    for little in (0, 600, 1 << 30):
        shared = FakeClient()

        def train(ps: GroupClient) -> list[int]:
            random, rooms = np.random.default_rng([7, ps.rank]), []
            tables = [ps.table(n, dim=d, optimizer=eps.SGD(lr=1.0), init=eps.Zeros()) for n, d in (("a", 1), ("b", 5))]
            sizes = (3,), (2, 2), (40,)
            tensors = [ps.tensor(f"d{s}", init=np.zeros(s, np.float32), optimizer=eps.SGD(lr=1.0)) for s in sizes]
            for step in range(12):
                values: dict[Any, Any] = {}
                for table in tables:
                    n = int(random.integers(0, 4)) * (40 if step in (5, 9) and ps.rank == step % 3 else 1)
                    if random.random() < 0.8:
                        rows = random.standard_normal((n, table.dim)).astype(np.float32)
                        values[table] = random.integers(-5, 9, n), rows
                for tensor in tensors:
                    if random.random() < 0.7:
                        values[tensor] = random.standard_normal(tensor.shape).astype(np.float32) * -(0.0**step)
                ps.push(values)
                assert ps.clock == step + 1
                rooms.append(ps._summing.room)
            return rooms

        with clients(shared, 3, mean=mean, chunk=11, little=little) as group:
            rooms = together(train, group)
        assert rooms[0] == rooms[1] == rooms[2]
        assert len(set(rooms[0])) > 1
        found.append(shared.targets)
    for other in found[1:]:
        for name, target in found[0].items():
            assert target.weights.keys() == other[name].weights.keys()
            for key, row in target.weights.items():
                assert row.tobytes() == other[name].weights[key].tobytes(), (name, key)


def test_each_key_is_pulled_once_for_all_ranks() -> None:
    shared = FakeClient()
    keys = [[5, 7], [7], [], [9, 5, 11]]

    def pull(ps: GroupClient) -> np.ndarray[Any, Any]:
        table = ps.table("rows", dim=3, optimizer=eps.SGD(lr=1.0), init=eps.Normal(std=1.0, seed=2))
        return table.pull(np.array(keys[ps.rank], np.int64))

    with clients(shared, 4) as group:
        found = together(pull, group)
    assert shared.tables["rows"].pulls == [[5, 7, 9, 11]]
    for mine, rows in zip(keys, found, strict=True):
        assert rows.shape == (len(mine), 3)
        for key, row in zip(mine, rows, strict=True):
            np.testing.assert_array_equal(row, shared.tables["rows"].row(key))


def test_rows_of_several_tables_are_pulled_with_one_request() -> None:
    shared = FakeClient()
    keys: dict[str, list[list[int]]] = {"a": [[5, 7], [], [7]], "b": [[], [1], [2, 1]], "c": [[], [], []]}

    def pull(ps: GroupClient) -> dict[str, np.ndarray[Any, Any]]:
        tables = {
            name: ps.table(name, dim=dim, optimizer=eps.SGD(lr=1.0), init=eps.Normal(std=1.0, seed=2))
            for dim, name in enumerate(keys, start=2)
        }
        needed = {tables[name]: np.array(lists[ps.rank], np.int64) for name, lists in keys.items()}
        with pytest.raises(eps.InputError):
            ps.pull_async({tables["a"]: [0.5]})
        early: Any = ps.pull_async(needed)
        found: Any = ps.pull(needed)
        for table, rows in early.result().items():
            np.testing.assert_array_equal(rows, found[table])
        return {table.name: rows for table, rows in found.items()}

    with clients(shared, 3) as group:
        answers = together(pull, group)
    assert shared.pulled == [["a", "b", "c"]] * 2
    assert (shared.tables["a"].pulls, shared.tables["b"].pulls) == ([[5, 7]] * 2, [[1, 2]] * 2)
    for rank, found in enumerate(answers):
        for name, lists in keys.items():
            assert len(found[name]) == len(lists[rank])
            for key, row in zip(lists[rank], found[name], strict=True):
                np.testing.assert_array_equal(row, shared.tables[name].row(key))


def test_expected_rows_are_those_after_a_later_load() -> None:
    ids = torch.arange(5)

    def work(ps: GroupClient) -> list[float]:
        model = Embedding(ps, "items", 2, optimizer=eps.SGD(lr=1.0), init=eps.Zeros())
        optimizer = Optimizer(ps, model)
        model(ids).sum().backward()
        model.expect(ids)
        optimizer.step()
        model.table.load(ids.numpy(), np.full((5, 2), 7, np.float32))
        return [float(value) for value in model(ids).detach()[:, 0]]

    with clients(FakeClient(), 2) as ranks:
        assert together(work, ranks) == [[7.0] * 5] * 2


def test_early_pulls_may_be_taken_in_any_order_or_not_at_all() -> None:
    shared = FakeClient()

    def look(ps: GroupClient) -> None:
        table = ps.table("rows", dim=2, optimizer=eps.SGD(lr=1.0), init=eps.Normal(std=1.0, seed=2))
        for turn in range(6):
            reads = [table.pull_async(np.arange(n + ps.rank) + 10 * turn) for n in range(1, 5)]
            for n in (4, 2, 1):
                rows = reads[n - 1].result()
                needed = [shared.tables["rows"].row(key) for key in range(10 * turn, 10 * turn + n + ps.rank)]
                np.testing.assert_array_equal(rows, np.array(needed))
            del reads
        assert ps.slots._made <= 9, "memory is used again"

    with clients(shared, 3) as group:
        together(look, group)


def test_weights_in_use_are_not_overwritten() -> None:
    shared = FakeClient()

    def look(ps: GroupClient) -> None:
        tensor = ps.tensor("w", init=np.arange(6, dtype=np.float32), optimizer=eps.SGD(lr=1.0))
        seen = []
        for turn in range(5):
            seen.append(ps.pull_many([tensor])[0].result())
            ps.push({tensor: np.ones(6, np.float32)})
            for before, values in enumerate(seen):
                np.testing.assert_array_equal(values, np.arange(6) - 2 * before)
            if turn == 3:
                seen[:] = []
                break
        for _ in range(9):
            ps.pull_many([tensor])[0].result()
        assert ps.slots._made <= 6, "memory is used again"

    with clients(shared, 2) as group:
        together(look, group)


def test_a_rank_may_have_no_gradient_and_the_mean_is_of_all() -> None:
    shared = FakeClient()

    def push(ps: GroupClient) -> None:
        tensor = ps.tensor("w", init=np.zeros(3, np.float32), optimizer=eps.SGD(lr=1.0))
        table = ps.table("rows", dim=1, optimizer=eps.SGD(lr=1.0), init=eps.Zeros())
        ones = np.full(3, ps.rank + 1, np.float32)
        rows = np.array([4, 4]), np.ones((2, 1), np.float32)
        values: list[dict[Any, Any]] = [{tensor: ones}, {}, {tensor: ones, table: rows}]
        ps.push(values[ps.rank])
        ps.push({})

    with clients(shared, 3, mean=True) as group:
        together(push, group)
    np.testing.assert_array_equal(shared.weight("w"), np.full(3, -4 / np.float32(3), np.float32))
    np.testing.assert_array_equal(shared.targets["rows"].weights[4], -np.float32(2) / np.float32(3))
    assert shared.clock == 2


def test_rank_0_may_read_alone() -> None:
    shared = FakeClient()

    def look(ps: GroupClient) -> None:
        layer = Embedding(ps, "rows", 2, optimizer=eps.SGD(lr=1.0), init=eps.Normal(std=1.0, seed=2))
        if ps.rank:
            with pytest.raises(eps.ConfigError, match="rank 0"), ps.alone():
                pass
            with pytest.raises(eps.ConfigError, match=r"keys\(\) of 'rows'"):
                layer.table.keys()
        else:
            with ps.alone(), torch.no_grad():
                assert layer(torch.tensor([3, 4])).shape == (2, 2)
                with pytest.raises(eps.ConfigError, match="alone"):
                    ps.push({})
        assert layer(torch.tensor([ps.rank])).shape == (1, 2)

    with clients(shared, 2) as group:
        together(look, group)
    assert shared.tables["rows"].pulls == [[3, 4], [0, 1]]


class Shards:
    """Shards as rank 0's client hands them out."""

    def __init__(self, shards: Iterator[Shard]) -> None:
        self._shards = shards

    def __next__(self) -> Shard:
        return next(self._shards)

    def close(self) -> None:
        """Gives back nothing."""


def test_ranks_train_parts_of_a_shard() -> None:
    class Handed(FakeClient):
        def shards(self, samples: int, size: int, epochs: int, *, name: str, shuffle_seed: int | None) -> Any:
            starts = [start for _ in range(epochs) for start in range(0, samples, size)]
            made = (
                Shard(n * size // samples, n, start, min(start + size, samples), samples, shuffle_seed)
                for n, start in enumerate(starts)
            )
            return Shards(made)

    shared = Handed()
    data = torch.arange(23.0)

    def train(ps: GroupClient) -> list[list[float]]:
        tensor = ps.tensor("w", init=np.zeros(1, np.float32), optimizer=eps.SGD(lr=1.0))
        got = []
        for part in ShardedDataset(ps, 23, 10, 2, dataset=data):
            got.append(part.tolist())
            ps.push({tensor: np.array([part.sum()], np.float32)})
        with pytest.raises(eps.InputError, match="not trained before the next"):
            list(ShardedDataset(ps, 23, 10, dataset=data))
        with pytest.raises(eps.InputError, match="without any"):
            list(ShardedDataset(ps, 22, 20, dataset=data))
        return got

    with clients(shared, 3) as group:
        parts = together(train, group)
    handed = [sorted(i for part in some for i in part) for some in zip(*parts, strict=True)]
    assert handed == [[float(i) for i in range(a, b)] for a, b in ((0, 10), (10, 20), (20, 23))] * 2
    np.testing.assert_array_equal(shared.weight("w"), [-2.0 * sum(range(23))])


def test_unread_results_delay_no_rank() -> None:
    shared, met = FakeClient(), threading.Barrier(2)
    keys = np.arange(300_000)  # more than a socket takes

    def look(ps: GroupClient) -> None:
        table = ps.table("rows", dim=1, optimizer=eps.SGD(lr=1.0), init=eps.Zeros())
        reads = [table.pull_async(keys), table.pull_async(keys[:5])]
        met.wait(60)  # whatever else ranks do together
        assert [read.result().shape for read in reads] == [(300_000, 1), (5, 1)]

    with clients(shared, 2) as group:
        together(look, group)
