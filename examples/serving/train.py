"""Trains the model of `examples/train_embeddings.py` on a running cluster until it is ended: python train.py URL"""

import sys

import torch

import elasticps as eps
from elasticps.torch import EmbeddingBag, Optimizer

ITEMS, DIM = 10_000, 16


def main() -> None:
    """Learns from baskets of items which items are liked."""
    torch.manual_seed(0)
    taste = torch.randn(ITEMS)
    with eps.connect(sys.argv[1], worker="w0") as ps:
        start = eps.Normal(std=0.05, seed=1)
        items = EmbeddingBag(ps, "items", DIM, mode="sum", optimizer=eps.Adagrad(lr=0.5), init=start)
        model = torch.nn.Sequential(items, torch.nn.Linear(DIM, 1))
        optimizer = Optimizer(ps, model, optimizer=eps.Adam(lr=0.01))
        step = 0
        while True:
            basket = torch.randint(ITEMS, (512, 5))
            liked = (taste[basket].sum(dim=1) > 0).float()
            loss = torch.nn.functional.binary_cross_entropy_with_logits(model(basket).squeeze(1), liked)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % 50 == 0:
                print(f"step {step}: loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    main()
