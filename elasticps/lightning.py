"""PyTorch Lightning: training whose weights and rows are at the servers, which survive the Lightning process.

    trainer = lightning.Trainer(callbacks=[elasticps.lightning.Callback(ps)], …)
    trainer.fit(module)    # `configure_optimizers` returns an elasticps.torch.Optimizer(ps, self, …, overlap=False)

A process that was killed is started again with the same worker's name and goes on where the servers are, not where
Lightning's last checkpoint was. Data that is handed out in a `StepSampler` (or in shards) goes on there, too.
"""

from __future__ import annotations

import re
import warnings
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if find_spec("lightning") is None:
    raise ImportError("elasticps.lightning needs Lightning: pip install 'elasticps[lightning]'", name="lightning")

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.utilities import CombinedLoader

from elasticps.errors import ConfigError
from elasticps.torch import Optimizer, StepSampler
from elasticps.torch.data import Sharded
from elasticps.torch.embedding import INCOMPLETE
from elasticps.torch.resuming import PairedCheckpoints, advance_scheduler, steps_trained

if TYPE_CHECKING:
    from elasticps.client import Client

KEY = "elasticps"
"""Under which Lightning's checkpoints have the number of the servers' checkpoint, and this worker's steps."""
_NOT_RESUMABLE = "You're resuming from a checkpoint that ended before the epoch ended"


class Callback(pl.Callback):
    """Joins Lightning's loop with the servers: flushes, checkpoints, and the place where a new process goes on.

    When a fit begins, the model takes the servers' weights, and epoch, batch and step are those that the steps of this
    worker's name have come to, with a checkpoint of Lightning's (`ckpt_path=`) or without; learning-rate schedules go
    along. At the end of an epoch and of training all steps are committed. With `checkpoints` the servers make one
    whenever Lightning saves one of its own (the coordinators need `--checkpoint-url`), and Lightning's has its number
    under "elasticps". Give it to one worker of several.

    Raises ConfigError for a strategy of several processes, for Lightning's searches for a learning rate or a batch
    size, for a `StepSampler` that counts other steps than the Trainer makes, and when Lightning's checkpoint is of more
    than no steps but the servers know none of this worker's name.
    """

    def __init__(self, ps: Client, *, checkpoints: bool = False) -> None:
        self._ps = ps
        self._checkpoints = PairedCheckpoints(ps) if checkpoints else None
        self._loaded: dict[str, Any] | None = None  # Lightning's checkpoint, until its loops are restored from it

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if trainer.world_size > 1:
            raise ConfigError(
                f"{type(trainer.strategy).__name__} joins {trainer.world_size} processes, whose gradients the servers "
                "join: take Trainer(devices=1), and start each process by itself, as a worker of its own name"
            )
        if any(isinstance(each, LearningRateFinder | BatchSizeFinder) for each in trainer.callbacks):
            raise ConfigError(
                "Lightning's search for a learning rate or a batch size trains, and takes back its own weights only: "
                "what it pushes would stay at the servers, and count as this worker's steps. Search with a Trainer "
                "that lacks this callback, and a LocalCluster of its own"
            )
        # Rows are in the servers' checkpoints, so Lightning's may well be without.
        warnings.filterwarnings("ignore", message=re.escape(INCOMPLETE))

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._loaded = checkpoint

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        loaded, self._loaded = self._loaded, None
        steps = steps_trained(self._ps)
        saved = 0 if loaded is None else int(loaded["global_step"])
        if saved and not steps:
            of = loaded.get(KEY, {}) if loaded else {}
            raise ConfigError(
                f"Lightning's checkpoint was saved after {saved} steps, and the servers know no step of this worker: "
                "connect with the worker's name of that run (elasticps.connect(…, worker=…)), or restore the servers "
                f"first{', from checkpoint ' + str(of['checkpoint']) if of.get('checkpoint') else ''}"
            )
        if steps == saved:  # Lightning is where the servers are
            return
        sampler = self._sampler(trainer, steps)
        if sampler is None:
            return
        if steps and 0 < (trainer.max_epochs or 0) <= sampler.position()[0]:
            warnings.warn(
                f"nothing is left to train: this worker has made {steps} steps, all that max_epochs="
                f"{trainer.max_epochs} asks for. Another training takes a worker's name of its own",
                stacklevel=2,
            )
        if loaded is None:
            trainer.fit_loop.load_state_dict(_moved(trainer.fit_loop.state_dict(), sampler, steps))
        else:  # Lightning takes them from there when this hook is over
            loops = loaded["loops"]
            loops["fit_loop"] = _moved(loops["fit_loop"], sampler, steps)

    def _sampler(self, trainer: pl.Trainer, steps: int) -> StepSampler | None:
        """The sampler that says where the worker's steps have come to; None where the data tell of no place."""
        trainer.fit_loop.setup_data()
        if samplers := _step_samplers(trainer):
            warnings.filterwarnings("ignore", message=_NOT_RESUMABLE)
            return samplers[0]
        if not any(_is_sharded(loader) for loader in _loaders(trainer)):
            warnings.warn(
                f"this worker has trained {steps} steps, and its data begin again: "
                "DataLoader(data, batch_sampler=elasticps.torch.StepSampler(ps, …)) goes on where they have come to",
                stacklevel=2,
            )
        return None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        _step_samplers(trainer)
        for optimizer in trainer.optimizers:
            if isinstance(optimizer, Optimizer):
                optimizer.refresh()  # Lightning's checkpoint has older weights
        for config in trainer.lr_scheduler_configs:
            if not config.reduce_on_plateau:
                done = trainer.global_step if config.interval == "step" else trainer.current_epoch
                advance_scheduler(config.scheduler, done // config.frequency)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._ps.flush()
        pair = {"steps": steps_trained(self._ps)}
        checkpoint[KEY] = pair if self._checkpoints is None else self._checkpoints.take()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._ps.flush()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._ps.flush()


def _loaders(trainer: pl.Trainer) -> list[Any]:
    """The loaders of the training data, which Lightning takes in lists and dicts, too."""
    loaders: list[Any] = CombinedLoader(trainer.train_dataloader).flattened
    return loaders


def _is_sharded(loader: Any) -> bool:
    parts = (getattr(loader, "batch_sampler", None), getattr(loader, "dataset", loader))
    return any(isinstance(part, Sharded) for part in parts)


def _step_samplers(trainer: pl.Trainer) -> list[StepSampler]:
    """The `StepSampler` of each loader of the training data that has one. ConfigError as by `_check`."""
    found = [getattr(loader, "batch_sampler", None) for loader in _loaders(trainer)]
    samplers = [each for each in found if isinstance(each, StepSampler)]
    for sampler in samplers:
        _check(trainer, sampler)
    return samplers


def _check(trainer: pl.Trainer, sampler: StepSampler) -> None:
    """Refuses a sampler that would take the worker's steps for other batches than the Trainer has trained in them."""
    # Lightning knows how many batches a step trains only where it makes the steps.
    if trainer.lightning_module.automatic_optimization and sampler.accumulate != trainer.accumulate_grad_batches:
        raise ConfigError(
            f"StepSampler(accumulate={sampler.accumulate}) and Trainer(accumulate_grad_batches="
            f"{trainer.accumulate_grad_batches}) must be the same: they say what a step trains"
        )
    if trainer.fit_loop.max_batches != len(sampler):
        raise ConfigError(
            f"the Trainer ends an epoch after {trainer.fit_loop.max_batches} batches, and StepSampler after all "
            f"{len(sampler)}: leave out limit_train_batches, fast_dev_run and overfit_batches, or give StepSampler "
            "fewer samples; several loaders have the same number of batches"
        )


def _moved(state: dict[str, Any], sampler: StepSampler, steps: int) -> dict[str, Any]:
    """The state of Lightning's loops where a sampler's worker is after so many steps."""
    epoch, batch = sampler.position()
    begun = epoch + (batch > 0)
    epochs = {"ready": begun, "started": begun, "processed": epoch, "completed": epoch}
    in_epoch = steps % sampler.steps_per_epoch
    stepped = {"total": {"ready": steps, "completed": steps}, "current": {"ready": in_epoch, "completed": in_epoch}}
    manual = "epoch_loop.manual_optimization.optim_step_progress"  # counts where training_step calls step() itself
    optimizer = state["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]

    def counts(n: int) -> dict[str, int]:
        return dict.fromkeys(("ready", "started", "processed", "completed"), n)

    return state | {
        "epoch_progress": {"total": dict(epochs), "current": dict(epochs)},
        "epoch_loop.state_dict": state["epoch_loop.state_dict"] | {"_batches_that_stepped": steps},
        "epoch_loop.batch_progress": {
            "total": counts(epoch * len(sampler) + batch), "current": counts(batch), "is_last_batch": False,
        },
        "epoch_loop.automatic_optimization.optim_progress": {"optimizer": optimizer | {"step": stepped}},
        manual: state[manual] | stepped,
    }  # fmt: skip
