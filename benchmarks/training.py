"""Models that benchmarks train, the loop that trains them, and the worker process that does so in every way.

A model makes its batches, and a `Trainable` of itself: `local()` has all weights in this process, `remote(ps)` at the
servers. How the benchmarks differ is in what they ask of `Trainer`.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, distributed, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import elasticps as eps
from benchmarks.core.criteo import CATEGORIES, NUMBERS, Source
from elasticps.client.cache_batches import NOT_USED
from elasticps.client.client import Client
from elasticps.client.registry import Registry
from elasticps.client.runtime import Runtime, Stream
from elasticps.client.short_keys import Saved
from elasticps.client.tables import SparseTable
from elasticps.client.warm import warm
from elasticps.model.spec import Filter
from elasticps.torch import (
    Embedding,
    EmbeddingBagCollection,
    GroupClient,
    Jagged,
    LocalGroup,
    Optimizer,
    TableConfig,
    prefetch,
)
from examples.demo import data
from examples.demo import training as demo
from examples.demo.data import auc
from examples.demo.model import tensors
from examples.digits_cnn import digits, network

SEED = 1
TIMEOUT_S = 120.0
ROWS_LR, DENSE_LR, DIGITS_LR, ROWS_STD = 0.02, 0.001, 0.1, 0.05
DIM = 16
BOTTOM, TOP = 64, (64, 32)  # widths of DLRM's layers
WIDE = 512  # of the layers of a model without rows
POOL = 64  # batches made before anything is measured, and used again and again
HELD_OUT = 1 << 20  # the number of the first batch that is only scored
SCORED = 40  # batches

Inputs: TypeAlias = tuple[Tensor, ...]
"""Of the model, and at last the labels."""

KEYS: list[Filter] = [eps.KeysOnce(), eps.KeyDeltas()]
FILTERS: dict[str, tuple[Sequence[Filter], Sequence[Filter]]] = {
    "none": ((), ()),
    "bfloat16": ([eps.BFloat16()], [eps.BFloat16()]),
    "float16": ([eps.Float16()], [eps.Float16()]),
    "int8": ([eps.Int8()], [eps.Int8()]),
    "int8+keys": ([eps.Int8(), *KEYS], [eps.Int8(), *KEYS]),
    "int8+keys+top_k": ([eps.Int8(), *KEYS], [eps.Int8(), *KEYS]),
    "int8+once": ([eps.Int8(), eps.KeysOnce()], [eps.Int8(), eps.KeysOnce()]),
    "top_k": ([eps.TopK(0.01)], ()),
    "top_k+int8": ([eps.TopK(0.01), eps.Int8()], ()),
    "random_k+int8": ([eps.RandomK(0.01), eps.Int8()], ()),
    "threshold+zstd": ([eps.Threshold(2e-3), eps.BFloat16(), eps.Zstd()], ()),
    "threshold+top_k": ([eps.Threshold(1e-3), eps.TopK(0.01)], ()),
    "cache": ((), ()),
    "cache+int8+keys": ([eps.Int8(), *KEYS], ()),
}
"""For pushes and for pulls, by name."""
DENSE_FILTERS: dict[str, Sequence[Filter]] = {"int8+keys+top_k": [eps.TopK(0.1), eps.Int8()]}
"""For pushes of DLRM's dense weights, where those have filters of their own."""
CACHE = eps.Cache(rows=1 << 20, staleness=8)  # where the name says so


@dataclass
class Trainable:
    """A model with what steps it.

    loss    of a batch
    expect  says, during a step, which batch comes next
    feed    gives the batches in the order in which they are trained, and may look at them before
    finish  waits until all steps are committed
    table   its rows at the servers, if it has any
    """

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    loss: Callable[..., Tensor] = functional.binary_cross_entropy_with_logits
    expect: Callable[[Inputs], None] = lambda inputs: None
    feed: Callable[[list[Inputs]], Iterable[Inputs]] = lambda batches: batches
    finish: Callable[[], None] = lambda: None
    table: SparseTable | None = None

    def train(self, batches: list[Inputs]) -> dict[str, float]:
        """Trains a step on each batch; when the first began and the last was committed, in monotonic seconds."""
        self.model.train()
        began = time.monotonic()
        for number, (*inputs, labels) in enumerate(self.feed(batches), 1):
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            loss = self.loss(self.model(*inputs), labels)
            if number < len(batches):
                self.expect(batches[number])
            loss.backward()
            for optimizer in self.optimizers:
                optimizer.step()
            loss.item()  # whoever trains looks at it
        self.finish()
        return {"began": began, "ended": time.monotonic()}


# --- models


class DLRM(nn.Module):
    """DLRM in plain torch: it does not know where its embeddings live.

    Naumov, Mudigere, Shi et al., "Deep Learning Recommendation Model for Personalization and Recommendation Systems",
    2019. `rows`: ids [n, categories] -> [n, categories, dim]; a module, or not one of the model's.
    """

    def __init__(self, rows: Callable[[Tensor], Tensor], dim: int = DIM) -> None:
        super().__init__()
        self.rows = rows
        vectors = CATEGORIES + 1
        self.bottom = _layers(NUMBERS, BOTTOM, dim)
        self.top = nn.Sequential(*_layers(dim + vectors * (vectors - 1) // 2, *TOP), nn.Linear(TOP[-1], 1))
        self.register_buffer("pairs", torch.tril_indices(vectors, vectors, -1), persistent=False)

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        """Logit of a click, [n]."""
        bottom = self.bottom(numbers)
        vectors = torch.cat([bottom[:, None], self.rows(categories)], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        pairs: Tensor = self.get_buffer("pairs")
        top: Tensor = self.top(torch.cat([bottom, products[:, pairs[0], pairs[1]]], dim=1))
        return top[:, 0]


def _layers(*widths: int) -> nn.Sequential:
    pairs = itertools.pairwise(widths)
    return nn.Sequential(*(part for before, after in pairs for part in (nn.Linear(before, after), nn.ReLU())))


class CategoryRows(nn.Module):
    """A table for each category of a click, in one layer: as `DLRM` takes them."""

    names = tuple(f"category{i}" for i in range(CATEGORIES))

    def __init__(self, ps: Client | GroupClient, init: eps.Normal) -> None:
        super().__init__()
        tables = [TableConfig(name, DIM, init=init) for name in self.names]
        self.tables = EmbeddingBagCollection(ps, tables, optimizer=eps.Adagrad(lr=ROWS_LR))

    def forward(self, ids: Tensor) -> Tensor:
        """ids [n, categories] -> [n, categories, DIM]."""
        rows: Tensor = self.tables(Jagged.columns(self.names, ids)).values()
        return rows.view(*ids.shape, DIM)

    def expect(self, ids: Tensor) -> None:
        """Says which batch comes next: its rows are asked for as the step ends."""
        self.tables.expect(Jagged.columns(self.names, ids))


def _local_rows(values: int) -> nn.Embedding:
    """A layer whose gradients are sparse: dense ones of 54 MB a step would be no match."""
    torch.sparse.check_sparse_tensor_invariants.disable()  # as it is anyway; torch warns unless this says so
    rows = nn.Embedding(values, DIM, sparse=True)
    nn.init.normal_(rows.weight, std=ROWS_STD)
    return rows


class LocalRows:
    """Rows of this process, trained by torch. No module, so that nobody takes them for dense weights."""

    def __init__(self, values: int) -> None:
        self._rows = _local_rows(values)
        self.optimizer = torch.optim.Adagrad(self._rows.parameters(), lr=ROWS_LR)

    def __call__(self, ids: Tensor) -> Tensor:
        rows: Tensor = self._rows(ids)
        return rows


class DeepFMTraining:
    """The demo's model and its ratings."""

    def __init__(self, batch: int, rank: int, workers: int) -> None:
        self._ratings, _ = data.split(data.load(data.find()), SEED)
        mine = np.arange(len(self._ratings))[rank::workers]  # the split has put them in random order
        starts = range(0, min(len(mine) - batch + 1, POOL * batch), batch)
        self.batches = [tensors(self._ratings, mine[start : start + batch]) for start in starts]
        if not self.batches:
            raise eps.ConfigError(f"{workers} workers have no batch of {batch} samples each")

    def local(self) -> Trainable:
        """All of it in this process."""
        made = demo.local(self._ratings, SEED)
        return Trainable(made.model, made.optimizers)

    def remote(self, ps: Client | GroupClient) -> Trainable:
        """Every weight at the servers."""
        assert isinstance(ps, Client)
        made = demo.remote(ps, self._ratings, SEED)
        return Trainable(made.model, made.optimizers, expect=lambda inputs: made.expect(*inputs[:2]), finish=ps.flush)


class DLRMTraining:
    """DLRM and clicks that are made up. Its rows are of one table for each category, or of one table."""

    def __init__(self, batch: int, rank: int, workers: int, seed: int = SEED) -> None:
        self._source, self._batch, self._seed = Source(seed), batch, seed
        self._rank, self._workers = rank, workers

    @cached_property
    def batches(self) -> list[Inputs]:
        """The first ones of this rank."""
        return [self._clicks(number) for number in range(self._rank, POOL * self._workers, self._workers)]

    def fresh(self) -> Iterator[Inputs]:
        """Batches without end, each of them another."""
        return map(self._clicks, itertools.count(1))

    def _clicks(self, number: int) -> Inputs:
        made = self._source.batch(number, self._batch)
        return torch.from_numpy(made.numbers), torch.from_numpy(made.categories), torch.from_numpy(made.clicked)

    def local(self) -> Trainable:
        """All of it in this process."""
        torch.manual_seed(self._seed)
        rows = _local_rows(self._source.values)
        model = DLRM(rows)
        dense = [p for p in model.parameters() if p is not rows.weight]
        return Trainable(model, [torch.optim.Adagrad([rows.weight], lr=ROWS_LR), torch.optim.Adam(dense, lr=DENSE_LR)])

    def remote(self, ps: Client | GroupClient) -> Trainable:
        """Every weight at the servers, each category's rows in a table of its own."""
        torch.manual_seed(self._seed)
        rows = CategoryRows(ps, eps.Normal(std=ROWS_STD, seed=self._seed))
        model = DLRM(rows)
        optimizer = Optimizer(ps, model, eps.Adam(lr=DENSE_LR), prefix="dlrm", pipeline=True)
        return Trainable(model, [optimizer], expect=lambda inputs: rows.expect(inputs[1]), finish=ps.flush)

    def in_one_table(self, ps: Client | GroupClient, dim: int) -> Trainable:
        """Every weight at the servers, all rows in one table; they come while gradients go."""
        torch.manual_seed(self._seed)
        rows = self._embedding(ps, dim)
        model = DLRM(rows, dim)
        optimizer = Optimizer(ps, model, eps.Adam(lr=DENSE_LR), pipeline=True)
        return Trainable(model, [optimizer], expect=lambda inputs: rows.prefetch(inputs[1]), finish=ps.flush)

    def filtered(self, ps: Client, name: str, rows: str = "pulled", depth: int = 0) -> Trainable:
        """With filters. rows: "pulled" from one table as they are wanted, "ahead": `depth` batches before, or "local":
        kept and trained in this process."""
        torch.manual_seed(self._seed)
        push, pull = FILTERS[name]
        embedding: Embedding | LocalRows
        if rows == "local":
            embedding = LocalRows(self._source.values)
        else:
            cache = CACHE if name.startswith("cache") else None
            embedding = self._embedding(ps, DIM, push=push, pull=pull, cache=cache)
        model = DLRM(embedding)
        optimizer = Optimizer(ps, model, eps.Adam(lr=DENSE_LR), push=DENSE_FILTERS.get(name, push), pull=pull)
        made = Trainable(model, [optimizer], finish=ps.flush)
        if isinstance(embedding, LocalRows):
            made.optimizers = [optimizer, embedding.optimizer]
            return made
        assert isinstance(embedding.table, SparseTable)
        made.table = embedding.table
        if rows == "ahead":
            made.feed = lambda batches: prefetch(batches, model, depth)
        return made

    def _embedding(self, ps: Client | GroupClient, dim: int, **options: Any) -> Embedding:
        init = eps.Normal(std=ROWS_STD, seed=self._seed)
        return Embedding(ps, "categories", dim, optimizer=eps.Adagrad(lr=ROWS_LR), init=init, **options)

    def score(self, made: Trainable) -> float:
        """The area under the curve, on samples that were not trained."""
        scores, labels = [], []
        for number in range(SCORED):
            *inputs, clicked = self._clicks(HELD_OUT + number)
            scores.append(made.model(*inputs).numpy())
            labels.append(clicked.numpy())
        return auc(np.concatenate(scores), np.concatenate(labels))


class DigitsTraining:
    """A small convolutional network and scikit-learn's handwritten digits: all dense, for what filters do to tensors.
    1,437 images to train on and 360 to score."""

    def __init__(self, batch: int, seed: int) -> None:
        self._batch, self._seed = batch, seed
        self._images, self._held_out, self._labels, self._answers = digits(seed)
        self._draw = torch.Generator().manual_seed(seed)

    def fresh(self) -> Iterator[Inputs]:
        """Batches without end, drawn at random: images float32 [batch, 1, 8, 8] and labels int64 [batch]."""
        while True:
            chosen = torch.randint(len(self._images), (self._batch,), generator=self._draw)
            yield self._images[chosen], self._labels[chosen]

    def filtered(self, ps: Client, name: str) -> Trainable:
        """Every weight at the servers, with filters."""
        torch.manual_seed(self._seed)
        push, pull = FILTERS[name]
        model = network()
        optimizer = Optimizer(ps, model, eps.SGD(lr=DIGITS_LR), push=push, pull=pull)
        return Trainable(model, [optimizer], functional.cross_entropy, finish=ps.flush)

    def score(self, made: Trainable) -> float:
        """The part that is recognised, of images that were not trained."""
        found = made.model(self._held_out).argmax(dim=1)
        return float((found == self._answers).float().mean())


class DenseTraining:
    """Wide layers, whose weights are all dense, and random numbers."""

    def __init__(self, batch: int) -> None:
        self.batches = [(torch.randn(batch, WIDE), torch.rand(batch)) for _ in range(4)]

    def remote(self, ps: Client | GroupClient) -> Trainable:
        """Every weight at the servers."""
        torch.manual_seed(SEED)
        model = nn.Sequential(*_layers(WIDE, WIDE, WIDE, WIDE), nn.Linear(WIDE, 1), nn.Flatten(0))
        optimizer = Optimizer(ps, model, eps.Adam(lr=DENSE_LR), pipeline=True)
        return Trainable(model, [optimizer], finish=ps.flush)


# --- the worker


class ThroughPorts(Runtime):
    """Reaches servers through ports of this machine."""

    def __init__(self, ports: dict[str, int]) -> None:
        self._ports = ports

    def connect(self, host: str, port: int, attempt: int) -> Stream:
        return super().connect("127.0.0.1", self._ports[f"{host}:{port}"], attempt)


def client(url: str, ports: dict[str, int], worker: str, app: str) -> Client:
    """A worker that reaches servers through `ports`."""
    warm()
    registry = Registry.open(url, TIMEOUT_S, ThroughPorts(ports))
    return Client(registry, worker, eps.ASP(), 4, TIMEOUT_S, app)


def meet(meeting: str, rank: int, size: int) -> None:
    """Joins the other ranks, through the file `meeting`."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)


class Trainer:
    """A worker process: one model, trained in every way that it is asked to `build`, each in its turn.

    model    "deepfm", "dlrm", "digits" or "dense"
    rank     below `workers`
    groups   how many processes take part in an all-reduce, for each such way
    meeting  the file through which all ranks meet, if they have to
    """

    def __init__(
        self, *, model: str, batch: int, rank: int = 0, workers: int = 1, seed: int = SEED, meeting: str = "",
        groups: Sequence[int] = (),
    ) -> None:  # fmt: skip
        torch.set_num_threads(1)  # as many processes as workers: each has one thread that computes, in every way
        torch.set_num_interop_threads(1)
        makers: dict[str, Callable[[], Any]] = {
            "deepfm": partial(DeepFMTraining, batch, rank, workers),
            "dlrm": partial(DLRMTraining, batch, rank, workers, seed),
            "digits": partial(DigitsTraining, batch, seed),
            "dense": partial(DenseTraining, batch),
        }
        self._model, self._rank = makers[model](), rank
        self._stack, self._ready = ExitStack(), dict[str, Trainable]()
        if meeting:
            meet(meeting, rank, workers)
        self._groups = {count: distributed.new_group(list(range(count))) for count in groups}  # everybody makes each
        self._batches: Iterator[Inputs] | None = None

    def build(self, way: str, url: str = "") -> None:
        """Makes a way of `bench train` ready: "alone" (torch and nothing else), "all-reduce N" (with the first N
        workers), or "servers R" (with R replicas, at `url`)."""
        self._batches = self._batches or itertools.cycle(self._model.batches)
        kind, _, count = way.partition(" ")
        if kind == "servers":
            ps = self._stack.enter_context(eps.connect(url, worker=f"trainer{self._rank}", timeout=TIMEOUT_S))
            self._ready[way] = self._model.remote(ps)
            return
        self._ready[way] = made = self._model.local()
        if kind == "all-reduce":
            made.model = DistributedDataParallel(made.model, process_group=self._groups[int(count)])

    def build_grouped(self, way: str, url: str, ports: dict[str, int], app: str, dim: int) -> None:
        """Makes a way of `bench groups` ready, and leaves what was built before: "separate", where each process is a
        worker, or "group"."""
        self.leave()
        self._batches = self._batches or itertools.cycle(self._model.batches)
        ps: Client | GroupClient
        if way == "group":
            ps = LocalGroup().with_client(lambda: client(url, ports, "group", app))
        else:
            ps = client(url, ports, f"w{self._rank}", app)
        self._stack.enter_context(ps)
        one_table = isinstance(self._model, DLRMTraining)
        self._ready[way] = self._model.in_one_table(ps, dim) if one_table else self._model.remote(ps)

    def build_filtered(self, way: str, url: str, ports: dict[str, int], app: str, **options: Any) -> None:
        """Makes filters ready: `way` is their name in FILTERS. Every batch is a new one. options: of DLRM's
        `filtered`."""
        ps = self._stack.enter_context(client(url, ports, app, app))
        self._ready[way] = self._model.filtered(ps, way, **options)
        self._batches = self._model.fresh()

    def train(self, way: str, steps: int) -> dict[str, float]:
        """Trains so many steps; when it began, and when all was committed, in monotonic seconds."""
        assert self._batches is not None, "built before"
        return self._ready[way].train(list(itertools.islice(self._batches, steps)))

    def score(self, way: str) -> dict[str, object]:
        """How good the model is on what was not trained, as it was before this takes anything: also [bytes sent, bytes
        without filters] of keys, [bytes received, bytes without a cache] of rows, and the age of the oldest row shown,
        in steps."""
        made = self._ready[way]
        (optimizer, *_) = made.optimizers
        assert isinstance(optimizer, Optimizer)
        optimizer.refresh()
        made.model.eval()
        keys, use = (made.table.key_bytes, made.table.cached) if made.table else (Saved(0, 0), NOT_USED)
        with torch.no_grad():
            return {
                "score": self._model.score(made), "keys": [keys.sent, keys.whole],
                "rows": [use.nbytes, use.whole_bytes], "oldest": use.oldest,
            }  # fmt: skip

    def leave(self) -> None:
        """Leaves all clusters."""
        self._stack.close()
        self._ready.clear()

    def close(self) -> None:
        """Leaves all clusters, and the other ranks."""
        self.leave()
        if distributed.is_initialized():
            distributed.destroy_process_group()
