"""The README's training script for several processes of one machine, which are one worker of the cluster.

torchrun --nproc-per-node 2 examples/local_group.py                                 starts a cluster on this machine
torchrun --nproc-per-node 2 examples/local_group.py --url etcd://127.0.0.1:2379/demo    uses one that is there
"""

from __future__ import annotations

import argparse
import contextlib

import torch
from torch import distributed

import elasticps as eps
from elasticps.torch import EmbeddingBag, GroupClient, LocalGroup, Optimizer

ITEMS = 10_000
BATCH = 256  # of each rank


def train(ps: GroupClient, steps: int) -> float:
    """Trains what is left of `steps`; the last loss of this rank."""
    taste = torch.randn(
        ITEMS, generator=torch.Generator().manual_seed(0)
    )  # what is to be learnt: how much each is liked
    items = EmbeddingBag(ps, "items", 16, mode="sum", optimizer=eps.Adagrad(lr=0.5), init=eps.Normal(std=0.05, seed=1))
    model = torch.nn.Sequential(items, torch.nn.Linear(16, 1))
    optimizer = Optimizer(ps, model, optimizer=eps.Adam(lr=0.01))
    loss = torch.tensor(0.0)
    for step in range(ps.resume().steps, steps):
        mine = torch.Generator().manual_seed(step * ps.size + ps.rank)  # each rank has baskets of its own
        basket = torch.randint(ITEMS, (BATCH, 5), generator=mine)
        liked = (taste[basket].sum(dim=1) > 0).float()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(basket).squeeze(1), liked)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()  # one step of the group: gradients of all ranks leave as one
        if ps.rank == 0 and step % 50 == 49:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
    return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains with several processes that are one worker.")
    parser.add_argument("--url", help="cluster to use; without it rank 0 starts one")
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    group = LocalGroup(mean=True)
    with contextlib.ExitStack() as stack:
        url = options.url
        if url is None and group.rank == 0:
            url = stack.enter_context(eps.LocalCluster(servers=2)).url
        ps = stack.enter_context(group.connect(url, worker=f"machine{group.machine}"))
        loss = train(ps, options.steps)
    print(f"rank {group.rank} of {group.size}: loss {loss:.3f}", flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
