"""Hugging Face's `Trainer`: training whose weights and rows are at the servers, which survive the Trainer's process.

    optimizer = elasticps.torch.Optimizer(ps, model, optimizer=eps.AdamW(lr=5e-4), overlap=False)
    trainer = Trainer(model, arguments, train_dataset=data, optimizers=(optimizer, None))
    elastic = elasticps.huggingface.ElasticCallback(ps, trainer)
    trainer.train(resume_from_checkpoint=elastic.resume())

A process that was killed is started again with the same worker's name and goes on where the servers are, not where
the Trainer's last checkpoint was.
"""

from __future__ import annotations

import json
import re
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if find_spec("transformers") is None or find_spec("accelerate") is None:
    raise ImportError(
        "elasticps.huggingface needs transformers and accelerate: pip install 'elasticps[huggingface]'",
        name="transformers",
    )

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import get_last_checkpoint

from elasticps.errors import ConfigError
from elasticps.torch import Optimizer
from elasticps.torch.embedding import INCOMPLETE
from elasticps.torch.resuming import PairedCheckpoints, advance_scheduler, steps_trained

if TYPE_CHECKING:
    from torch import Tensor

    from elasticps.client import Client

FILE = "elasticps.json"
"""Beside the Trainer's checkpoints: the number of the servers' checkpoint, and this worker's steps."""
_STATE = "trainer_state.json"


class ElasticCallback(TrainerCallback):
    """Joins a Trainer with the servers: flushes, checkpoints, and the place where a new process goes on.

    It adds itself to the trainer, whose optimizer is an `elasticps.torch.Optimizer(…, overlap=False)`, and has the
    Trainer clip (`max_grad_norm`) by the norm of all gradients, those of rows too. At the end of an epoch and of
    training all steps are committed. With `checkpoints` the servers make one whenever the Trainer saves one of its own
    (the coordinators need `--checkpoint-url`), and `elasticps.json` beside the Trainer's has its number. Give it to one
    worker of several.

    Raises ConfigError for another optimizer, a Trainer of several processes or devices, and `load_best_model_at_end`;
    and when training begins, in a process that has trained nothing yet, elsewhere than where the servers are.
    """

    def __init__(self, ps: Client, trainer: Trainer, *, checkpoints: bool = False) -> None:
        optimizer = trainer.optimizer
        if not isinstance(optimizer, Optimizer) or optimizer.overlaps:
            raise ConfigError(
                "the Trainer clips gradients and counts their norm before a step: give it "
                "optimizers=(elasticps.torch.Optimizer(ps, model, …, overlap=False), None)"
            )
        if trainer.args.world_size > 1 or trainer.args.n_gpu > 1:
            raise ConfigError(
                "the Trainer would join several processes or devices, whose gradients the servers join: start each "
                "process by itself with one device, as a worker of its own name"
            )
        if trainer.args.load_best_model_at_end:
            raise ConfigError(
                "load_best_model_at_end would bring back the dense weights of the best checkpoint, and not the rows, "
                "which are at the servers: leave it out, take ElasticCallback(…, checkpoints=True), and restore the "
                f"servers from the checkpoint whose number is in {FILE} of the best one"
            )
        self._ps = ps
        self._trainer = trainer
        self._optimizer = optimizer
        self._checkpoints = PairedCheckpoints(ps) if checkpoints else None
        trainer.accelerator.clip_grad_norm_ = self._clip
        trainer.add_callback(self)
        # Rows are in the servers' checkpoints, so the Trainer's may well be without.
        warnings.filterwarnings("ignore", message=re.escape(INCOMPLETE))

    def _clip(self, parameters: object, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """What accelerate's function of that name does, with the gradients of rows."""
        return self._optimizer.clip_grad_norm_(max_norm, norm_type)

    def resume(self) -> str | None:
        """Writes a checkpoint of the Trainer for the steps that this worker's name has at the servers, into the
        Trainer's `output_dir`, and returns its folder, for `train(resume_from_checkpoint=…)`. None if it has none.

        Data are skipped up to there, and learning-rate schedules advanced. Histories come from the Trainer's last
        checkpoint of before, if there is one.
        """
        steps = steps_trained(self._ps)
        if not steps:
            return None
        output = self._trainer.args.output_dir
        last = get_last_checkpoint(output) if Path(output).is_dir() else None
        folder = Path(output) / f"checkpoint-{steps}"
        if last is not None and Path(last) == folder and _read(folder / _STATE) is not None:
            return str(folder)
        state = None if last is None else _read(Path(last) / _STATE)
        if state is None:
            exported = [each for each in self._trainer.callback_handler.callbacks if isinstance(each, ExportableState)]
            state = TrainerState(stateful_callbacks=[*exported, self._trainer.control])
            state.train_batch_size = self._trainer.args.train_batch_size
        state.global_step = steps
        self._optimizer.refresh()
        self._trainer.save_model(str(folder))
        state.save_to_json(str(folder / _STATE))
        return str(folder)

    def _check_begin(self, begins_at: int) -> None:
        """Refuses to train data again, or to skip data that the servers know nothing of."""
        before = self._ps.resume()
        if self._ps.clock > before.clock or before.steps == begins_at:  # the former: a second `train()` of a process
            return
        if before.steps:
            raise ConfigError(
                f"the servers have {before.steps} steps of this worker, and the Trainer begins after step {begins_at}: "
                "call train(resume_from_checkpoint=elastic.resume()), elastic being this ElasticCallback; for another "
                "training connect with a worker's name of its own"
            )
        raise ConfigError(
            f"the Trainer's checkpoint is of step {begins_at}, and the servers know no step of this worker: connect "
            "with the worker's name of that run (elasticps.connect(…, worker=…)), or restore the servers first, from "
            f"the checkpoint whose number is in {FILE} beside it; to begin anew call train() without a checkpoint"
        )

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **known: Any
    ) -> None:
        self._check_begin(state.global_step)
        self._optimizer.refresh()  # a checkpoint of the Trainer's has older weights
        if state.global_step:
            advance_scheduler(known["lr_scheduler"], state.global_step)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **known: Any) -> None:
        self._ps.flush()
        pair = {"steps": steps_trained(self._ps)} if self._checkpoints is None else self._checkpoints.take()
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        (folder / FILE).write_text(json.dumps(pair), encoding="utf-8")

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **known: Any) -> None:
        self._ps.flush()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **known: Any) -> None:
        self._ps.flush()


def _read(file: Path) -> TrainerState | None:
    """The Trainer's state in a file; None where there is none, or a part of one, as a kill may leave it."""
    try:
        return TrainerState.load_from_json(str(file))
    except (OSError, ValueError, TypeError):
        return None
