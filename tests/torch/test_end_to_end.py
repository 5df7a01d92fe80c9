"""The torch layer on real servers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import elasticps as eps
from elasticps.torch import (
    Embedding,
    EmbeddingBag,
    EmbeddingBagCollection,
    Jagged,
    Optimizer,
    TableConfig,
    full_state_dict,
    load,
    save,
)
from elasticps.wire.frames import Kind
from tests.e2e.test_pull_tables import frames
from tests.shared_cluster import Connect


class Tower(nn.Module):
    """Embeddings, a bag, and layers, one of them larger than a block of the servers."""

    def __init__(self, users: nn.Module, words: nn.Module) -> None:
        super().__init__()
        self.users, self.words = users, words
        # Smooth: a ReLU near zero flips with the last bit of a product, which differs between CPUs.
        self.deep = nn.Sequential(nn.Linear(16, 300), nn.Tanh(), nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 1))
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, users: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.deep(torch.cat([self.users(users), self.words(words)], dim=1)) * self.scale
        return out


def remote_tower(ps: eps.Client) -> Tower:
    rows = eps.Adagrad(lr=0.1)
    return Tower(
        Embedding(ps, "users", 8, optimizer=rows, init=eps.Normal(std=0.1, seed=1)),
        EmbeddingBag(ps, "words", 8, "sum", optimizer=rows, init=eps.Normal(std=0.1, seed=2)),
    )


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    users, words = torch.randint(0, 50, (32,)), torch.randint(0, 50, (32, 4))
    return users, words, (users % 2 + (words % 2).sum(dim=1)).float()[:, None]


@pytest.mark.parametrize("options", [{}, {"bucket_bytes": 1, "pipeline": True}, {"overlap": False}])
def test_training_through_servers_agrees_with_torch(connect: Connect, options: dict[str, Any]) -> None:
    ps = connect()
    model = remote_tower(ps)
    users, words = nn.Embedding(50, 8), nn.EmbeddingBag(50, 8, mode="sum")
    everything = np.arange(50)
    with torch.no_grad():
        users.weight.copy_(torch.from_numpy(ps.table("users", **spec_of(1)).pull(everything)))
        words.weight.copy_(torch.from_numpy(ps.table("words", **spec_of(2)).pull(everything)))
    reference = Tower(users, words)
    reference.deep.load_state_dict(model.deep.state_dict())
    ours = Optimizer(ps, model, optimizer=eps.Adam(lr=1e-3), **options)
    theirs = [
        torch.optim.Adagrad([users.weight, words.weight], lr=0.1),
        torch.optim.Adam([*reference.deep.parameters(), reference.scale], lr=1e-3),
    ]
    for _ in range(8):
        *x, y = batch()
        for net, optimizers in ((model, [ours]), (reference, theirs)):
            for optimizer in optimizers:
                optimizer.zero_grad()
            nn.functional.mse_loss(net(*x), y).backward()
            for optimizer in optimizers:
                optimizer.step()
    ours.refresh()
    others = dict(reference.named_parameters())
    for name, mine in [*model.deep.named_parameters(prefix="deep"), ("scale", model.scale)]:
        torch.testing.assert_close(mine, others[name], rtol=2e-3, atol=2e-4, msg=name)
    for module, table in ((users, "users"), (words, "words")):
        rows = torch.from_numpy(ps.table(table, **spec_of(1 if table == "users" else 2)).pull(everything))
        torch.testing.assert_close(rows, module.weight.detach(), rtol=2e-3, atol=2e-4)
    assert ps.clock == 8
    ps.flush()
    assert ps.committed == 8


def spec_of(seed: int) -> dict[str, Any]:
    return {"dim": 8, "optimizer": eps.Adagrad(lr=0.1), "init": eps.Normal(std=0.1, seed=seed)}


def test_parts_leave_before_the_backward_pass_returns(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    ps = connect()
    model = remote_tower(ps)
    optimizer = Optimizer(ps, model, optimizer=eps.SGD(lr=0.1), bucket_bytes=64 * 1024)
    sent: list[str] = []

    def watch(name: str) -> None:
        call = getattr(eps.OpenStep, name)

        def spy(step: eps.OpenStep, values: Any, **options: Any) -> Any:
            sent.extend(target.name for target in values)
            return call(step, values, **options)

        monkeypatch.setattr(eps.OpenStep, name, spy)

    watch("push")
    watch("end")
    *x, y = batch()
    nn.functional.mse_loss(model(*x), y).backward()
    during = set(sent)
    optimizer.step()
    assert "model.deep.2.weight" in during
    assert {"users", "words"}.isdisjoint(during)  # they come last, and are small
    assert len(sent) == len(set(sent)) == 9


def test_two_workers_train_one_model(connect: Connect) -> None:
    models, optimizers = [], []
    for name in ("w0", "w1"):
        ps = connect(name)
        models.append(remote_tower(ps))
        optimizers.append(Optimizer(ps, models[-1], optimizer=eps.Adam(lr=2e-3)))
    first = last = 0.0
    for step in range(60):
        for model, optimizer in zip(models, optimizers, strict=True):
            *x, y = batch()
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(*x), y)
            loss.backward()
            optimizer.step()
            first = first or loss.item()
            last = loss.item() if step == 0 else 0.9 * last + 0.1 * loss.item()
    assert last < 0.7 * first
    for optimizer in optimizers:
        assert optimizer.last_step is not None
        optimizer.last_step.result()
    for optimizer in optimizers:
        optimizer.refresh()
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)


def test_after_a_backward_pass_that_raised_training_goes_on(connect: Connect) -> None:
    ps = connect()
    model = remote_tower(ps)
    optimizer = Optimizer(ps, model, optimizer=eps.SGD(lr=0.1), bucket_bytes=1)
    *x, y = batch()

    def stop(_: torch.Tensor) -> None:
        raise ZeroDivisionError

    out = model.deep[:2](torch.cat([model.users(x[0]), model.words(x[1])], dim=1))
    out.register_hook(stop)
    with pytest.raises(ZeroDivisionError):
        model.deep[2:](out).sum().backward()
    with pytest.warns(RuntimeWarning, match=r"deep\.4\.weight"):
        optimizer.zero_grad()
    nn.functional.mse_loss(model(*x), y).backward()
    optimizer.step()
    ps.flush()
    assert ps.committed == 2


def test_evaluation_ticks_no_clock_and_stores_nothing(connect: Connect) -> None:
    ps = connect()
    model = remote_tower(ps)
    Optimizer(ps, model, optimizer=eps.SGD(lr=0.1)).close()
    model.eval()
    with torch.inference_mode():
        *x, _ = batch()
        assert model(*x).shape == (32, 1)
    assert ps.clock == 0


def test_a_whole_model_is_saved_and_comes_back_elsewhere(connect: Connect, tmp_path: Path) -> None:
    torch.manual_seed(3)
    ps = connect()

    def towers(name: str) -> Tower:
        users = Embedding(ps, f"{name}.users", 8, optimizer=eps.Adagrad(lr=0.1))
        return Tower(users, EmbeddingBag(ps, f"{name}.words", 8, optimizer=eps.Adagrad(lr=0.1)))

    first, users, words = towers("first"), torch.randint(0, 40, (64,)), torch.randint(0, 90, (64, 3))
    optimizer = Optimizer(ps, first, optimizer=eps.Adam(lr=0.01), prefix="first")
    for _ in range(3):
        optimizer.zero_grad()
        first(users, words).square().mean().backward()
        optimizer.step()
    save(first, tmp_path / "model.pt")
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    assert torch.equal(state["users.keys"], users.unique())
    assert torch.equal(state["words.keys"], words.unique())
    optimizer.close()

    second = towers("second")
    other = Optimizer(ps, second, optimizer=eps.Adam(lr=0.01), prefix="second")
    second(users + 1_000, words).sum().backward()
    other.step()
    assert not torch.equal(first.eval()(users, words), second.eval()(users, words))
    load(second, tmp_path / "model.pt")
    assert torch.equal(first(users, words), second(users, words))
    assert all(torch.equal(value, state[name]) for name, value in full_state_dict(second).items())
    other.refresh()  # the servers have them
    assert torch.equal(first(users, words), second(users, words))


def test_a_rate_set_for_all_workers_is_shown_in_the_param_group(connect: Connect) -> None:
    ps = connect()
    users = Embedding(ps, "users", 1, optimizer=eps.SGD(lr=1.0), init=eps.Zeros())
    optimizer = Optimizer(ps, users)
    for rate in (0.5, 0.25):
        users.table.set_lr(rate)
        before = users.table.pull([7])
        users(torch.tensor([7])).sum().backward()
        optimizer.step()
        assert (before - users.table.pull([7])).tolist() == [[rate]]
        assert [group["lr"] for group in optimizer.param_groups] == [rate]
    late = connect("w1")
    with pytest.warns(UserWarning, match=r"not the 1\.0 that it is opened with"):
        again = Embedding(late, "users", 1, optimizer=eps.SGD(lr=1.0), init=eps.Zeros())
    assert Optimizer(late, again).param_groups[0]["lr"] == 0.25


TABLES = 26
NAMES = [f"c{i}" for i in range(TABLES)]


class Clicks(nn.Module):
    """A model as DLRM: a vector for each of many features, and layers on top."""

    def __init__(self, ps: eps.Client, **options: Any) -> None:
        super().__init__()
        tables = [TableConfig(name, 8, init=eps.Normal(std=0.1, seed=i)) for i, name in enumerate(NAMES)]
        self.rows = EmbeddingBagCollection(ps, tables, optimizer=eps.Adagrad(lr=0.1), **options)
        self.top = nn.Linear(8 * TABLES, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.top(self.rows(Jagged.columns(NAMES, ids)).values())
        return logits


def test_a_step_of_many_tables_is_one_pull_and_two_pushes(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    ps = connect()
    model = Clicks(ps)
    everything = np.arange(100)

    def stored(name: str) -> torch.Tensor:
        table = ps.open(name)
        assert isinstance(table, eps.SparseTable)
        return torch.from_numpy(table.pull(everything))

    twin = {name: nn.Embedding(100, 8, _weight=stored(name)) for name in NAMES}
    optimizer = Optimizer(ps, model, eps.SGD(lr=0.1))
    top = nn.Linear(8 * TABLES, 1)
    top.load_state_dict(model.top.state_dict())
    plain = [
        torch.optim.Adagrad([table.weight for table in twin.values()], lr=0.1),
        torch.optim.SGD(top.parameters(), lr=0.1),
    ]
    sent = frames(monkeypatch, Kind.PULL, Kind.PUSH)
    for _ in range(3):
        ids = torch.randint(0, 100, (64, TABLES))
        target = (ids.sum(dim=1) % 2).float()[:, None]
        sent.clear()
        loss = nn.functional.mse_loss(model(ids), target)
        rows = Counter((name, header.kind) for name, header in sent)
        assert set(rows.values()) == {1}
        assert {kind for _, kind in rows} == {Kind.PULL}
        sent.clear()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ps.flush()
        weights = Counter((name, header.kind) for name, header in sent)
        assert all(count <= (1 if kind == Kind.PULL else 2) for (_, kind), count in weights.items())
        vectors = torch.cat([table(ids[:, i]) for i, table in enumerate(twin.values())], dim=1)
        expected = nn.functional.mse_loss(top(vectors), target)
        torch.testing.assert_close(loss, expected)
        expected.backward()
        for each in plain:
            each.step()
            each.zero_grad()
    for name, table in twin.items():
        torch.testing.assert_close(stored(name), table.weight.detach(), rtol=1e-4, atol=1e-5)


def test_a_collection_with_filters_is_saved_and_loaded(connect: Connect, tmp_path: Path) -> None:
    ps = connect()
    model = Clicks(ps, push=[eps.Int8(), eps.KeysOnce()], pull=[eps.BFloat16(), eps.KeysOnce()])
    optimizer = Optimizer(ps, model, eps.SGD(lr=0.1))
    ids = torch.randint(0, 100, (64, TABLES))
    losses = []
    for _ in range(20):
        loss = nn.functional.mse_loss(model(ids), (ids.sum(dim=1) % 2).float()[:, None])
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0] / 2
    state = full_state_dict(model)
    assert state["rows.embedding_bags.c3.keys"].tolist() == sorted(set(ids[:, 3].tolist()))
    save(model, tmp_path / "model.pt")
    for name in NAMES:
        ps.clear_table(name)
    load(model, tmp_path / "model.pt")
    again = full_state_dict(model)
    assert all(torch.equal(again[name], value) for name, value in state.items())


def test_layers_grow_by_their_admission_and_forget_by_their_eviction(connect: Connect) -> None:
    """An id is trained from the batch on that makes its row; until then its initial row is shown."""
    ps = connect()
    policies: dict[str, Any] = {"admission": eps.MinCount(2), "eviction": [eps.IdleFor("30d")], "usage": "score"}
    layer = Embedding(ps, "grown", 3, optimizer=eps.SGD(lr=1.0), **policies)
    bag = EmbeddingBag(ps, "bagged", 3, optimizer=eps.SGD(lr=1.0), admission=eps.MinCount(2))
    tables = [TableConfig("clicks", 3, **policies)]
    collection = EmbeddingBagCollection(ps, tables, optimizer=eps.SGD(lr=1.0))
    assert ps.open("bagged").spec.admission == eps.MinCount(2)
    assert ps.open("clicks").spec.eviction == (eps.IdleFor("30d"),)
    optimizer = Optimizer(ps, nn.ModuleList([layer, bag, collection]), eps.SGD(lr=1.0))
    ids = torch.tensor([[4, 5]])
    before = layer(ids).detach()
    for step in range(3):
        optimizer.zero_grad()
        clicks = Jagged(["clicks"], ids[0], torch.tensor([2]))
        (layer(ids).sum() + bag(ids).sum() + collection(clicks).values().sum()).backward()
        optimizer.step()
        ps.flush()
        torch.testing.assert_close(layer(ids).detach(), before - step)  # the first push is counted alone
    assert isinstance(layer.table, eps.SparseTable)
    assert layer.table.usage([4, 5, 6]).count[:2].tolist() == [3, 3]
    assert layer.table.usage([4]).score.tolist() == [0]  # layers push no scores
    assert layer.table.state().rows == 2
