"""The smallest complete training: which of two letters comes first in the alphabet.

python examples/train_embeddings.py          starts a cluster on this machine; ELASTICPS_URL names another
"""

import contextlib
import os

import torch
from torch import nn

import elasticps as eps
from elasticps.torch import Embedding, Optimizer

with contextlib.ExitStack() as stack:
    url = os.environ.get("ELASTICPS_URL") or stack.enter_context(eps.LocalCluster(servers=2)).url
    ps = stack.enter_context(eps.connect(url, worker="w0"))

    # Any int64 is an id: nobody says how many there are, and a row exists once it is trained.
    model = nn.Sequential(
        Embedding(ps, "letters", dim=8, optimizer=eps.Adagrad(lr=0.3)), nn.Flatten(), nn.Linear(16, 1)
    )
    optimizer = Optimizer(ps, model, optimizer=eps.Adam(lr=0.01))

    for step in range(301):
        letters = torch.randint(ord("a"), ord("z") + 1, (256, 2))
        in_order = (letters[:, :1] < letters[:, 1:]).float()
        optimizer.zero_grad()
        logits = model(letters)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, in_order)
        loss.backward()  # gradients leave for the servers while the backward pass still runs
        optimizer.step()  # ends the step: one tick of this worker's clock
        if step % 50 == 0:
            right = ((logits > 0) == (in_order > 0.5)).float().mean().item()
            print(f"step {step:3}: loss {loss.item():.3f}, {right:.0%} right")
