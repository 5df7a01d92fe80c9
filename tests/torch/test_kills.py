"""A server dies while a model trains with filters, caches and collections: results are the same bit for bit."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import elasticps as eps
from elasticps.admin.audit import audit
from elasticps.torch import Embedding, EmbeddingBagCollection, EmbeddingCollection, Jagged, Optimizer, TableConfig

STEPS, KILLED_AT, IDS, SIZE = 24, 8, 300, 16
KEYS = [eps.KeysOnce(), eps.KeyDeltas()]


class Model(nn.Module):
    def __init__(self, ps: eps.Client) -> None:
        super().__init__()
        init = eps.Normal(std=0.5, seed=1)
        adagrad = eps.Adagrad(lr=0.1)
        bags = [
            TableConfig("users", 4, ["user", "friends"], init=init),
            TableConfig("items", 8, init=init, push=[eps.Int8(), *KEYS], pull=[eps.Int8(), *KEYS]),
            TableConfig("kept", 4, mode="mean", init=init, cache=eps.Cache(rows=150, staleness=3)),
        ]
        self.bags = EmbeddingBagCollection(ps, bags, optimizer=adagrad, push=KEYS, pull=KEYS)
        self.rows = EmbeddingCollection(
            ps, [TableConfig("words", 4, init=init)], optimizer=adagrad, push=[eps.TopK(0.5)]
        )
        self.alone = Embedding(ps, "alone", 4, optimizer=adagrad, init=init, push=[eps.BFloat16(), eps.Zstd()])
        self.top = nn.Linear(4 + 4 + 8 + 4 + 4 + 4, 1)

    def forward(self, lists: Jagged, words: dict[str, Any], ids: Tensor) -> Tensor:
        found = self.rows(words)["words"].values().view(SIZE, 2, 4).sum(dim=1)
        out: Tensor = self.top(torch.cat([self.bags(lists).values(), found, self.alone(ids)], dim=1))
        return out

    def expect(self, lists: Jagged, words: dict[str, Any], ids: Tensor) -> None:
        self.bags.expect(lists)
        self.rows.expect(words)
        self.alone.expect(ids)


def batches() -> list[tuple[Any, Tensor]]:
    random = torch.Generator().manual_seed(3)

    def ids(*shape: int) -> Tensor:
        return (IDS * torch.rand(shape, generator=random) ** 3).long()  # some of them often, and twice in a batch

    made = []
    for number in range(STEPS):
        few = ids(SIZE, 3) if number % 5 else (torch.empty(0, dtype=torch.int64), torch.zeros(SIZE, dtype=torch.int64))
        lists = Jagged.of({"user": ids(SIZE), "friends": few, "items": ids(SIZE), "kept": ids(SIZE, 2)})
        made.append(((lists, {"words": ids(SIZE, 2)}, ids(SIZE)), torch.rand(SIZE, 1, generator=random)))
    return made


def train(cluster: eps.LocalCluster, app: str, kill: str = "") -> dict[str, Any]:
    torch.manual_seed(5)
    failed: list[BaseException] = []
    over = threading.Event()
    with eps.connect(cluster.url, worker="w0", app=app, timeout=100) as ps:
        model, data = Model(ps), batches()
        optimizer = Optimizer(ps, model, eps.Adam(lr=0.01), pipeline=True, push=[eps.Int8()], pull=[eps.BFloat16()])

        def look() -> None:
            """Another thread asks for the same tables."""
            try:
                tables = [ps.open(name) for name in ("users", "items", "kept", "words")]
                while not over.wait(0.01):
                    ps.pull(
                        {table: np.arange(40) for table in tables if isinstance(table, eps.SparseTable)}, read="any"
                    )
            except BaseException as error:
                failed.append(error)

        beside = threading.Thread(target=look)
        beside.start()
        try:
            for number, (inputs, labels) in enumerate(data):
                optimizer.zero_grad()
                nn.functional.mse_loss(model(*inputs), labels).backward()
                if number + 1 < STEPS:
                    model.expect(*data[number + 1][0])
                if kill and number == KILLED_AT:
                    cluster.kill(kill)
                optimizer.step()
        finally:
            over.set()
            beside.join()
        ps.flush()
        optimizer.refresh()
        assert not failed
        names = ("users", "items", "kept", "words", "alone")
        tables = {name: ps.open(name) for name in names}
        found: dict[str, Any] = {name: value.detach().numpy().copy() for name, value in model.named_parameters()}
        return found | {
            name: table.pull(np.arange(IDS), exact=True)
            for name, table in tables.items()
            if isinstance(table, eps.SparseTable)
        }


def test_a_server_that_dies_does_not_change_training() -> None:
    with eps.LocalCluster("torch-kills", servers=3, replicas=2, ranges=32) as cluster:
        undisturbed, disturbed = train(cluster, "calm"), train(cluster, "killed", kill="s1")
        assert undisturbed.keys() == disturbed.keys()
        for name, value in undisturbed.items():
            assert value.tobytes() == disturbed[name].tobytes(), name
        report = audit(cluster.url, 30.0)
        assert report.clean, report
