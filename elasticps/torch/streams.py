"""Copies between a device and this host on streams of their own, beside what the device computes meanwhile.

Written against what torch's modules of devices have in common: `torch.cuda`, the stubs of `torch.cpu`, and the tests'
own, whose copies are made as late as the waits allow. Three rules make it right:

- a copy down waits for what the current stream computes until it begins, and its event is waited for before anybody
  reads what came. Until then the caller holds the source: the compute stream would use its memory again;
- what a copy up brings lies in memory of the side stream, so that it begins without a wait; the current stream waits
  for it, and the memory is marked as used there, or its next owner would write it too early;
- pinned memory is not used again before the copies that read or write it are made: torch sees to that, of any stream.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """Something that is done once a device has come there."""

    def query(self) -> bool: ...
    def synchronize(self) -> None: ...


class Lane:
    """A device's side streams, one for each direction. module: what torch has for devices of this type."""

    def __init__(self, device: torch.device, module: Any) -> None:
        self._device, self._module = device, module
        self._down, self._up = module.Stream(device), module.Stream(device)

    def fetch(self, there: Tensor, here: Tensor) -> Event:
        """Begins to copy what `there` is once the current stream has come here, into pinned memory of its shape. The
        caller holds both until the event is done."""
        self._down.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._down):
            # The device converts: for other types torch would copy through memory that is not pinned, and wait.
            here.copy_(there.to(here.dtype), non_blocking=True)
            done: Event = self._module.Event()
            done.record(self._down)  # type: ignore[attr-defined]
        return done

    def send(self, here: Tensor) -> Tensor:
        """A copy of pinned memory on the device, as the current stream has it from now on."""
        with self._module.stream(self._up):
            there = here.to(self._device, non_blocking=True)
        compute = self._module.current_stream(self._device)
        compute.wait_stream(self._up)
        there.record_stream(compute)
        return there
