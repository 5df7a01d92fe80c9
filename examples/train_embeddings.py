"""The README's training script: learns from baskets of items which items are liked."""

import torch

import elasticps as eps
from elasticps.local import LocalCluster
from elasticps.torch import EmbeddingBag, Optimizer

torch.manual_seed(0)
taste = torch.randn(10_000)  # what is to be learnt: how much each of 10,000 items is liked

with LocalCluster(servers=3) as cluster, eps.connect(cluster.url, worker="w0") as ps:
    items = EmbeddingBag(ps, "items", 16, mode="sum", optimizer=eps.Adagrad(lr=0.5), init=eps.Normal(std=0.05, seed=1))
    model = torch.nn.Sequential(items, torch.nn.Linear(16, 1))
    optimizer = Optimizer(ps, model, optimizer=eps.Adam(lr=0.01))
    for step in range(300):
        basket = torch.randint(10_000, (512, 5))
        liked = (taste[basket].sum(dim=1) > 0).float()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(basket).squeeze(1), liked)
        optimizer.zero_grad()
        loss.backward()  # gradients of a layer leave while the backward pass still runs
        optimizer.step()  # ends the step: one tick of this worker's clock
        if step % 50 == 49:
            print(f"step {step + 1}: loss {loss.item():.3f}")
