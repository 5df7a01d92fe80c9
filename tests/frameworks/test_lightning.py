"""Lightning with weights at the servers: plain torch's values, and a crash after which nothing is trained twice."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import elasticps as eps
from elasticps.errors import ConfigError, InputError
from elasticps.torch import Embedding, Optimizer, ShardSampler, StepSampler, full_state_dict

pytest.importorskip("lightning")

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.tuner import Tuner

import elasticps.lightning
from tests.shared_cluster import Connect

SAMPLES, BATCH, EPOCHS, ACCUMULATE, IDS = 50, 8, 3, 2, 30
BATCHES = -(-SAMPLES // BATCH)
STEPS = -(-BATCHES // ACCUMULATE)  # of an epoch
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers", "ignore:Checkpoint directory", "ignore:The `srun` command",
    "ignore:::torch", "ignore::FutureWarning", "ignore:You defined a `validation_step`",
)  # fmt: skip  # what Lightning warns of itself


def data() -> TensorDataset:
    torch.manual_seed(1)
    ids = torch.randint(0, IDS, (SAMPLES,))
    return TensorDataset(ids, torch.arange(SAMPLES), (ids % 2).float()[:, None])


def power(base: float, step: int) -> float:
    return float(base**step)


class Crash(Exception):
    """Ends a run in the middle, as a kill would."""


class Tower(pl.LightningModule):
    """Rows of ids, a layer, and a table that counts how often each sample was trained: its rows go down by one."""

    def __init__(self, rows: nn.Module, seen: nn.Module, make: Callable[[nn.Module], Any], crash_at: int = -1) -> None:
        super().__init__()
        self.rows, self.seen = rows, seen
        self.head = nn.Linear(4, 1)
        self.make = make
        self.crash_at = crash_at  # the batch of this process that is not trained any more; -1 for none
        self.batches = 0
        self.validated = 0

    def loss(self, batch: list[Tensor]) -> Tensor:
        ids, samples, labels = batch
        error = nn.functional.mse_loss(self.head(self.rows(ids)), labels)
        once: Tensor = self.seen(samples).sum()
        return error + ACCUMULATE * once  # what accumulates gradients divides a batch's loss

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.batches == self.crash_at:
            raise Crash
        self.batches += 1
        return self.loss(batch)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        assert not self.training
        self.validated += 1
        self.log("error", self.loss(batch))

    def configure_optimizers(self) -> Any:
        optimizer = self.make(self)
        bases = [1.0 if group["name"] == "seen" else 0.9 for group in optimizer.param_groups]
        factors: list[Callable[[int], float]] = [partial(power, base) for base in bases]
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factors)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def remote(ps: eps.Client, crash_at: int = -1) -> Tower:
    torch.manual_seed(2)
    rows = Embedding(ps, "rows", 4, optimizer=eps.Adagrad(lr=0.1), num_embeddings=IDS)
    seen = Embedding(ps, "seen", 1, optimizer=eps.SGD(lr=1.0), init=eps.Zeros(), num_embeddings=SAMPLES)

    def make(model: nn.Module) -> Optimizer:
        return Optimizer(ps, model, optimizer=eps.Adam(lr=0.01), overlap=False)

    return Tower(rows, seen, make, crash_at)


def loader(ps: eps.Client) -> DataLoader[Any]:
    sampler = StepSampler(ps, SAMPLES, BATCH, shuffle_seed=5, accumulate=ACCUMULATE)
    return DataLoader(data(), batch_sampler=sampler)


def trainer(ps: eps.Client, folder: Path, *callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
        max_epochs=EPOCHS, default_root_dir=folder, enable_checkpointing=bool(callbacks),
        callbacks=[elasticps.lightning.Callback(ps), *callbacks], **({"accumulate_grad_batches": ACCUMULATE} | options),
    )  # fmt: skip


def fit(ps: eps.Client, folder: Path, *callbacks: pl.Callback, crash_at: int = -1, ckpt: str | None = None) -> Any:
    model = remote(ps, crash_at)
    run = trainer(ps, folder, *callbacks)
    run.fit(model, loader(ps), DataLoader(data(), batch_size=BATCH), ckpt_path=ckpt, weights_only=False)
    return run, model


def plain(start: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights that plain torch comes to from the same start, with the same batches."""
    model = Tower(nn.Embedding(IDS, 4), nn.Embedding(SAMPLES, 1), lambda _: None)
    model.load_state_dict({name: value for name, value in start.items() if not name.endswith("trains")})
    optimizers = [
        torch.optim.Adagrad(model.rows.parameters(), lr=0.1),
        torch.optim.Adam(model.head.parameters(), lr=0.01),
        torch.optim.SGD(model.seen.parameters(), lr=1.0),
    ]
    schedulers = [torch.optim.lr_scheduler.LambdaLR(each, lambda step: 0.9**step) for each in optimizers[:2]]
    everything = data()
    for epoch in range(EPOCHS):
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(5 + epoch)).split(BATCH)
        for at in range(0, BATCHES, ACCUMULATE):
            for optimizer in optimizers:
                optimizer.zero_grad()
            for indices in order[at : at + ACCUMULATE]:
                (model.loss([tensor[indices] for tensor in everything.tensors]) / ACCUMULATE).backward()
            for optimizer in optimizers:
                optimizer.step()
            for scheduler in schedulers:
                scheduler.step()
    return {name: value.detach() for name, value in model.state_dict().items()}


def check(ps: eps.Client, model: Tower, start: dict[str, Tensor]) -> None:
    """All steps were made once: the weights are plain torch's, and each sample was trained once an epoch."""
    found = full_state_dict(model)
    for name, value in plain(start).items():
        torch.testing.assert_close(found[name].cpu(), value, rtol=1e-4, atol=1e-5, msg=name)
    assert (found["seen.weight"] == -EPOCHS).all()


def start_of(ps: eps.Client) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in full_state_dict(remote(ps)).items()}


def test_training_gives_plain_torch_s_weights_and_validation_pushes_nothing(connect: Connect, tmp_path: Path) -> None:
    ps = connect()
    start = start_of(ps)
    run, model = fit(ps, tmp_path)
    check(ps, model, start)
    assert ps.clock == ps.committed == run.global_step == EPOCHS * STEPS
    assert model.validated >= EPOCHS * BATCHES
    assert run.callback_metrics["error"].isfinite()


@pytest.mark.parametrize("crash_at", [2, 5, BATCHES, BATCHES + 3, 3 * BATCHES - 1])
@pytest.mark.parametrize("saved", [False, True])
def test_after_a_crash_a_new_process_goes_on_where_the_servers_are(
    connect: Connect, tmp_path: Path, crash_at: int, saved: bool
) -> None:
    first = connect()
    start = start_of(first)
    keep = [ModelCheckpoint(tmp_path, save_last=True, every_n_epochs=1)] if saved else []
    with pytest.raises(Crash):
        fit(first, tmp_path, *keep, crash_at=crash_at)
    first.flush()
    made = first.clock
    second = connect()  # under the same name
    last = tmp_path / "last.ckpt"
    run, model = fit(second, tmp_path, *keep, ckpt=str(last) if last.exists() else None)
    check(second, model, start)
    assert second.resume().steps == made
    assert run.global_step == EPOCHS * STEPS
    assert run.current_epoch == EPOCHS
    assert model.batches == EPOCHS * BATCHES - crash_at + crash_at % BATCHES % ACCUMULATE  # a begun step is made again
    assert run.lr_scheduler_configs[0].scheduler.last_epoch == EPOCHS * STEPS
    rates = [group["lr"] for group in run.optimizers[0].param_groups if group["name"] == "rows"]
    assert rates == [pytest.approx(0.1 * 0.9 ** (EPOCHS * STEPS))]


def test_a_run_that_has_ended_trains_nothing_when_it_is_started_again(connect: Connect, tmp_path: Path) -> None:
    ps = connect()
    start = start_of(ps)
    fit(ps, tmp_path)
    again = connect()
    with pytest.warns(UserWarning, match=f"nothing is left to train: this worker has made {EPOCHS * STEPS} steps"):
        _, model = fit(again, tmp_path)
    assert model.batches == 0
    check(again, model, start)


def test_mistakes_say_what_to_do(connect: Connect, tmp_path: Path) -> None:
    ps = connect()
    with pytest.raises(ConfigError, match=r"accumulate_grad_batches=2\) must be the same"):
        trainer(ps, tmp_path).fit(remote(ps), DataLoader(data(), batch_sampler=StepSampler(ps, SAMPLES, BATCH)))
    with pytest.raises(ConfigError, match="ends an epoch after 3 batches, and StepSampler after all 7"):
        trainer(ps, tmp_path, limit_train_batches=3).fit(remote(ps), loader(ps))
    assert ps.clock == 0
    keep = ModelCheckpoint(tmp_path, save_last=True)
    fit(ps, tmp_path, keep)
    saved = torch.load(tmp_path / "last.ckpt", weights_only=False)
    assert saved[elasticps.lightning.KEY] == {"steps": EPOCHS * STEPS}
    stranger = connect("w1")
    with pytest.raises(ConfigError, match="the servers know no step of this worker"):
        fit(stranger, tmp_path, keep, ckpt=str(tmp_path / "last.ckpt"))
    other = DataLoader(data(), batch_sampler=StepSampler(ps, SAMPLES, BATCH))
    with pytest.raises(ConfigError, match=r"accumulate_grad_batches=2\) must be the same"):
        trainer(ps, tmp_path).fit(remote(ps), other)
    with pytest.warns(UserWarning, match="its data begin again"):
        trainer(ps, tmp_path, limit_train_batches=1).fit(remote(ps), DataLoader(data(), batch_size=BATCH))
    shards = DataLoader(data(), batch_sampler=ShardSampler(ps, SAMPLES, BATCH))
    trainer(ps, tmp_path, limit_train_batches=1).fit(remote(ps), shards)
    with pytest.raises(InputError, match="batch_size of at least 1"):
        StepSampler(ps, 10, 0)
    with pytest.raises(InputError, match="make no batch of 8"):
        StepSampler(ps, 5, 8, drop_last=True)


def test_a_sampler_s_order_is_the_same_in_every_process_and_each_epoch_s_own(connect: Connect) -> None:
    ps = connect()
    sampler = StepSampler(ps, 10, 4, shuffle_seed=3)
    first = list(sampler)
    assert [len(batch) for batch in first] == [4, 4, 2]
    assert sorted(i for batch in first for i in batch) == list(range(10))
    assert list(StepSampler(ps, 10, 4, shuffle_seed=3)) == first
    ps.push({})
    assert list(sampler) == first[1:]
    ps.push({})
    ps.push({})
    assert sampler.position() == (1, 0)
    assert list(sampler) != first
    assert list(StepSampler(ps, 10, 4)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert np.all([len(batch) == 4 for batch in StepSampler(ps, 10, 4, drop_last=True)])


class Manual(Tower):
    """The same, where `training_step` makes the steps itself."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        error = super().training_step(batch, batch_idx)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(error)
        optimizer.step()
        return error


def alone(ps: eps.Client, folder: Path, **options: Any) -> pl.Trainer:
    return trainer(ps, folder, **({"accumulate_grad_batches": 1} | options))


def steps_of(ps: eps.Client) -> DataLoader[Any]:
    return DataLoader(data(), batch_sampler=StepSampler(ps, SAMPLES, BATCH, shuffle_seed=5))


def test_steps_that_a_module_makes_itself_are_counted_after_a_crash(connect: Connect, tmp_path: Path) -> None:
    def manual(ps: eps.Client, crash_at: int = -1) -> Manual:
        made = remote(ps)
        return Manual(made.rows, made.seen, made.make, crash_at)

    first = connect()
    with pytest.raises(Crash):
        alone(first, tmp_path).fit(manual(first, crash_at=10), steps_of(first))
    first.flush()
    second = connect()
    run, model = alone(second, tmp_path), manual(second)
    run.fit(model, steps_of(second))
    assert run.global_step == EPOCHS * BATCHES
    assert model.batches == EPOCHS * BATCHES - 10


def test_how_many_batches_a_step_of_the_module_s_own_trains_is_the_module_s_to_say() -> None:
    sampler = StepSampler(cast(Any, None), SAMPLES, BATCH, accumulate=2)
    for automatic in (False, True):
        run = SimpleNamespace(
            accumulate_grad_batches=1, fit_loop=SimpleNamespace(max_batches=BATCHES),
            lightning_module=SimpleNamespace(automatic_optimization=automatic),
        )  # fmt: skip
        with pytest.raises(ConfigError, match="must be the same") if automatic else nullcontext():
            elasticps.lightning._check(cast(pl.Trainer, run), sampler)


def test_a_sampler_among_several_loaders_says_where_training_goes_on(connect: Connect, tmp_path: Path) -> None:
    class Two(Tower):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch["clicks"], batch_idx)

    def two(ps: eps.Client, crash_at: int = -1) -> Two:
        made = remote(ps)
        return Two(made.rows, made.seen, made.make, crash_at)

    first = connect()
    with pytest.raises(Crash):
        alone(first, tmp_path).fit(two(first, crash_at=10), {"clicks": steps_of(first), "others": steps_of(first)})
    first.flush()
    second = connect()
    run, model = alone(second, tmp_path), two(second)
    run.fit(model, {"clicks": steps_of(second), "others": steps_of(second)})
    assert (run.global_step, run.current_epoch) == (EPOCHS * BATCHES, EPOCHS)
    assert model.batches == EPOCHS * BATCHES - 10
    longer = DataLoader(data(), batch_size=BATCH // 2)
    with pytest.raises(ConfigError, match="several loaders have the same number of batches"):
        alone(second, tmp_path).fit(model, {"clicks": steps_of(second), "others": longer})


def test_a_search_that_would_train_at_the_servers_is_refused(connect: Connect, tmp_path: Path) -> None:
    ps = connect()
    model = remote(ps)
    model.lr = 0.1
    with pytest.raises(ConfigError, match="what it pushes would stay at the servers"):
        Tuner(alone(ps, tmp_path)).lr_find(model, steps_of(ps), num_training=3)
    assert ps.clock == 0
