"""Hugging Face's Trainer with an embedding at the servers: its own values, and a crash after which nothing is trained
twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import elasticps as eps
from elasticps.errors import ConfigError
from elasticps.torch import Embedding, Optimizer, full_state_dict

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments

from elasticps.huggingface import FILE, ElasticCallback
from tests.shared_cluster import Connect

WORDS, DIM, SAMPLES, BATCH, EPOCHS, ACCUMULATE = 40, 16, 44, 4, 2, 2
STEPS = -(-SAMPLES // BATCH // ACCUMULATE) * EPOCHS
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore:::torch")


class Sentences(Dataset[dict[str, Tensor]]):
    """Sentences of eight words, and whether there are more even words than odd ones."""

    def __init__(self) -> None:
        self.words = torch.randint(1, WORDS, (SAMPLES, 8), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"input_ids": self.words[i], "labels": ((self.words[i] % 2).sum() < 4).long()}


def bert(words: nn.Module | None = None) -> BertForSequenceClassification:
    torch.manual_seed(2)
    config = BertConfig(
        vocab_size=WORDS, hidden_size=DIM, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=2,
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    if words is not None:
        model.bert.embeddings.word_embeddings = words
    return model


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    options: dict[str, Any] = {
        "per_device_train_batch_size": BATCH, "gradient_accumulation_steps": ACCUMULATE, "num_train_epochs": EPOCHS,
        "learning_rate": 0.01, "lr_scheduler_type": "linear", "max_grad_norm": 0.5, "eval_strategy": "epoch",
        "save_strategy": "steps", "save_steps": 4, "report_to": [], "use_cpu": True, "disable_tqdm": True,
        "logging_steps": 1, "seed": 3,
    }  # fmt: skip
    return TrainingArguments(str(folder), **(options | changes))


class Crash(Exception):
    """Ends a run in the middle, as a kill would."""


class Crashes(TrainerCallback):
    """Crashes after so many steps; in_step: after a part of the next one."""

    def __init__(self, at: int, *, in_step: bool) -> None:
        self.at, self.in_step = at, in_step

    def on_step_begin(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        if state.global_step == self.at and not self.in_step:
            raise Crash

    def on_substep_end(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        if state.global_step == self.at and self.in_step:
            raise Crash


def remote(ps: eps.Client, folder: Path, **options: Any) -> tuple[Trainer, ElasticCallback]:
    words = Embedding(ps, "words", DIM, optimizer=eps.Adam(lr=0.01), num_embeddings=WORDS)
    model = bert(words)
    optimizer = Optimizer(ps, model, optimizer=eps.Adam(lr=0.01), overlap=False)
    data = Sentences()
    trainer = Trainer(
        model, arguments(folder, **options), train_dataset=data, eval_dataset=data, optimizers=(optimizer, None)
    )
    return trainer, ElasticCallback(ps, trainer)


def own(words: Tensor, folder: Path) -> tuple[Trainer, dict[str, Tensor]]:
    """The Trainer's own training of the same model, and its weights. Adam of sparse gradients would differ, so each
    step moves all rows that were looked up in it, as servers do."""
    model = bert(nn.Embedding(WORDS, DIM, _weight=words.clone()))
    optimizer = Lazy(model, model.bert.embeddings.word_embeddings.weight)
    data = Sentences()
    trainer = Trainer(model, arguments(folder), train_dataset=data, eval_dataset=data, optimizers=(optimizer, None))
    trainer.train()
    return trainer, {name: value.detach() for name, value in model.state_dict().items()}


class Lazy(torch.optim.Optimizer):
    """torch's Adam for all parameters but the rows, of which each has one of its own, of steps with a gradient."""

    def __init__(self, model: nn.Module, rows: nn.Parameter) -> None:
        super().__init__(list(model.parameters()), {"lr": 0.01})
        self.rows = rows
        self.dense = torch.optim.Adam([p for p in model.parameters() if p is not rows], lr=0.01)
        self.parts = [nn.Parameter(row.clone()) for row in rows.detach()]
        self.each = [torch.optim.Adam([part], lr=0.01) for part in self.parts]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        gradient = self.rows.grad
        assert gradient is not None
        for optimizer in [self.dense, *self.each]:
            optimizer.param_groups[0]["lr"] = self.param_groups[0]["lr"]
        self.dense.step()
        for i in gradient.any(dim=1).nonzero().flatten().tolist():
            self.parts[i].grad = gradient[i].clone()
            self.each[i].step()
            self.rows[i] = self.parts[i]


def start_of(ps: eps.Client) -> Tensor:
    words = Embedding(ps, "words", DIM, optimizer=eps.Adam(lr=0.01), num_embeddings=WORDS)
    return full_state_dict(words)["weight"]


def check(trainer: Trainer, words: Tensor, folder: Path) -> Trainer:
    """The weights are those that the Trainer comes to by itself."""
    theirs, expected = own(words, folder / "own")
    found = full_state_dict(trainer.model)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-5, msg=name)
    return theirs


def test_training_gives_the_trainer_s_own_weights_losses_and_norms(connect: Connect, tmp_path: Path) -> None:
    ps = connect()
    words = start_of(ps)
    trainer, elastic = remote(ps, tmp_path / "ours")
    assert elastic.resume() is None
    trainer.train()
    theirs = check(trainer, words, tmp_path)
    assert ps.clock == ps.committed == trainer.state.global_step == STEPS
    for mine, other in zip(trainer.state.log_history, theirs.state.log_history, strict=True):
        for name in ("loss", "grad_norm", "learning_rate", "eval_loss"):
            assert (name in mine) == (name in other)
            assert mine.get(name, 0.0) == pytest.approx(other.get(name, 0.0), rel=1e-3), name
    assert json.loads((tmp_path / "ours" / "checkpoint-4" / FILE).read_text()) == {"steps": 4}


@pytest.mark.parametrize(
    ("crash_at", "in_step"), [(2, True), (5, False), (STEPS // 2, False), (STEPS // 2, True), (STEPS - 1, False)]
)
def test_after_a_crash_a_new_process_goes_on_where_the_servers_are(
    connect: Connect, tmp_path: Path, crash_at: int, in_step: bool
) -> None:
    first = connect()
    words = start_of(first)
    trainer, _ = remote(first, tmp_path / "ours")
    trainer.add_callback(Crashes(crash_at, in_step=in_step))
    with pytest.raises(Crash):
        trainer.train()
    first.flush()
    assert first.clock == crash_at
    second = connect()  # under the same name
    trainer, elastic = remote(second, tmp_path / "ours")
    folder = elastic.resume()
    assert folder is not None
    trainer.train(resume_from_checkpoint=folder)
    assert second.resume().steps == crash_at
    assert second.clock - second.resume().clock == STEPS - crash_at
    assert trainer.state.global_step == STEPS
    check(trainer, words, tmp_path)


def test_training_that_would_not_go_on_where_the_servers_are_is_refused(connect: Connect, tmp_path: Path) -> None:
    first = connect()
    trainer, _ = remote(first, tmp_path)
    trainer.add_callback(Crashes(6, in_step=False))
    with pytest.raises(Crash):
        trainer.train()
    first.flush()
    second = connect()
    trainer, _ = remote(second, tmp_path)
    for resume, begins_at in ((None, 0), (True, 4)):
        with pytest.raises(ConfigError, match=rf"6 steps of this worker, .* begins after step {begins_at}: call train"):
            trainer.train(resume_from_checkpoint=resume)
    assert second.clock == second.resume().clock
    trainer, _ = remote(connect("w1"), tmp_path)
    with pytest.raises(ConfigError, match="is of step 4, and the servers know no step of this worker"):
        trainer.train(resume_from_checkpoint=True)


def test_a_state_that_a_kill_has_left_half_written_hinders_nobody(connect: Connect, tmp_path: Path) -> None:
    first = connect()
    words = start_of(first)
    trainer, _ = remote(first, tmp_path / "ours")
    trainer.add_callback(Crashes(4, in_step=False))
    with pytest.raises(Crash):
        trainer.train()
    first.flush()
    state = tmp_path / "ours" / "checkpoint-4" / "trainer_state.json"
    state.write_bytes(state.read_bytes()[:100])
    trainer, elastic = remote(connect(), tmp_path / "ours")
    trainer.train(resume_from_checkpoint=elastic.resume())
    assert trainer.state.global_step == STEPS
    check(trainer, words, tmp_path)


def test_mistakes_say_what_to_do(connect: Connect, tmp_path: Path) -> None:
    ps = connect()
    model = bert()
    for optimizer in (torch.optim.SGD(model.parameters()), Optimizer(ps, model, optimizer=eps.SGD(lr=0.1))):
        trainer = Trainer(model, arguments(tmp_path, eval_strategy="no"), optimizers=(optimizer, None))
        with pytest.raises(ConfigError, match="overlap=False"):
            ElasticCallback(ps, trainer)


def test_the_best_model_is_not_brought_back_without_its_rows(connect: Connect, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="would bring back the dense weights"):
        remote(connect(), tmp_path, load_best_model_at_end=True, eval_strategy="steps", eval_steps=4)
