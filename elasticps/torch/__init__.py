"""PyTorch models whose embeddings and dense weights live on the parameter servers.

    model = nn.Sequential(eps_torch.EmbeddingBag(ps, "words", 32, optimizer=eps.Adagrad(lr=0.1)), nn.Linear(32, 1))
    optimizer = eps_torch.Optimizer(ps, model, optimizer=eps.Adam(lr=1e-3))
    for ids, label in batches:
        optimizer.zero_grad()
        loss(model(ids), label).backward()   # gradients of a layer leave while the backward pass still runs
        optimizer.step()                     # ends the step: one tick of this worker's clock

`EmbeddingBagCollection` and `EmbeddingCollection` are layers over several tables: one pull and one push a step for all.

`ShardedDataset` and `ShardSampler` hand out the data: workers may come and go, and each sample is trained.
`StepSampler` is for a worker with data of its own: a new process of its name goes on with the next batch.

`prefetch(loader, model, ahead=n)` asks for the rows of the next batches while one is trained.

`LocalGroup` makes one worker of the processes that torchrun starts on a machine: one push leaves it for all of them.
`DeviceGroup` does the same for several devices of one process.

A model's `state_dict()` has its dense weights; `full_state_dict(model)` has the rows of its tables too. `save(model,
file)` writes that to a file, `load(model, file)` gives it back to the servers.

What stays in the worker: buffers, such as the running statistics of a BatchNorm layer. Average them yourself if the
workers' data differ much; evaluation in one worker uses that worker's own.
"""

from __future__ import annotations

from importlib.util import find_spec

if find_spec("torch") is None:
    raise ImportError("elasticps.torch needs torch: pip install 'elasticps[torch]'", name="torch")

from elasticps.torch.collection import EmbeddingBagCollection, EmbeddingCollection, TableConfig
from elasticps.torch.data import ShardedDataset, ShardSampler
from elasticps.torch.devices import DeviceGroup
from elasticps.torch.embedding import Embedding, EmbeddingBag
from elasticps.torch.group import GroupClient, LocalGroup
from elasticps.torch.jagged import Jagged, JaggedTensor, KeyedTensor
from elasticps.torch.lookahead import Ahead, prefetch
from elasticps.torch.optimizer import Optimizer
from elasticps.torch.resuming import StepSampler
from elasticps.torch.state import full_state_dict, load, load_full_state_dict, save

__all__ = [
    "Ahead",
    "DeviceGroup",
    "Embedding",
    "EmbeddingBag",
    "EmbeddingBagCollection",
    "EmbeddingCollection",
    "GroupClient",
    "Jagged",
    "JaggedTensor",
    "KeyedTensor",
    "LocalGroup",
    "Optimizer",
    "ShardSampler",
    "ShardedDataset",
    "StepSampler",
    "TableConfig",
    "full_state_dict",
    "load",
    "load_full_state_dict",
    "prefetch",
    "save",
]
