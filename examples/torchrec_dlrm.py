"""A DLRM of torchrec whose tables move to the servers: python examples/torchrec_dlrm.py [--url etcd://…]"""

import argparse
import os
from typing import Any

import torch
from torch.distributed.optim import _apply_optimizer_in_backward  # type: ignore[attr-defined]
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import elasticps as eps
import elasticps.torchrec
from elasticps.torch import Optimizer

FEATURES, ROWS, BATCH = ["user", "item", "shop"], 1_000, 256


class Batch:
    """What DLRMTrain takes: labels follow a taste for each id."""

    def __init__(self, taste: torch.Tensor) -> None:
        ids = torch.randint(ROWS, (len(FEATURES), BATCH))
        self.dense_features = torch.randn(BATCH, 4)
        lengths = torch.ones(ids.numel(), dtype=torch.int64)
        self.sparse_features = KeyedJaggedTensor(FEATURES, ids.flatten(), lengths=lengths)
        self.labels = (taste[ids].sum(0) + self.dense_features[:, 0] > 0).long()


def train(url: str, steps: int) -> None:
    torch.manual_seed(0)
    tables = [EmbeddingBagConfig(ROWS, 16, f"{name}_ids", feature_names=[name]) for name in FEATURES]
    model = DLRMTrain(DLRM(EmbeddingBagCollection(tables=tables), 4, [32, 16], [32, 1]))
    _apply_optimizer_in_backward(RowWiseAdagrad, model.model.sparse_arch.parameters(), {"lr": 0.1})
    with eps.connect(url, worker="w0") as ps:
        elasticps.torchrec.from_model(model, ps)
        optimizer = Optimizer(ps, model, optimizer=eps.Adagrad(lr=0.05))
        rows: Any = model.model.sparse_arch.embedding_bag_collection
        taste = torch.randn(ROWS)
        following = Batch(taste)
        for step in range(steps):
            batch, following = following, Batch(taste)
            loss, _ = model(batch)
            optimizer.zero_grad()
            rows.expect(following.sparse_features)  # they come in the answer to this step, and are as new as it
            loss.backward()
            optimizer.step()
            if step % 50 == 0 or step == steps - 1:
                print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", default=os.environ.get("ELASTICPS_URL"))
    parser.add_argument("--steps", type=int, default=200)
    given = parser.parse_args()
    if given.url:
        train(given.url, given.steps)
    else:
        with eps.LocalCluster(servers=3) as cluster:
            train(cluster.url, given.steps)
