"""Converted models of torchrec beside torchrec itself, on its CPU kernels: the same losses and rows, step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import elasticps as eps
from elasticps.errors import ConfigError
from elasticps.torch import Optimizer, TableConfig

pytest.importorskip("torchrec")  # also keeps quiet what its own imports warn of
pytest.importorskip("torch.distributed.optim")  # the same

from torch.distributed.optim import _apply_optimizer_in_backward  # type: ignore[attr-defined]
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from elasticps.torchrec import from_model, server_optimizer
from tests.shared_cluster import Connect
from tests.torch.group.ranks import clients, together

ROWS, DIM, DENSE = 40, 8, 4
FEATURES = ["user", "friends", "item", "shop"]


def configs() -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(ROWS, DIM, "users", feature_names=["user", "friends"]),
        EmbeddingBagConfig(ROWS, DIM, "shops", feature_names=["shop"]),
        # Last: torchrec's fused collection names its results as if tables of one pooling stood together.
        EmbeddingBagConfig(ROWS, DIM, "goods", feature_names=["item"], pooling=PoolingType.MEAN),
    ]


def batch(samples: int = 32, *, every_row: bool = False) -> tuple[Tensor, KeyedJaggedTensor, Tensor]:
    """Dense inputs, lists of zero to three ids, and labels. every_row: each table's rows are all looked up."""
    lengths = torch.randint(0, 4, (len(FEATURES) * samples,))
    if every_row:
        lengths[:] = 2
    ids = torch.randint(0, ROWS, (int(lengths.sum()),))
    if every_row:
        ids = torch.cat([torch.randperm(2 * samples) % ROWS for _ in FEATURES])
    labels = torch.randint(0, 2, (samples, 1)).float()
    return torch.randn(samples, DENSE), KeyedJaggedTensor(FEATURES, ids, lengths=lengths), labels


def dlrm(collection: nn.Module) -> DLRM:
    return DLRM(collection, DENSE, [16, DIM], [16, 1])


def plain(kind: type[Any], **settings: Any) -> DLRM:
    model = dlrm(EmbeddingBagCollection(tables=configs()))
    _apply_optimizer_in_backward(kind, model.sparse_arch.parameters(), settings)
    return model


def fused(kind: type[Any], **settings: Any) -> DLRM:
    return dlrm(FusedEmbeddingBagCollection(configs(), kind, settings, device=torch.device("cpu")))


def tables_of(model: DLRM) -> dict[str, Tensor]:
    bags = model.sparse_arch.embedding_bag_collection.embedding_bags
    return {name: each.weight.detach() for name, each in bags.items()}


def twins(make: Callable[..., DLRM], *args: Any, **settings: Any) -> tuple[DLRM, DLRM]:
    """Two models with the same weights."""
    one, other = make(*args, **settings), make(*args, **settings)
    with torch.no_grad():
        for to, source in zip(other.parameters(), one.parameters(), strict=True):
            to.copy_(source)
    return one, other


def train(model: nn.Module, optimizer: torch.optim.Optimizer, given: tuple[Tensor, KeyedJaggedTensor, Tensor]) -> float:
    dense, sparse, labels = given
    optimizer.zero_grad()
    loss = nn.functional.binary_cross_entropy_with_logits(model(dense, sparse), labels)
    loss.backward()
    optimizer.step()
    return loss.item()


def dense_parameters(model: DLRM) -> list[nn.Parameter]:
    return [p for name, p in model.named_parameters() if "embedding_bags" not in name]


@pytest.mark.parametrize(
    ("make", "kind", "settings"),
    [
        (fused, torch.optim.SGD, {"lr": 0.3}),
        (fused, torch.optim.Adagrad, {"lr": 0.1}),
        (fused, RowWiseAdagrad, {"lr": 0.1, "eps": 1e-6}),
        (plain, torch.optim.SGD, {"lr": 0.3}),
        (plain, torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.1}),
        (plain, RowWiseAdagrad, {"lr": 0.1}),
        (plain, torch.optim.Adam, {"lr": 0.01}),
    ],
)
def test_each_step_gives_what_torchrec_s_gives(
    connect: Connect, make: Callable[..., DLRM], kind: type[Any], settings: dict[str, Any]
) -> None:
    ps = connect()
    reference, model = twins(make, kind, **settings)
    from_model(model, ps)
    ours = Optimizer(ps, model, optimizer=eps.SGD(lr=0.1))
    theirs = torch.optim.SGD(dense_parameters(reference), lr=0.1)
    rows = model.sparse_arch.embedding_bag_collection.embedding_bags
    # torch's Adam moves rows that a step does not look up; servers, and FBGEMM, only those that it does.
    every_row = kind is torch.optim.Adam
    for _ in range(8):
        given = batch(every_row=every_row)
        assert train(model, ours, given) == pytest.approx(train(reference, theirs, given), abs=1e-6)
        for name, weight in tables_of(reference).items():
            pulled = torch.from_numpy(rows[name].table.pull(np.arange(ROWS)))
            torch.testing.assert_close(pulled, weight, rtol=0, atol=1e-6, msg=name)
    for mine, other in zip(dense_parameters(model), dense_parameters(reference), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-6)


def labelled(n: int, taste: Tensor) -> tuple[Tensor, KeyedJaggedTensor, Tensor]:
    """Samples whose labels come from a planted taste of each id, with noise."""
    lengths = torch.ones(len(FEATURES) * n, dtype=torch.int64)
    ids = torch.randint(0, ROWS, (len(FEATURES) * n,))
    dense = torch.randn(n, DENSE)
    score = taste[ids].view(len(FEATURES), n).sum(0) + dense[:, 0]
    return dense, KeyedJaggedTensor(FEATURES, ids, lengths=lengths), torch.bernoulli(score.sigmoid())[:, None]


def auc(scores: Tensor, labels: Tensor) -> float:
    ranks = scores.flatten().argsort().argsort().double() + 1
    positive = labels.flatten() > 0
    n, m = int(positive.sum()), int((~positive).sum())
    return float((ranks[positive].sum() - n * (n + 1) / 2) / (n * m))


def test_a_converted_model_learns_planted_labels_as_well_as_torchrec_s(connect: Connect) -> None:
    ps = connect()
    reference, model = twins(fused, RowWiseAdagrad, lr=0.1)
    from_model(model, ps)
    ours = Optimizer(ps, model, optimizer=eps.Adagrad(lr=0.05))
    theirs = torch.optim.Adagrad(dense_parameters(reference), lr=0.05)
    taste = 2 * torch.randn(ROWS)
    for _ in range(150):
        given = labelled(256, taste)
        train(model, ours, given)
        train(reference, theirs, given)
    dense, sparse, labels = labelled(10_000, taste)
    with torch.no_grad():
        scores = [auc(each.eval()(dense, sparse), labels) for each in (model, reference)]
    assert scores[1] > 0.85
    assert scores[0] == pytest.approx(scores[1], abs=1e-4)


def test_weighted_features_and_one_that_two_tables_look_up(connect: Connect) -> None:
    def make() -> EmbeddingBagCollection:
        tables = [
            EmbeddingBagConfig(ROWS, 8, "a", feature_names=["f", "g"]),
            EmbeddingBagConfig(ROWS, 4, "b", feature_names=["g"]),
        ]
        return EmbeddingBagCollection(tables=tables, is_weighted=True)

    ps = connect()
    reference = make()
    converted = make()
    converted.load_state_dict(reference.state_dict())
    model: Any = from_model(converted, ps, optimizer=eps.SGD(lr=0.5))
    assert model.is_weighted()
    assert [config.name for config in model.embedding_bag_configs()] == ["a", "b"]
    ours, theirs = Optimizer(ps, model), torch.optim.SGD(reference.parameters(), lr=0.5)
    for _ in range(3):
        lengths = torch.randint(0, 4, (2 * 6,))
        n = int(lengths.sum())
        given = KeyedJaggedTensor(["f", "g"], torch.randint(0, ROWS, (n,)), torch.rand(n), lengths=lengths)
        found = []
        for module, optimizer in ((model, ours), (reference, theirs)):
            out = module(given)
            optimizer.zero_grad()
            out.values().square().sum().backward()
            optimizer.step()
            found.append(out)
        assert isinstance(found[0], KeyedTensor)
        assert found[0].keys() == found[1].keys() == ["f", "g@a", "g@b"]
        assert found[0].length_per_key() == found[1].length_per_key()
        torch.testing.assert_close(found[0].values(), found[1].values(), rtol=0, atol=1e-6)
        regrouped = KeyedTensor.regroup([found[0]], [["g@b"], ["f"]])
        torch.testing.assert_close(regrouped[0], found[1]["g@b"], rtol=0, atol=1e-6)


def test_a_row_for_each_id(connect: Connect) -> None:
    ps = connect()
    tables = [EmbeddingConfig(ROWS, 8, "words", feature_names=["title", "query"])]
    reference = EmbeddingCollection(tables=tables, need_indices=True)
    converted = EmbeddingCollection(tables=tables, need_indices=True)
    converted.load_state_dict(reference.state_dict())
    model: Any = from_model(nn.Sequential(converted), ps, optimizer=eps.SGD(lr=0.5))
    given = KeyedJaggedTensor(["query", "title"], torch.tensor([3, 1, 1, 2]), lengths=torch.tensor([1, 0, 2, 1]))
    mine, other = model(given), reference(given)
    assert list(mine) == list(other)
    for name, each in mine.items():
        torch.testing.assert_close(each.values(), other[name].values(), rtol=0, atol=0)
        assert torch.equal(each.lengths(), other[name].lengths())
        assert torch.equal(each.weights(), other[name].weights())
    none = torch.empty(0, dtype=torch.int64)
    assert set(model(KeyedJaggedTensor(["query", "title"], none, lengths=none))) == {"query", "title"}


def test_a_second_worker_converts_the_same_model_and_undoes_no_training(connect: Connect) -> None:
    first, second = connect("w0"), connect("w1")
    one, other = twins(plain, torch.optim.SGD, lr=0.3)
    before = tables_of(other)["users"].clone()
    from_model(one, first)
    optimizer = Optimizer(first, one, optimizer=eps.SGD(lr=0.1))
    for _ in range(3):
        train(one, optimizer, batch())
    first.flush()
    table = one.sparse_arch.embedding_bag_collection.embedding_bags["users"].table
    trained = table.pull(np.arange(ROWS))
    table.delete([5])  # evicted meanwhile, say: this one begins again
    from_model(other, second)
    found = other.sparse_arch.embedding_bag_collection.embedding_bags["users"].table.pull(np.arange(ROWS))
    assert np.array_equal(np.delete(found, 5, 0), np.delete(trained, 5, 0))
    assert np.array_equal(found[5], before[5].numpy())


def test_a_model_on_the_meta_device_begins_with_the_same_distribution(connect: Connect) -> None:
    ps = connect()
    tables = [
        EmbeddingBagConfig(ROWS, 8, "drawn", weight_init_min=0.25, weight_init_max=0.5),
        EmbeddingBagConfig(ROWS, 8, "filled", init_fn=lambda rows: rows.fill_(3.0)),
        EmbeddingBagConfig(ROWS, 8, "bounds", init_fn=partial(nn.init.uniform_, a=2.0, b=2.5)),
    ]
    bags = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    model: Any = from_model(bags, ps, optimizer=eps.SGD(lr=0.5))
    drawn = model.embedding_bags["drawn"].table.pull(np.arange(ROWS))
    assert 0.25 <= drawn.min() < 0.3 < 0.45 < drawn.max() <= 0.5
    assert (model.embedding_bags["filled"].table.pull(np.arange(ROWS)) == 3.0).all()
    bounds = model.embedding_bags["bounds"].table.pull(np.arange(ROWS))
    assert 2.0 <= bounds.min() < 2.1 < 2.4 < bounds.max() <= 2.5


def test_a_collection_at_two_places_is_replaced_at_both_and_may_be_renamed(connect: Connect) -> None:
    ps = connect()
    bags = EmbeddingBagCollection(tables=configs())
    users = bags.embedding_bags["users"].weight.detach().clone()
    model: Any = nn.ModuleDict(
        {"one": bags, "same": nn.Sequential(bags), "other": EmbeddingBagCollection(tables=configs())}
    )
    with refused("several collections have a table"):
        from_model(model, ps, optimizer=eps.SGD(lr=0.1))
    assert model["one"] is model["same"][0] is bags
    del model["other"]

    def renamed(table: TableConfig) -> TableConfig:
        return replace(table, name=f"my_{table.name}", eviction=eps.IdleFor("1d"))

    from_model(model, ps, optimizer=eps.SGD(lr=0.1), change=renamed)
    assert model["one"] is model["same"][0] is not bags
    table = model["one"].embedding_bags["my_users"].table
    assert np.array_equal(table.pull(np.arange(ROWS)), users.numpy())
    table.delete([5])  # as eviction would
    from_model(EmbeddingBagCollection(tables=configs()), connect("w1"), optimizer=eps.SGD(lr=0.1), change=renamed)
    assert len(table) == ROWS - 1


def test_ranks_of_a_group_that_convert_again_bring_back_no_row_that_was_evicted(connect: Connect) -> None:
    def evicting(table: TableConfig) -> TableConfig:
        return replace(table, eviction=eps.IdleFor("1d")) if table.name == "users" else table

    def convert(ps: Any) -> Any:
        torch.manual_seed(3)
        return from_model(EmbeddingBagCollection(tables=configs()), ps, optimizer=eps.SGD(lr=0.1), change=evicting)

    ps = connect()
    with clients(ps, 2) as ranks:
        together(convert, ranks)
    users, goods = ps.open("users"), ps.open("goods")
    assert isinstance(users, eps.SparseTable)
    assert isinstance(goods, eps.SparseTable)
    assert len(users) == len(goods) == ROWS
    for table in (users, goods):
        table.delete([5])  # of users as eviction would
    with clients(ps, 2) as ranks:  # started again, as a new model
        together(convert, ranks)
    assert len(users) == ROWS - 1
    assert len(goods) == ROWS


@contextmanager
def refused(text: str) -> Iterator[None]:
    with pytest.raises(ConfigError, match=text):
        yield


def test_what_cannot_be_converted_says_why(connect: Connect) -> None:
    ps = connect()
    with refused("has no EmbeddingBagCollection"):
        from_model(nn.Linear(1, 1), ps)
    with refused("table 'users' has no optimizer"):
        from_model(EmbeddingBagCollection(tables=configs()), ps)
    with refused("several collections have a table 'shops'"):
        twice = nn.ModuleList([EmbeddingBagCollection(tables=configs()[1:2]) for _ in range(2)])
        from_model(twice, ps, optimizer=eps.SGD(lr=0.1))
    with refused("trained by RMSprop"):
        server_optimizer(torch.optim.RMSprop, {"lr": 0.1}, "t")
    with refused("amsgrad=True"):
        server_optimizer(torch.optim.Adam, {"lr": 0.1, "amsgrad": True}, "t")
    with refused("weight_decay=0.1"):
        server_optimizer(RowWiseAdagrad, {"lr": 0.1, "weight_decay": 0.1}, "t")
    assert server_optimizer(torch.optim.Adam, {"learning_rate": 0.1, "beta1": 0.8}, "t") == eps.Adam(0.1, (0.8, 0.999))
    decoupled = {"lr": 0.1, "weight_decay": 0.2, "decoupled_weight_decay": True}
    assert server_optimizer(torch.optim.Adam, decoupled, "t") == eps.AdamW(0.1, weight_decay=0.2)
