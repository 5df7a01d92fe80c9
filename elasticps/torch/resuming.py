"""Where a worker that is started again goes on: the servers know its steps, whatever its framework has saved."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Sampler

from elasticps.errors import InputError

if TYPE_CHECKING:
    from elasticps.client import Client


def steps_trained(ps: Client) -> int:
    """How many steps of this worker's name the servers have, those of earlier processes of that name included."""
    start = ps.resume()
    return start.steps + ps.clock - start.clock


class StepSampler(Sampler[list[int]]):
    """Batches of indices in a fixed order, beginning with the first one that this worker has not trained yet.

    A DataLoader's `batch_sampler`, for one worker with data of its own: `num_samples` samples in batches of
    `batch_size`, the last of an epoch shorter unless `drop_last`. Each iteration is the rest of the epoch that the
    worker's steps have come to; that is a whole epoch but in a process that was started again. With `shuffle_seed` each
    epoch has an order of its own, the same in every process; `accumulate`: how many batches a step trains. Every step
    of the worker counts, so it makes no others. Raises `InputError` for unusable arguments.
    """

    def __init__(
        self,
        ps: Client,
        num_samples: int,
        batch_size: int,
        *,
        shuffle_seed: int | None = None,
        drop_last: bool = False,
        accumulate: int = 1,
    ) -> None:
        for name, value in (("num_samples", num_samples), ("batch_size", batch_size), ("accumulate", accumulate)):
            if value < 1:
                raise InputError(f"StepSampler takes {name} of at least 1, got {value}")
        self._ps = ps
        self._samples, self._batch_size = num_samples, batch_size
        self._seed = shuffle_seed
        self._batches = num_samples // batch_size if drop_last else -(-num_samples // batch_size)
        if not self._batches:
            raise InputError(f"{num_samples} samples make no batch of {batch_size}, and drop_last drops shorter ones")
        self.accumulate = accumulate  # batches of a step

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        return self._batches

    @property
    def steps_per_epoch(self) -> int:
        """Steps of a whole epoch, the last of which may train fewer batches."""
        return -(-self._batches // self.accumulate)

    def position(self) -> tuple[int, int]:
        """The epoch, from 0, and the batch in it, from 0, that come next."""
        epoch, step = divmod(steps_trained(self._ps), self.steps_per_epoch)
        return epoch, step * self.accumulate

    def __iter__(self) -> Iterator[list[int]]:
        epoch, first = self.position()
        order = torch.arange(self._samples)
        if self._seed is not None:
            order = torch.randperm(self._samples, generator=torch.Generator().manual_seed(self._seed + epoch))
        for at in range(first, self._batches):
            yield order[at * self._batch_size : (at + 1) * self._batch_size].tolist()


class PairedCheckpoints:
    """Checkpoints of the servers beside those of a framework: one for each number of steps, however often it saves."""

    def __init__(self, ps: Client) -> None:
        self._ps = ps
        self._of_steps = -1
        self._number = 0

    def take(self) -> dict[str, int]:
        """Has the servers make a checkpoint of at least this worker's steps so far, and waits for it: its number, and
        the steps. Raises `CheckpointError`, `Timeout`."""
        steps = steps_trained(self._ps)
        if steps != self._of_steps:
            self._number = self._ps.checkpoint().result()
            self._of_steps = steps
        return {"checkpoint": self._number, "steps": steps}


def advance_scheduler(scheduler: Any, steps: int) -> None:
    """Brings a scheduler of torch's to where it is after so many calls of `step()`; one that is further stays."""
    scheduler = getattr(scheduler, "scheduler", scheduler)  # accelerate wraps it
    optimizer = scheduler.optimizer
    stepped = getattr(optimizer, "_opt_called", False)
    optimizer._opt_called = True  # steps were made, in an earlier process: else torch warns
    while scheduler.last_epoch < steps:
        scheduler.step()
    optimizer._opt_called = stepped
