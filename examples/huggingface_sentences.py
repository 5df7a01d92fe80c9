"""Hugging Face's Trainer with word vectors and weights at the servers: elasticps up --detach, then
python examples/huggingface_sentences.py --url etcd://…, with the URL that `up` prints.

Kill it (kill -9) and start it again: it goes on with the next batch, whatever the Trainer has saved.
"""

import argparse
import os

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import elasticps as eps
import elasticps.huggingface
from elasticps.torch import Embedding, Optimizer

WORDS, SAMPLES = 2_000, 1_200


class Sentences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Made-up sentences of twelve words, and whether more of them are even than odd."""

    def __init__(self) -> None:
        self.words = torch.randint(WORDS, (SAMPLES, 12), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.words[i], "labels": ((self.words[i] % 2).sum() < 6).long()}


def train(url: str | None, epochs: int, folder: str) -> None:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    model = BertForSequenceClassification(BertConfig(vocab_size=WORDS, **shape))
    arguments = TrainingArguments(
        folder, num_train_epochs=epochs, per_device_train_batch_size=40, save_steps=25, logging_steps=1,
        report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    with eps.connect(url, worker="w0") as ps:
        model.bert.embeddings.word_embeddings = Embedding(ps, "words", 32, optimizer=eps.Adagrad(lr=0.1))
        optimizer = Optimizer(ps, model, optimizer=eps.AdamW(lr=1e-3), overlap=False)
        trainer = Trainer(model, arguments, train_dataset=Sentences(), optimizers=(optimizer, None))
        elastic = elasticps.huggingface.ElasticCallback(ps, trainer)
        trainer.train(resume_from_checkpoint=elastic.resume())
        print(f"{trainer.state.global_step} steps, {ps.resume().steps} of them by processes before")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", default=os.environ.get("ELASTICPS_URL"))
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--folder", default="runs/huggingface")
    given = parser.parse_args()
    train(given.url, given.epochs, given.folder)
