"""The systems that are compared: each makes a DLRM whose rows are where the system has them.

All of them start with the same weights, train by Adagrad (rows) and Adam (the rest), and see a step before the next one
begins: what they learn differs by rounding alone.
"""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed import rpc
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import elasticps as eps
from benchmarks.core.criteo import CATEGORIES, Source
from benchmarks.training import DENSE_LR, DIM, DLRM, ROWS_LR, ROWS_STD, TIMEOUT_S, Trainable, meet
from elasticps.torch import EmbeddingBagCollection, Jagged, Optimizer, TableConfig

NAMES = tuple(f"category{i}" for i in range(CATEGORIES))
EPS = 1e-10  # of Adagrad: torch's and elasticps' own, not FBGEMM's


@dataclass(frozen=True)
class Seat:
    """Which process of a contestant this is. meeting: the file through which its processes find each other."""

    rank: int
    ranks: int
    meeting: str
    replicas: int


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Built:
    """A model that trains, and where its rows are.

    trainable  the model, with what steps it
    batch      makes a batch's ids, int64 [n, categories], what the model takes
    read       rows of ids of one category as they are where they are trained, float32 [n, DIM]; NaN if that is nowhere
    holder     pid of a process that holds rows; 0: the last one of this contestant
    refresh    gets the newest dense weights
    close      gives up rows and weights
    """

    trainable: Trainable
    batch: Callable[[Tensor], Any]
    read: Callable[[int, NDArray[np.int64]], NDArray[np.float32]]
    holder: int = 0
    refresh: Callable[[], None] = _nothing
    close: Callable[[], None] = _nothing


class System(ABC):
    """A system in one process: it joins the others when it is made, and then makes models, one after another."""

    def __init__(self, seat: Seat) -> None:
        self.seat = seat

    @abstractmethod
    def build(self, source: Source) -> Built:
        """Makes a model for the ids of `source`."""

    def close(self) -> None:  # noqa: B027 - one process has nothing to leave
        """Leaves the other processes."""


def _as_they_are(ids: Tensor) -> Tensor:
    return ids


def _dense(model: DLRM) -> torch.optim.Optimizer:
    return torch.optim.Adam([*model.bottom.parameters(), *model.top.parameters()], lr=DENSE_LR)


def _dlrm(rows: Any, source: Source) -> DLRM:
    torch.manual_seed(source.seed)
    return DLRM(rows)


def initial_rows(values: int, seed: int) -> Tensor:
    """What all contestants begin with: float32 [values, DIM]."""
    return torch.randn(values, DIM, generator=torch.Generator().manual_seed(seed)) * ROWS_STD


class KeyedRows(nn.Module):
    """A collection of tables, of torchrec or elasticps, as `DLRM` takes it."""

    def __init__(self, collection: nn.Module) -> None:
        super().__init__()
        self.collection = collection
        self._order: Tensor | None = None

    def forward(self, batch: Any) -> Tensor:
        """A batch as the collection takes it -> [n, categories, DIM]."""
        found = self.collection(batch)
        rows: Tensor = found.values().view(-1, CATEGORIES, DIM)
        if tuple(found.keys()) == NAMES:
            return rows
        if self._order is None:  # a sharded collection has the tables of each process side by side
            self._order = torch.tensor([found.keys().index(name) for name in NAMES])
        return rows.index_select(1, self._order)


# --- torchrec


def _tables(source: Source) -> list[Any]:
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)  # FBGEMM calls what is deprecated
    from torchrec.modules.embedding_configs import EmbeddingBagConfig

    return [
        EmbeddingBagConfig(num_embeddings=size, embedding_dim=DIM, name=name, feature_names=[name])
        for name, size in zip(NAMES, source.sizes, strict=True)
    ]


def _keyed(source: Source) -> Callable[[Tensor], Any]:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    starts = torch.from_numpy(source.starts[:-1])

    def batch(ids: Tensor) -> Any:
        values = (ids - starts).t().reshape(-1)
        return KeyedJaggedTensor(list(NAMES), values, lengths=torch.ones(len(values), dtype=torch.int64))

    return batch


def _filled(source: Source, weights: Mapping[str, Tensor]) -> Callable[[int, NDArray[np.int64]], NDArray[np.float32]]:
    """Gives tables of this process their first rows; returns what reads them."""
    rows = initial_rows(source.values, source.seed)
    with torch.no_grad():
        for name, weight in weights.items():
            at = NAMES.index(name)
            weight.copy_(rows[source.starts[at] : source.starts[at + 1]])

    def read(category: int, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        if NAMES[category] not in weights:
            return np.full((len(ids), DIM), np.nan, np.float32)
        found: NDArray[np.float32] = weights[NAMES[category]].detach()[ids - source.starts[category]].numpy()
        return found

    return read


class Fbgemm(System):
    """torchrec's collection whose kernels look up and train all tables at once, in one process."""

    def build(self, source: Source) -> Built:
        from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection

        settings = {"lr": ROWS_LR, "eps": EPS}
        collection = FusedEmbeddingBagCollection(_tables(source), torch.optim.Adagrad, settings)
        read = _filled(source, {name: bag.weight for name, bag in collection.embedding_bags.items()})
        model = _dlrm(KeyedRows(collection), source)
        return Built(Trainable(model, [_dense(model)]), _keyed(source), read)


class Sharded(System):
    """torchrec's DistributedModelParallel over gloo: each table in one process, the rest of the model in all."""

    def __init__(self, seat: Seat) -> None:
        super().__init__(seat)
        os.environ["LOCAL_WORLD_SIZE"] = str(seat.ranks)
        meet(seat.meeting, seat.rank, seat.ranks)

    def build(self, source: Source) -> Built:
        from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
        from torchrec.distributed.model_parallel import DistributedModelParallel
        from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
        from torchrec.distributed.types import ShardingPlan
        from torchrec.modules.embedding_modules import EmbeddingBagCollection as PlainBags
        from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

        collection = PlainBags(tables=_tables(source), device=torch.device("meta"))
        apply_optimizer_in_backward(torch.optim.Adagrad, collection.parameters(), {"lr": ROWS_LR, "eps": EPS})
        order = np.argsort(source.sizes, kind="stable")[::-1].tolist()  # the largest tables in turns
        where = {NAMES[table]: table_wise(rank=at % self.seat.ranks) for at, table in enumerate(order)}
        sharder = EmbeddingBagCollectionSharder()
        plan = construct_module_sharding_plan(
            collection, where, sharder, self.seat.ranks, self.seat.ranks, device_type="cpu"
        )
        dlrm = _dlrm(KeyedRows(collection), source)
        model = DistributedModelParallel(
            dlrm, device=torch.device("cpu"), plan=ShardingPlan({"rows.collection": plan}), sharders=[sharder]
        )
        state = model.state_dict()
        weights = {}
        for name in NAMES:
            (whole,) = [each for key, each in state.items() if key.endswith(f"embedding_bags.{name}.weight")]
            for shard in whole.local_shards():
                weights[name] = shard.tensor
        return Built(Trainable(model, [_dense(dlrm)]), _keyed(source), _filled(source, weights))

    def close(self) -> None:
        torch.distributed.destroy_process_group()


# --- torch


class DataParallel(System):
    """Plain torch: every process has all of the model, and all-reduces gradients over gloo."""

    def __init__(self, seat: Seat) -> None:
        super().__init__(seat)
        torch.sparse.check_sparse_tensor_invariants.disable()
        meet(seat.meeting, seat.rank, seat.ranks)

    def build(self, source: Source) -> Built:
        rows = nn.Embedding.from_pretrained(initial_rows(source.values, source.seed), freeze=False, sparse=True)
        model = _dlrm(rows, source)
        optimizers = [torch.optim.Adagrad(rows.parameters(), lr=ROWS_LR), _dense(model)]

        def read(category: int, ids: NDArray[np.int64]) -> NDArray[np.float32]:
            found: NDArray[np.float32] = rows.weight.detach()[torch.from_numpy(ids)].numpy()
            return found

        return Built(Trainable(DistributedDataParallel(model), optimizers), _as_they_are, read)

    def close(self) -> None:
        torch.distributed.destroy_process_group()


# --- rows at another process


class RowServer:
    """Rows in memory, trained by torch's Adagrad: no copies elsewhere, and nothing on disk."""

    def __init__(self, values: int, seed: int) -> None:
        torch.sparse.check_sparse_tensor_invariants.disable()
        self._rows = torch.nn.Parameter(initial_rows(values, seed))
        self._optimizer = torch.optim.Adagrad([self._rows], lr=ROWS_LR)

    def pid(self) -> int:
        """Of the process that holds the rows."""
        return os.getpid()

    def pull(self, ids: Tensor) -> Tensor:
        """Rows, float32 [n, DIM], of ids, int64 [n]."""
        with torch.no_grad():
            return functional.embedding(ids, self._rows)

    def push(self, ids: Tensor, grads: Tensor) -> None:
        """Takes a step: gradients float32 [n, DIM] of ids, int64 [n] without repeats, in ascending order."""
        self._rows.grad = torch.sparse_coo_tensor(ids[None], grads, self._rows.shape, is_coalesced=True)
        self._optimizer.step()


class RemoteRows:
    """The rows of a DLRM at a `RowServer`: each id of a batch is pulled once, and pushed once.

    pull  gets the rows of ids
    push  begins to send gradients of ids; what it returns waits until they are applied
    """

    def __init__(self, pull: Callable[[Tensor], Tensor], push: Callable[[Tensor, Tensor], Callable[[], None]]) -> None:
        self._pull, self._push = pull, push
        self._pushed: Callable[[], None] | None = None

    def __call__(self, ids: Tensor) -> Tensor:
        """ids [n, categories] -> [n, categories, DIM]."""
        self.finish()
        unique, inverse = torch.unique(ids, return_inverse=True)
        pulled = self._pull(unique)
        if torch.is_grad_enabled():

            def send(rows: Tensor) -> None:
                assert rows.grad is not None
                self._pushed = self._push(unique, rows.grad)

            pulled.requires_grad_().register_post_accumulate_grad_hook(send)
        return functional.embedding(inverse, pulled)

    def finish(self) -> None:
        """Waits until the last step is applied."""
        pushed, self._pushed = self._pushed, None
        if pushed is not None:
            pushed()


def _remote(
    source: Source, rows: RemoteRows, pull: Callable[[Tensor], Tensor], holder: int, close: Callable[[], None]
) -> Built:
    model = _dlrm(rows, source)

    def read(category: int, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        found: NDArray[np.float32] = pull(torch.from_numpy(ids)).numpy()
        return found

    return Built(Trainable(model, [_dense(model)], finish=rows.finish), _as_they_are, read, holder, close=close)


class RemoteCalls(System):
    """torch.distributed.rpc: the first process trains, the other one holds the rows."""

    def __init__(self, seat: Seat) -> None:
        super().__init__(seat)
        os.environ.setdefault("TP_SOCKET_IFNAME", "lo")
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{seat.meeting}")
        rpc.init_rpc(f"rank{seat.rank}", None, seat.rank, seat.ranks, options)

    def build(self, source: Source) -> Built:
        server = rpc.remote(f"rank{self.seat.ranks - 1}", RowServer, args=(source.values, source.seed))
        holder = server.rpc_sync().pid()

        def pull(ids: Tensor) -> Tensor:
            found: Tensor = server.rpc_sync().pull(ids)
            return found

        def push(ids: Tensor, grads: Tensor) -> Callable[[], None]:
            wait: Callable[[], None] = server.rpc_async().push(ids, grads).wait
            return wait

        return _remote(source, RemoteRows(pull, push), pull, holder, _nothing)

    def close(self) -> None:
        rpc.shutdown(graceful=False)


class RayActor(System):
    """A Ray actor that Ray starts again, and whose calls it repeats, as often as need be."""

    def __init__(self, seat: Seat) -> None:
        super().__init__(seat)
        import ray

        os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
        folder: str | None = str(Path(seat.meeting).parent)
        if len(str(folder)) > 40:  # of 107 bytes that a socket's path may have
            folder = None
        ray.init(
            address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="error",
            object_store_memory=256 << 20, _node_ip_address="127.0.0.1", _temp_dir=folder,
        )  # fmt: skip

    def build(self, source: Source) -> Built:
        import ray

        forever = {"num_cpus": 1, "max_restarts": -1, "max_task_retries": -1}
        actor = ray.remote(ActorRows).options(**forever).remote(source.values, source.seed)
        holder = ray.get(actor.pid.remote())

        def pull(ids: Tensor) -> Tensor:
            return torch.tensor(ray.get(actor.pull.remote(ids.numpy())))

        def push(ids: Tensor, grads: Tensor) -> Callable[[], None]:
            return partial(ray.get, actor.push.remote(ids.numpy(), grads.numpy()))

        return _remote(source, RemoteRows(pull, push), pull, holder, partial(ray.kill, actor))

    def close(self) -> None:
        import ray

        ray.shutdown()


class ActorRows:
    """A `RowServer` as an actor: arrays go through Ray's memory as they are."""

    def __init__(self, values: int, seed: int) -> None:
        self._server = RowServer(values, seed)

    def pid(self) -> int:
        """Of the actor's process."""
        return self._server.pid()

    def pull(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Rows, [n, DIM], of ids [n]."""
        found: NDArray[np.float32] = self._server.pull(torch.tensor(ids)).numpy()
        return found

    def push(self, ids: NDArray[np.int64], grads: NDArray[np.float32]) -> None:
        """Takes a step: gradients [n, DIM] of ids [n]."""
        self._server.push(torch.tensor(ids), torch.tensor(grads))


# --- elasticps


class Servers(System):
    """elasticps: three servers, a coordinator and etcd, and this process as their only worker."""

    def __init__(self, seat: Seat) -> None:
        super().__init__(seat)
        self._stack = ExitStack()
        self._cluster = self._stack.enter_context(eps.LocalCluster(servers=3, replicas=seat.replicas))
        self._ps = self._stack.enter_context(eps.connect(self._cluster.url, worker="trainer", timeout=TIMEOUT_S))

    def build(self, source: Source) -> Built:
        ps, prefix = self._ps, f"of{source.values}"
        init = eps.Normal(std=ROWS_STD, seed=source.seed)
        tables = [TableConfig(f"{prefix}_{name}", DIM, [name], init=init) for name in NAMES]
        collection = EmbeddingBagCollection(ps, tables, optimizer=eps.Adagrad(lr=ROWS_LR, eps=EPS))
        rows, layers = initial_rows(source.values, source.seed).numpy(), list(collection.tables)
        for layer, first, end in zip(layers, source.starts, source.starts[1:], strict=False):
            layer.table.load(np.arange(first, end), rows[first:end])
        model = _dlrm(KeyedRows(collection), source)
        optimizer = Optimizer(ps, model, eps.Adam(lr=DENSE_LR), prefix=prefix, pipeline=True)

        def read(category: int, ids: NDArray[np.int64]) -> NDArray[np.float32]:
            found: NDArray[np.float32] = layers[category].table.pull(ids)
            return found

        return Built(
            Trainable(model, [optimizer], expect=lambda inputs: collection.expect(inputs[1]), finish=ps.flush),
            partial(Jagged.columns, NAMES), read, self._cluster.servers[0].pid, optimizer.refresh, optimizer.close,
        )  # fmt: skip

    def close(self) -> None:
        self._stack.close()


SYSTEMS: Mapping[str, type[System]] = {
    "fbgemm": Fbgemm, "torchrec": Sharded, "ddp": DataParallel, "rpc": RemoteCalls, "ray": RayActor,
    "elasticps": Servers,
}  # fmt: skip
