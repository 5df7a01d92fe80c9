"""A small convolutional network on scikit-learn's handwritten digits. All its weights are dense tensors at the servers.

python examples/digits_cnn.py                                   starts a cluster on this machine
python examples/digits_cnn.py --url etcd://127.0.0.1:2379/demo  uses one that is there; run it several times at once,
                                                                with --worker w0, w1, …, and the workers train together
"""

from __future__ import annotations

import argparse
import contextlib

import torch
from torch import nn

import elasticps as eps
from elasticps.torch import Optimizer

BATCH = 64


def network() -> nn.Sequential:
    """8 × 8 grey pixels -> 10 logits; 38,282 weights."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def digits(seed: int) -> list[torch.Tensor]:
    """Training images, test images, training labels, test labels."""
    from sklearn.datasets import load_digits  # only here: scikit-learn takes a second to import
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(
        images.reshape(-1, 1, 8, 8) / 16.0, labels, test_size=0.2, random_state=seed, stratify=labels
    )
    return [torch.from_numpy(part).float() for part in parts[:2]] + [torch.from_numpy(part) for part in parts[2:]]


def train(ps: eps.Client, epochs: int, seed: int) -> float:
    """Trains and returns the accuracy on the test images."""
    images, test_images, labels, test_labels = digits(seed)
    model = network()
    optimizer = Optimizer(ps, model, optimizer=eps.Adam(lr=5e-3), prefix="digits", pipeline=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)
    accuracy = 0.0
    for epoch in range(1, epochs + 1):
        model.train()
        total = 0.0
        for index in torch.randperm(len(images)).split(BATCH):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[index]), labels[index])
            loss.backward()
            optimizer.step()
            total += loss.item() * len(index)
        schedule.step()
        model.eval()
        with torch.inference_mode():
            accuracy = (model(test_images).argmax(dim=1) == test_labels).float().mean().item()
        print(f"epoch {epoch:2}: training loss {total / len(images):.4f}, test accuracy {accuracy:.1%}")
    return accuracy


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a small CNN on handwritten digits through parameter servers.")
    parser.add_argument("--url", help="cluster to use; without it one is started on this machine")
    parser.add_argument("--worker", default="w0", help="this worker's name")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)  # the servers want a core too, and the network is tiny
    with contextlib.ExitStack() as stack:
        url = options.url or stack.enter_context(eps.LocalCluster(servers=2)).url
        ps = stack.enter_context(eps.connect(url, worker=options.worker))
        accuracy = train(ps, options.epochs, options.seed)
    print(f"test accuracy {accuracy:.1%}")


if __name__ == "__main__":
    main()
