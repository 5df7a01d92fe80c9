"""Collections beside plain torch modules: the same values, the same gradients, one pull and one push a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

import elasticps
import elasticps as eps
import elasticps.torch as eps_torch
from elasticps.errors import ConfigError, InputError
from elasticps.torch import EmbeddingBagCollection, EmbeddingCollection, Jagged, TableConfig
from elasticps.torch.kernels.distinct import distinct_tables
from tests.torch.fake_ps import FakeClient

SGD = eps.SGD(lr=0.5)
IDS = 12


class Scene:
    """A collection, and one torch layer for each table with the same rows."""

    def __init__(self, kind: type[Any], configs: list[TableConfig], **options: Any) -> None:
        ps: Any = FakeClient()
        self.ps: FakeClient = ps
        self.configs = configs
        self.layer = kind(ps, configs, optimizer=SGD, **options)
        self.plain: dict[str, nn.Embedding] = {}
        for config in configs:
            rows = np.array([self.ps.tables[config.name].row(key) for key in range(IDS)])
            self.plain[config.name] = nn.Embedding(IDS, config.dim, _weight=torch.from_numpy(rows))
        self.optimizer = eps_torch.Optimizer(ps, self.layer)

    def table_of(self, feature: str) -> TableConfig:
        return next(config for config in self.configs if feature in config.feature_names)

    def rows(self, name: str) -> Tensor:
        return torch.from_numpy(np.array([self.ps.tables[name].row(key) for key in range(IDS)]))

    def bags(self, batch: dict[str, list[list[int]]], weights: dict[str, list[list[float]]] | None) -> Tensor:
        """The results of torch's own bags, feature by feature and list by list."""
        columns = []
        for name in self.layer.features:
            config = self.table_of(name)
            table, found = self.plain[config.name], []
            for i, ids in enumerate(batch[name]):
                vectors = table(torch.tensor(ids, dtype=torch.int64))
                if weights is not None:
                    vectors = vectors * torch.tensor(weights[name][i])[:, None]
                found.append(vectors.sum(0) / (max(len(ids), 1) if config.mode == "mean" else 1))
            columns.append(torch.stack(found) if found else torch.empty(0, config.dim))
        return torch.cat(columns, dim=1)


def jagged(batch: dict[str, list[list[int]]], weights: dict[str, list[list[float]]] | None = None) -> Jagged:
    lists = [ids for name in batch for ids in batch[name]]
    values = torch.tensor([each for ids in lists for each in ids], dtype=torch.int64)
    given = None
    if weights is not None:
        given = torch.tensor([each for name in batch for some in weights[name] for each in some])
    return Jagged(list(batch), values, torch.tensor([len(ids) for ids in lists], dtype=torch.int64), given)


CONFIGS = st.lists(st.tuples(st.sampled_from([1, 3, 4]), st.integers(1, 3), st.booleans()), min_size=1, max_size=4)


@settings(max_examples=40, deadline=None)
@given(CONFIGS, st.integers(0, 4), st.booleans(), st.randoms(use_true_random=False))
def test_bags_and_their_gradients_are_torchs(kinds: Any, samples: int, weighted: bool, random: Any) -> None:
    configs = [
        TableConfig(f"t{i}", dim, [f"f{i}.{j}" for j in range(count)], "mean" if mean and not weighted else "sum")
        for i, (dim, count, mean) in enumerate(kinds)
    ]
    scene = Scene(EmbeddingBagCollection, configs, weighted=weighted)
    for _ in range(2):
        names = [*random.sample(scene.layer.features, len(scene.layer.features)), "nobody's"]
        batch = {
            name: [[random.randrange(IDS) for _ in range(random.choice((0, 1, 1, 4)))] for _ in range(samples)]
            for name in names
        }
        weights = {n: [[random.uniform(-1, 1) for _ in ids] for ids in batch[n]] for n in batch} if weighted else None
        shown = scene.layer(jagged(batch, weights))
        expected = scene.bags(batch, weights)
        assert shown.keys() == scene.layer.features
        torch.testing.assert_close(shown.values(), expected)
        at = 0
        for name, dim in zip(shown.keys(), shown.length_per_key(), strict=True):
            torch.testing.assert_close(shown[name], expected[:, at : at + dim])
            torch.testing.assert_close(shown.to_dict()[name], expected[:, at : at + dim])
            at += dim
        scale = torch.linspace(-1.0, 2.0, expected.numel()).view_as(expected)
        if expected.requires_grad:
            (expected * scale).sum().backward()
        pulled, pushed = len(scene.ps.pulled), len(scene.ps.parts)
        (shown.values() * scale).sum().backward()
        scene.optimizer.step()
        assert len(scene.ps.pulled) == pulled
        assert len(scene.ps.parts) <= pushed + 1
        for config in configs:
            weight = scene.plain[config.name].weight
            with torch.no_grad():
                weight -= 0.5 * (weight.grad if weight.grad is not None else 0)
            weight.grad = None
            torch.testing.assert_close(scene.rows(config.name), weight.detach())


@settings(max_examples=25, deadline=None)
@given(CONFIGS, st.integers(0, 4), st.randoms(use_true_random=False))
def test_rows_and_their_gradients_are_torchs(kinds: Any, samples: int, random: Any) -> None:
    configs = [TableConfig(f"t{i}", d, [f"f{i}.{j}" for j in range(count)]) for i, (d, count, _) in enumerate(kinds)]
    scene = Scene(EmbeddingCollection, configs)
    names = random.sample(scene.layer.features, len(scene.layer.features))
    batch = {
        name: [[random.randrange(IDS) for _ in range(random.choice((0, 1, 1, 4)))] for _ in range(samples)]
        for name in names
    }
    shown = scene.layer(jagged(batch))
    assert list(shown) == scene.layer.features
    losses, expected_losses = [], []
    for name, lists in shown.items():
        flat = torch.tensor([each for ids in batch[name] for each in ids], dtype=torch.int64)
        expected = scene.plain[scene.table_of(name).name](flat)
        torch.testing.assert_close(lists.values(), expected)
        assert lists.lengths().tolist() == [len(ids) for ids in batch[name]]
        assert [len(part) for part in lists.to_dense()] == lists.lengths().tolist()
        losses.append((lists.values() ** 2).sum())
        expected_losses.append((expected**2).sum())
    sum(expected_losses[1:], expected_losses[0]).backward()
    loss = sum(losses[1:], losses[0])
    loss.backward()
    scene.optimizer.step()
    for config in configs:
        weight = scene.plain[config.name].weight
        assert weight.grad is not None
        torch.testing.assert_close(scene.rows(config.name), (weight - 0.5 * weight.grad).detach())


@given(st.lists(st.lists(st.integers(-3, 3) | st.integers(-(2**63), 2**63 - 1), max_size=12), max_size=6), st.randoms())
def test_distinct_ids_of_several_tables(features: list[list[int]], random: Any) -> None:
    tables = 3
    owners = sorted(random.randrange(tables) for _ in features)
    ends = np.cumsum([0, *map(len, features)])
    spots = random.sample(range(len(features)), len(features))  # where in the batch each of them stands
    flat = np.array([each for at in np.argsort(spots) for each in features[at]], np.int64)
    starts = np.concatenate([[0], np.cumsum([len(features[at]) for at in np.argsort(spots)])])[spots]
    segments = np.array(
        [(t, a, a + len(f)) for t, a, f in zip(owners, starts, features, strict=True)], np.int64
    ).reshape(-1, 3)
    limits = [random.choice([-1, 1, 3]) for _ in range(tables)]
    keys, positions, table_ends, wrong = distinct_tables(flat, segments, np.array(limits, np.int64))
    beyond = [
        owner for owner, ids in zip(owners, features, strict=True)
        if limits[owner] >= 0 and any(not 0 <= each < limits[owner] for each in ids)
    ]  # fmt: skip
    assert wrong == min(beyond, default=-1)
    for table in range(tables):
        mine = [each for owner, ids in zip(owners, features, strict=True) if owner == table for each in ids]
        assert keys[table_ends[table] : table_ends[table + 1]].tolist() == list(dict.fromkeys(mine))
    assert keys[positions].tolist() == [each for ids in features for each in ids]
    assert len(positions) == ends[-1]
    for owner, low, high in zip(owners, ends, ends[1:], strict=False):
        assert all(table_ends[owner] <= at < table_ends[owner + 1] for at in positions[low:high])


class Foreign:
    """The part of torchrec's KeyedJaggedTensor that a collection uses."""

    def __init__(self, batch: Jagged, strides: bool = False) -> None:
        self.keys, self.values, self.lengths = batch.keys, batch.values, batch.lengths
        self.weights_or_none = batch.weights_or_none
        self.variable_stride_per_key = lambda: strides


def test_batches_of_unusual_kinds_are_accepted() -> None:
    configs = [TableConfig("users", 4, ["user", "friend"]), TableConfig("items", 4)]
    layer = Scene(EmbeddingBagCollection, configs).layer
    batch = Jagged.of(
        {
            "items": torch.tensor([1, 2, 3]),
            "user": torch.tensor([[1, 1], [2, 3], [4, 5]]),
            "friend": (torch.tensor([5, 6]), torch.tensor([0, 2, 0])),
        }
    )
    expected = layer(batch).values()
    assert expected.shape == (3, 12)
    assert torch.equal(layer(Foreign(batch)).values(), expected)
    given = {"items": torch.tensor([1, 2, 3], dtype=torch.int32), "user": torch.tensor([[1, 1], [2, 3], [4, 5]])}
    assert torch.equal(layer(given | {"friend": (torch.tensor([5, 6]), torch.tensor([0, 2, 0]))}).values(), expected)
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    columns = layer(Jagged.columns(["items", "user", "friend"], ids))
    assert torch.equal(
        columns["user"], layer({n: ids[:, i] for i, n in enumerate(("items", "user", "friend"))})["user"]
    )
    with pytest.raises(KeyError, match="no feature 'stranger'"):
        columns["stranger"]


NONE = torch.empty(0, dtype=torch.int64)


@pytest.mark.parametrize(
    ("batch", "error"),
    [
        (torch.tensor([1]), "takes a Jagged"),
        ({"a": torch.tensor([1])}, "has no feature 'b'"),
        ({"a": torch.tensor([1]), "b": torch.tensor([1, 2])}, "the same samples"),
        ({"a": torch.tensor([1.0]), "b": torch.tensor([1])}, "must be int64 or int32"),
        ({"a": torch.tensor(1), "b": torch.tensor([1])}, "must be"),
        (Jagged(["a", "a"], torch.tensor([1, 1]), torch.tensor([1, 1])), "different names"),
        (Jagged(["a", "b"], torch.tensor([1, 1]), torch.tensor([1, 1, 0])), "3 lengths"),
        (Jagged(["a", "b"], torch.tensor([1, 1]), torch.tensor([3, -1])), "lengths must be those of 2 ids"),
        (Jagged(["a", "b"], torch.tensor([1, 1]), torch.tensor([1, 2])), "they add up to 3"),
        (Jagged(["a", "b"], torch.tensor([1, 1]), torch.tensor([1.0, 1.0])), "lengths must be int64"),
        (Jagged(["a", "b"], torch.tensor([1, 1]), torch.tensor([1, 1]), torch.ones(3)), "one weight"),
        (Jagged(["a", "b"], torch.tensor([1, 1]), torch.tensor([1, 1]), torch.ones(2)), "weighted=False"),
        (Jagged(["a", "b"], torch.tensor([1, 99]), torch.tensor([1, 1])), "from 0 to 9"),
        (Jagged([], torch.tensor([1]), NONE), "0 features"),
        (Foreign(Jagged(["a", "b"], torch.tensor([1, 1]), torch.tensor([1, 1])), True), "a stride for each key"),
    ],
)
def test_a_wrong_batch_is_refused_before_anything_is_pulled(batch: Any, error: str) -> None:
    configs = [TableConfig("a", 2), TableConfig("b", 2, num_embeddings=10)]
    scene = Scene(EmbeddingBagCollection, configs)
    with pytest.raises(InputError, match=error):
        scene.layer(batch)
    assert not scene.ps.pulled


@pytest.mark.parametrize(
    ("configs", "options", "error"),
    [
        ([], {}, "at least one table"),
        ([TableConfig("a", 2), TableConfig("a", 3)], {}, "different names"),
        ([TableConfig("a", 2, ["x"]), TableConfig("b", 3, ["x"])], {}, "different names"),
        ([TableConfig("a.b", 2)], {}, "no dots"),
        ([TableConfig("a", 2, mode="max")], {}, "'sum' or 'mean'"),
        ([TableConfig("a", 2, mode="mean")], {"weighted": True}, "mode 'sum'"),
        ([TableConfig("a", 2)], {"optimizer": None}, "no optimizer"),
        ([TableConfig("a", 2)], {"optimizer": torch.optim.SGD}, "cannot be torch's"),
    ],
)
def test_a_wrong_collection_is_refused(configs: Any, options: Any, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        EmbeddingBagCollection(FakeClient(), configs, **{"optimizer": SGD, **options})  # type: ignore[arg-type]


class Model(nn.Module):
    def __init__(self, ps: Any) -> None:
        super().__init__()
        self.rows = EmbeddingBagCollection(
            ps, [TableConfig("a", 4, ["x", "y"]), TableConfig("b", 4), TableConfig("c", 2)], optimizer=SGD
        )
        self.top = nn.Linear(14, 1)

    def forward(self, batch: Any) -> Tensor:
        logits: Tensor = self.top(self.rows(batch).values())
        return logits


def a_batch() -> Jagged:
    return Jagged.columns(["x", "y", "b", "c"], torch.tensor([[1, 2, 3, 4], [1, 1, 5, 6]]))


def test_all_of_a_model_is_saved_and_loaded_under_torchrecs_names(ps: Any) -> None:
    model = Model(ps)
    optimizer = eps_torch.Optimizer(ps, model, SGD)
    model(a_batch()).sum().backward()
    optimizer.step()
    with pytest.warns(UserWarning, match="full_state_dict"):
        assert set(model.state_dict()) == {
            "rows.embedding_bags.a.trains", "rows.embedding_bags.b.trains", "rows.embedding_bags.c.trains",
            "top.weight", "top.bias",
        } - {f"rows.embedding_bags.{name}.trains" for name in "abc"}  # fmt: skip
    state = eps_torch.full_state_dict(model)
    assert {name for name in state if name.endswith("keys")} == {f"rows.embedding_bags.{t}.keys" for t in "abc"}
    assert state["rows.embedding_bags.a.keys"].tolist() == [1, 2]
    expected = model(a_batch()).detach()
    other_ps: Any = FakeClient()
    other = Model(other_ps)
    eps_torch.Optimizer(other_ps, other, SGD)
    eps_torch.load_full_state_dict(other, state)
    torch.testing.assert_close(other(a_batch()).detach(), expected)


def test_frozen_tables_and_evaluation_train_nothing(ps: Any) -> None:
    model = Model(ps)
    optimizer = eps_torch.Optimizer(ps, model, SGD)
    model.rows.embedding_bags["a"].requires_grad_(False)
    model(a_batch()).sum().backward()
    optimizer.step()
    assert not ps.targets["a"].weights
    assert set(ps.targets["b"].weights) == {3, 5}
    model.eval()
    model(a_batch()).sum().backward()
    optimizer.step()
    assert set(ps.targets["b"].weights) == {3, 5}
    with torch.no_grad():
        assert not model(a_batch()).requires_grad


def test_prefetched_rows_are_those_at_the_time_of_the_prefetch(ps: Any) -> None:
    layer = Model(ps).rows
    ids = torch.tensor([[1, 2, 3, 4], [1, 1, 5, 6]])
    names = ["x", "y", "b", "c"]
    before = layer(Jagged.columns(names, ids)).values().detach()
    layer.prefetch(Jagged.columns(names, ids))
    layer.prefetch(dict(zip(names, ids.t(), strict=True)))
    for name in "abc":
        ps.tables[name].load(np.arange(8), np.zeros((8, ps.tables[name].dim), np.float32))
    pulls_before = len(ps.pulled)
    other = layer(Jagged.columns(names, ids + 1)).values().detach()
    assert len(ps.pulled) == pulls_before + 1
    for _ in range(2):
        assert torch.equal(layer(Jagged.columns(names, ids)).values().detach(), before)
    assert len(ps.pulled) == pulls_before + 1
    assert not layer(Jagged.columns(names, ids)).values().any()
    assert not other.any()


def test_a_batch_that_is_changed_after_prefetch_is_pulled_again(ps: Any) -> None:
    layer = Model(ps).rows
    names, ids = ["x", "y", "b", "c"], torch.tensor([[1, 2, 3, 4]])
    batch = Jagged.columns(names, ids.clone())
    layer.prefetch(batch)
    batch.values()[0] = 7
    expected = layer(Jagged.columns(names, torch.tensor([[7, 2, 3, 4]]))).values()
    assert torch.equal(layer(batch).values(), expected)


def test_passes_add_up_until_the_step(ps: Any) -> None:
    model, twin_ps = Model(ps), FakeClient()
    twin: Any = Model(twin_ps)
    twin.top.load_state_dict(model.top.state_dict())
    optimizer = eps_torch.Optimizer(ps, model, SGD, overlap=False)
    other = eps_torch.Optimizer(twin_ps, twin, SGD)  # type: ignore[arg-type]
    with optimizer.accumulate():
        model(a_batch()).sum().backward()
    model(a_batch()).sum().backward()
    optimizer.step()
    (twin(a_batch()).sum() + twin(a_batch()).sum()).backward()
    other.step()
    for name in "abc":
        assert set(ps.targets[name].weights) == set(twin_ps.targets[name].weights)
        for key, row in ps.targets[name].weights.items():
            np.testing.assert_allclose(row, twin_ps.targets[name].weights[key], rtol=1e-6)


def test_clipping_counts_each_row_once(ps: Any) -> None:
    model = Model(ps)
    optimizer = eps_torch.Optimizer(ps, model, SGD, overlap=False)
    plain = {n: nn.Parameter(torch.from_numpy(np.array([ps.tables[n].row(k) for k in range(8)]))) for n in "abc"}
    top = nn.Linear(14, 1)
    top.load_state_dict(model.top.state_dict())
    ids = torch.tensor([[1, 2, 3, 4], [1, 1, 5, 6]])
    vectors = [functional.embedding(ids[:, i], plain[t]) for i, t in enumerate("aabc")]
    top(torch.cat(vectors, dim=1)).sum().backward()
    expected = nn.utils.clip_grad_norm_([*plain.values(), *top.parameters()], 0.5)
    model(a_batch()).sum().backward()
    torch.testing.assert_close(optimizer.clip_grad_norm_(0.5), expected)
    optimizer.step()
    for name in "abc":
        stored = np.array([ps.tables[name].row(k) for k in range(8)])
        with torch.no_grad():
            moved = plain[name] - 0.5 * plain[name].grad  # type: ignore[operator]
        np.testing.assert_allclose(stored, moved.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch hides it otherwise
def test_a_compiled_model_goes_on_after_a_collection(ps: Any) -> None:
    model = Model(ps)
    compiled: Any = torch.compile(model, backend="eager")
    torch.testing.assert_close(compiled(a_batch()), model(a_batch()))
    optimizer = eps_torch.Optimizer(ps, compiled, SGD)
    compiled(a_batch()).sum().backward()
    optimizer.step()
    assert set(ps.targets["b"].weights) == {3, 5}


def test_rows_have_the_type_of_the_model_and_the_device_of_the_ids(ps: Any, device: str) -> None:
    layer = Model(ps).rows.to(device, torch.bfloat16)
    batch = Jagged.columns(["x", "y", "b", "c"], torch.tensor([[1, 2, 3, 4]], device=device))
    shown = layer(batch).values()
    assert shown.dtype == torch.bfloat16
    assert shown.device.type == device


def test_the_example_of_the_page_on_torch_runs(ps: Any) -> None:
    page = (Path(__file__).parents[2] / "docs/guides/torch.md").read_text()
    example = next(block for block in page.split("```python\n") if "EmbeddingBagCollection(" in block).split("```")[0]
    names = {"ps": ps, "eps": eps, "elasticps": elasticps, "torch": torch}
    exec(example, names)
    vectors: Any = names["vectors"]
    assert vectors.keys() == ["user", "friends", "items"]
    assert vectors["friends"].shape == (2, 32)
    assert vectors.values().shape == (2, 96)
