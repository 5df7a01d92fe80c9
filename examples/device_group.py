"""The README's training script for several devices of one process, which are one worker of the cluster.

python examples/device_group.py                                     starts a cluster on this machine, uses all its GPUs
python examples/device_group.py --devices cpu cpu --url etcd://127.0.0.1:2379/demo          uses one that is there
"""

from __future__ import annotations

import argparse
import contextlib

import torch
from torch import Tensor, nn

import elasticps as eps
from elasticps.torch import DeviceGroup, EmbeddingBag, Optimizer

ITEMS = 10_000
BATCH = 256  # of each device


def train(model: nn.Module, device: torch.device, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Forward and backward pass of one device; its loss."""
    basket, liked = batch
    loss = nn.functional.binary_cross_entropy_with_logits(model(basket.to(device)).squeeze(1), liked.to(device))
    loss.backward()
    return loss.detach()


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains with several devices that are one worker.")
    parser.add_argument("--url", help="cluster to use; without it one is started")
    parser.add_argument("--devices", nargs="+", help="default: all GPUs, or two models on the CPU")
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    torch.set_num_threads(1)
    devices = options.devices or [f"cuda:{gpu}" for gpu in range(torch.cuda.device_count())] or ["cpu", "cpu"]
    with contextlib.ExitStack() as stack:
        url = options.url or stack.enter_context(eps.LocalCluster(servers=2)).url
        ps = stack.enter_context(eps.connect(url, worker="machine0"))

        def build() -> nn.Module:
            items = EmbeddingBag(
                ps, "items", 16, mode="sum", optimizer=eps.Adagrad(lr=0.5), init=eps.Normal(std=0.05, seed=1)
            )
            return nn.Sequential(items, nn.Linear(16, 1))

        group = DeviceGroup(build, devices)
        optimizer = Optimizer(ps, group, optimizer=eps.Adam(lr=0.01))
        taste = torch.randn(ITEMS, generator=torch.Generator().manual_seed(0))  # what is to be learnt
        for step in range(ps.resume().steps, options.steps):
            random = torch.Generator().manual_seed(step)
            baskets = [torch.randint(ITEMS, (BATCH, 5), generator=random) for _ in devices]
            optimizer.zero_grad()
            losses = group.run(train, [(basket, (taste[basket].sum(dim=1) > 0).float()) for basket in baskets])
            optimizer.step()  # one step of the worker: gradients of all devices leave as one
            if step % 50 == 49:
                print(f"step {step + 1}: losses {', '.join(f'{loss:.3f}' for loss in losses)}", flush=True)


if __name__ == "__main__":
    main()
