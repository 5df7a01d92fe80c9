"""PyTorch Lightning with rows and weights at the servers: elasticps up --detach, then
python examples/lightning_clicks.py --url etcd://…, with the URL that `up` prints.

Kill it (kill -9) and start it again: it goes on with the next batch, whatever Lightning has saved.
"""

import argparse
import os

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

import elasticps as eps
import elasticps.lightning
from elasticps.torch import Embedding, EmbeddingBag, Optimizer, StepSampler

SAMPLES, ITEMS = 2_000, 500


class Clicks(pl.LightningModule):
    """Whether a basket of items is liked."""

    def __init__(self, ps: eps.Client) -> None:
        super().__init__()
        self.ps = ps
        self.items = EmbeddingBag(ps, "items", 16, "sum", optimizer=eps.Adagrad(lr=0.1))
        self.seen = Embedding(ps, "seen", 1, optimizer=eps.SGD(lr=1.0), init=eps.Zeros())  # its rows count down
        self.head = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        samples, baskets, liked = batch
        loss = torch.nn.functional.binary_cross_entropy_with_logits(self.head(self.items(baskets)), liked)
        self.log("loss", loss, prog_bar=True)
        once: torch.Tensor = self.seen(samples).sum()
        return loss + once

    def configure_optimizers(self) -> Optimizer:
        return Optimizer(self.ps, self, optimizer=eps.Adam(lr=0.01), overlap=False)

    def on_train_batch_end(self, *_: object) -> None:
        print(f"step {self.trainer.global_step}", flush=True)


def train(url: str | None, epochs: int, folder: str, checkpoints: bool) -> None:
    torch.manual_seed(0)
    baskets, taste = torch.randint(ITEMS, (SAMPLES, 5)), torch.randn(ITEMS)
    data = TensorDataset(torch.arange(SAMPLES), baskets, (taste[baskets].sum(1, keepdim=True) > 0).float())
    with eps.connect(url, worker="w0") as ps:
        loader = DataLoader(data, batch_sampler=StepSampler(ps, SAMPLES, 50, shuffle_seed=1))
        keep = pl.callbacks.ModelCheckpoint(folder, save_last=True)
        trainer = pl.Trainer(
            accelerator="cpu", devices=1, max_epochs=epochs, default_root_dir=folder, logger=False,
            callbacks=[elasticps.lightning.Callback(ps, checkpoints=checkpoints), keep], enable_progress_bar=False,
        )  # fmt: skip
        trainer.fit(Clicks(ps), loader, ckpt_path="last", weights_only=False)
        print(f"{trainer.global_step} steps, loss {trainer.callback_metrics.get('loss', float('nan')):.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", default=os.environ.get("ELASTICPS_URL"))
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--folder", default="runs/lightning")
    parser.add_argument("--checkpoints", action="store_true", help="the servers make one with each of Lightning's")
    given = parser.parse_args()
    train(given.url, given.epochs, given.folder, given.checkpoints)
