"""Ray Train with servers as Ray actors: learns from baskets of items which items are liked.

pip install 'elasticps[ray,torch]'
python examples/ray_train.py
"""

import tempfile
from typing import Any

import numpy as np
import ray
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

import elasticps as eps
import elasticps.ray
from elasticps.torch import EmbeddingBag, Optimizer


def baskets(batch: dict[str, Any]) -> dict[str, Any]:
    """Baskets of 5 of 2,000 items, and whether they are liked: their items' tastes add up to more than 0."""
    taste = np.random.default_rng(0).standard_normal(2000)
    basket = np.random.default_rng(batch["id"][0] + 1).integers(2000, size=(len(batch["id"]), 5))
    return {"basket": basket, "liked": (taste[basket].sum(axis=1) > 0).astype(np.float32)}


def train(config: dict[str, Any]) -> None:
    """The loop of each worker. No `prepare_model`: gradients go to the servers, and weights come from there."""
    with eps.connect(config["url"]) as ps:
        items = EmbeddingBag(
            ps, "items", 16, mode="sum", optimizer=eps.Adagrad(lr=0.5), init=eps.Normal(std=0.05, seed=1)
        )
        model = torch.nn.Sequential(items, torch.nn.Linear(16, 1))
        optimizer = Optimizer(ps, model, optimizer=eps.Adam(lr=0.01))
        losses = []
        for batch in config["blocks"].batches(ps, epochs=3, shuffle_seed=1):
            basket, liked = torch.tensor(batch["basket"]), torch.tensor(batch["liked"])
            loss = torch.nn.functional.binary_cross_entropy_with_logits(model(basket).squeeze(1), liked)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        elasticps.ray.report(ps, {"first": losses[0], "last": float(np.mean(losses[-5:])), "blocks": len(losses)})


def main() -> None:
    ray.init(
        num_cpus=8, include_dashboard=False, log_to_driver=False
    )  # CPUs as servers and workers want, not as there are
    data = ray.data.range(20_000, override_num_blocks=4).map_batches(baskets, batch_size=1000)
    with (
        tempfile.TemporaryDirectory() as folder,
        elasticps.ray.Cluster(servers=3, share_nodes=True, checkpoint_url=f"{folder}/servers") as cluster,
    ):
        trainer = TorchTrainer(
            train,
            train_loop_config={"url": cluster.url, "blocks": elasticps.ray.ShardedBlocks(data, rows=250)},
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=f"{folder}/runs"),
        )
        metrics = trainer.fit().metrics
        print(f"loss {metrics['first']:.3f}, later {metrics['last']:.3f}; checkpoint {metrics['elasticps_checkpoint']}")
    ray.shutdown()


if __name__ == "__main__":
    main()
