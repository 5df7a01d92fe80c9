"""Prefetching: when rows are requested, and that results stay the same."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import elasticps as eps
from elasticps.client.transport import Link
from elasticps.errors import ConfigError, InputError
from elasticps.torch import (
    Embedding,
    EmbeddingBag,
    EmbeddingBagCollection,
    Jagged,
    Optimizer,
    ShardedDataset,
    TableConfig,
    prefetch,
)
from elasticps.wire.frames import HEADER_BYTES, Kind, unpack_header
from tests.shared_cluster import Connect

BATCHES, SIZE = 12, 6


class Model(nn.Module):
    """Two layers: one sees a batch's ids as they are, the other with padding."""

    def __init__(self, ps: Any, **options: Any) -> None:
        super().__init__()
        rows = eps.Adagrad(lr=0.1)
        init = eps.Normal(std=0.5, seed=1)
        self.users = Embedding(ps, "users", 4, optimizer=rows, init=init, **options)
        self.words = EmbeddingBag(ps, "words", 4, optimizer=rows, init=init, padding_idx=0, **options)
        self.top = nn.Linear(8, 1)

    def forward(self, users: Tensor, words: Tensor) -> Tensor:
        out: Tensor = self.top(torch.cat([self.users(users), self.words(words)], dim=1))
        return out


class Collected(nn.Module):
    """The same from a collection, which gets a part of the batch; words have a second feature."""

    def __init__(self, ps: Any, cache: eps.Cache | None = None) -> None:
        super().__init__()
        init = eps.Normal(std=0.5, seed=1)
        tables = [
            TableConfig("users", 4, init=init, cache=cache),
            TableConfig("words", 4, ["said", "heard"], mode="mean", init=init, cache=cache),
        ]
        self.bags = EmbeddingBagCollection(ps, tables, optimizer=eps.Adagrad(lr=0.1))
        self.top = nn.Linear(12, 1)

    def forward(self, users: Tensor, words: Any) -> Tensor:
        lists = words if isinstance(words, Jagged) else listed(users, words)
        out: Tensor = self.top(self.bags(lists).values())
        return out


def listed(users: Tensor, words: Tensor) -> Jagged:
    return Jagged.of({"users": users[:, None], "said": words, "heard": words.flip(1)[:, :2]})


def in_lists(data: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [batch | {"ids": (batch["ids"][0], listed(*batch["ids"]))} for batch in data]


def batches(seed: int = 0) -> list[dict[str, Any]]:
    random = torch.Generator().manual_seed(seed)

    def ids(*shape: int) -> Tensor:
        return torch.randint(0, 9, shape, generator=random)

    return [{"ids": (ids(SIZE), ids(SIZE, 3)), "label": torch.rand(SIZE, 1, generator=random)} for _ in range(BATCHES)]


def train(ps: Any, loader: Any, model: Model | Collected) -> dict[str, Tensor]:
    optimizer = Optimizer(ps, model, eps.SGD(lr=0.1))
    for batch in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(*batch["ids"]), batch["label"]).backward()
        optimizer.step()
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def both(batch: dict[str, Any], model: Model) -> Any:
    return {model.users: batch["ids"][0], model.words: batch["ids"][1]}


@pytest.mark.parametrize("explicit", [False, True])
def test_rows_of_the_next_batch_are_pulled_once_as_a_step_ends(ps: Any, explicit: bool) -> None:
    """As under BSP: in between nothing changes that a pull would show."""
    torch.manual_seed(3)
    data, model = batches(), Model(ps)
    ids = (lambda batch: both(batch, model)) if explicit else None
    counts: list[tuple[int, int]] = []
    train(ps, watched(prefetch(data, model, ahead=2, ids=ids), ps, counts), model)
    table = ps.tables["users"]
    expected = [list(dict.fromkeys(batch["ids"][0].tolist())) for batch in data]
    assert table.pulls == expected
    early = 1 if explicit else 2  # before that nobody knew
    assert [count for _, count in counts] == [*range(early), *(at + 1 for at in range(early, BATCHES))]


def watched(loader: Any, ps: Any, counts: list[tuple[int, int]]) -> Iterator[Any]:
    """Notes how many pulls of users there were as each batch comes."""
    for at, batch in enumerate(loader):
        counts.append((at, len(ps.tables["users"].pulls)))
        yield batch


def test_rows_that_were_changed_are_pulled_again(ps: Any) -> None:
    torch.manual_seed(3)
    data, model = batches(), Model(ps)
    optimizer = Optimizer(ps, model, eps.SGD(lr=0.1))
    for batch in prefetch(data, model, ids=lambda batch: both(batch, model)):
        ps.push({})  # another step
        out = model(*batch["ids"])
        row = ps.tables["users"].row(int(batch["ids"][0][0]))
        assert model.users(batch["ids"][0][:1]).detach().numpy().tobytes() == row.tobytes()
        out.sum().backward()
        optimizer.step()


def test_loaders_that_cannot_be_prefetched_are_refused(ps: Any) -> None:
    model = Model(ps)
    wrong: list[Any] = [0, 65, True, 1.5]
    for depth in wrong:
        with pytest.raises(ConfigError, match="ahead"):
            prefetch([], model, ahead=depth)
    with pytest.raises(ConfigError, match="no elasticps embedding"):
        prefetch([], nn.Linear(1, 1))
    bags = EmbeddingBagCollection(ps, [TableConfig("t", 4)], optimizer=eps.SGD(lr=0.1))
    lists = iter(prefetch([{"t": torch.arange(3)}] * 3, bags))
    bags({"t": next(lists)["t"] + 1})
    with pytest.raises(ConfigError, match=r"table 't' gets is no part.*lists of ids"):
        next(lists)
    with pytest.raises(ConfigError, match="shard"):
        prefetch(DataLoader(ShardedDataset(ps, 10, 2), batch_size=None), model)
    loader = iter(prefetch(batches(), model))
    ids, words = next(loader)["ids"]
    model(ids + 1, words)
    with pytest.raises(ConfigError, match=r"ids=lambda"):
        next(loader)
    unknown: Any = lambda batch: {"users": batch["ids"][0]}  # noqa: E731
    with pytest.raises(ConfigError, match=r"pairs of them"):
        list(prefetch(batches(), model, ids=unknown))
    with pytest.raises(InputError, match="int64"):
        list(prefetch(batches(), model, ids=lambda batch: [(model.users, batch["label"])]))
    assert len(prefetch(batches(), model)) == BATCHES
    assert list(prefetch([], model)) == []


def rows(ps: eps.Client, name: str) -> Tensor:
    table = ps.open(name)
    assert isinstance(table, eps.SparseTable)
    return torch.from_numpy(table.pull(np.arange(9), exact=True))


def rounds(
    connect: Connect, app: str, depth: int, kind: type[Model | Collected] = Model, explicit: bool = False
) -> list[dict[str, Tensor]]:
    """Two workers, each with its own batches; depth: 0 for a plain loop; explicit: lists are made of each
    batch."""
    found: dict[int, dict[str, Tensor]] = {}
    failed: list[BaseException] = []
    clients = [connect(f"w{i}", app=app, consistency=eps.BSP()) for i in range(2)]
    models = []
    for client in clients:
        torch.manual_seed(5)
        models.append(kind(client))

    def work(i: int) -> None:
        try:
            clients[i].resume()
            ready.wait(100)
            data: Any = batches(seed=i)
            if kind is Collected and not explicit:
                data = in_lists(data)
            ids: Any = (lambda batch: {models[i].bags: listed(*batch["ids"])}) if explicit else None
            found[i] = train(clients[i], prefetch(data, models[i], depth, ids=ids) if depth else data, models[i])
            found[i] |= {name: rows(clients[i], name) for name in ("users", "words")}
            clients[i].close()
        except BaseException as error:
            failed.append(error)

    ready = threading.Barrier(2)
    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    return [found[0], found[1]]


def test_rounds_with_prefetch_are_the_same_bit_for_bit(connect: Connect) -> None:
    plain, depth = rounds(connect, "plain", 0), rounds(connect, "ahead", 3)
    for one, other in zip(plain, depth, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert value.numpy().tobytes() == other[name].numpy().tobytes(), name


@pytest.mark.parametrize("explicit", [False, True])
def test_rounds_of_collections_with_prefetch_are_the_same_bit_for_bit(connect: Connect, explicit: bool) -> None:
    plain = rounds(connect, f"plain-bags-{explicit}", 0, Collected, explicit)
    depth = rounds(connect, f"bags-ahead-{explicit}", 3, Collected, explicit)
    for one, other in zip(plain, depth, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert value.numpy().tobytes() == other[name].numpy().tobytes(), name


def test_the_end_of_a_step_and_the_next_pull_share_a_message(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[list[Kind]] = []
    send = Link.send

    def count(link: Link, buffers: list[Any]) -> bool:
        data, kinds, at = b"".join(bytes(buffer) for buffer in buffers), list[Kind](), 0
        while at < len(data):
            header = unpack_header(data, at)
            kinds.append(Kind(header.kind))
            at += HEADER_BYTES + header.body
        if kinds != [Kind.GET_VIEW]:  # which a client asks for when something takes long
            messages.append(kinds)
        return send(link, buffers)

    ps = connect()
    torch.manual_seed(5)
    model = Collected(ps)
    optimizer = Optimizer(ps, model, eps.SGD(lr=0.1))
    data = in_lists(batches())
    for batch, following in itertools.pairwise(data):
        loss = nn.functional.mse_loss(model(*batch["ids"]), batch["label"])
        optimizer.zero_grad()
        loss.backward()
        model.bags.expect(following["ids"][1])
        if batch is data[1]:  # all is warm
            monkeypatch.setattr(Link, "send", count)
        optimizer.step()
        ps.flush()
    tables = [header for header in messages if Kind.PULL in header]
    assert tables == messages  # no pull by itself, no push by itself
    assert len(messages) <= 2 * (len(data) - 2)
    assert all(kinds == [Kind.PUSH, Kind.PULL] for kinds in messages)


@pytest.mark.parametrize("cache", [None, eps.Cache(rows=7, staleness=5), eps.Cache(rows=100, staleness=0)])
@pytest.mark.parametrize("kind", [Model, Collected])
def test_a_worker_alone_gets_the_same_rows_with_prefetch(
    connect: Connect, app: str, cache: eps.Cache | None, kind: type[Model | Collected]
) -> None:
    """Also where not all keys of a batch fit into the cache."""
    found = []
    for name in ("plain", "ahead"):
        ps = connect(app=f"{app}.{name}")
        torch.manual_seed(5)
        model = kind(ps) if name == "plain" else kind(ps, cache=cache)
        data: Any = batches() if kind is Model else in_lists(batches())
        found.append(train(ps, data if name == "plain" else prefetch(data, model, ahead=3), model))
        found[-1] |= {"users": rows(ps, "users")}
        table = model.users.table if isinstance(model, Model) else ps.open("users")
        assert isinstance(table, eps.SparseTable)
        use = table.cached
        assert table.cache == (cache if name == "ahead" else None)
        assert use.oldest <= (cache.staleness if cache else 6)
    for name, value in found[0].items():
        assert value.numpy().tobytes() == found[1][name].numpy().tobytes(), name
