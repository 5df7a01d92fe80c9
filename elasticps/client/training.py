"""What a training loop does in each step: pulls and pushes, of one table or of several at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from elasticps.client.opened import Tables
from elasticps.client.parts import Parts
from elasticps.client.pull_behind import H, PullBehind
from elasticps.client.pull_tables import PartRead, TablesPull
from elasticps.client.pulls import ArrayRead
from elasticps.client.steps import OpenStep, Rates, Step, Steps, Values
from elasticps.client.tables import DenseTensor
from elasticps.errors import InputError

Rows = NDArray[np.float32]


class Training:
    """The part of a client that its training loop uses."""

    _parts: Parts
    _steps: Steps
    _tables: Tables

    def push(self, values: Values, *, lr: Rates = None, copy: bool = True) -> Step:
        """Sends one step: {table: (keys int64 [n], grads float32 [n, dim]), tensor: grad float32 of its shape}.

        Returns at once, unless `window` steps are outstanding already. Gradients of keys that repeat are summed. An
        empty mapping, or empty keys, is a step that only ticks the clock. `lr` overrides the optimizers' rates, for
        all tables or by table. `copy=False` lends tensors' gradients instead of copying them: they must not change
        until the step is committed; under BSP, where it may be pushed again after that, they are copied. Raises
        `InputError` before anything is sent, `Timeout` when the window stays full.
        """
        return self._steps.whole(values, lr, copy=copy)

    def pull(self, keys: Mapping[H, object], *, read: str = "tail", exact: bool = False) -> dict[H, Rows]:
        """Rows of several tables, and tensors, {table: keys int64 [n], tensor: None}: of each table float32 [n, dim] in
        the order of its keys, each tensor float32 of its shape. One frame asks each server for all of them but large
        tensors. `read`, `exact` and what is raised as for `SparseTable.pull`.
        """
        handles = self._checked_handles(keys)
        return self._parts.reads.pulled_tables(handles, [h.begin(keys[h], None, read, exact) for h in handles])

    def pull_async(
        self, keys: Mapping[H, object], out: Mapping[H, Rows] | None = None, *,
        read: str = "tail", exact: bool = False,
    ) -> TablesPull[H]:  # fmt: skip
        """Asks for all of that now, for those of `out` into that; `result()` of what is returned waits for them and
        gives what `pull` does."""
        handles = self._checked_handles(keys)
        places: Mapping[H, Rows] = {} if out is None else out
        reads = [handle.begin(keys[handle], places.get(handle), read, exact) for handle in handles]
        return self._parts.reads.start_tables(handles, reads)

    def push_pull(
        self, values: Values, keys: Mapping[H, object], out: Mapping[H, Rows] | None = None, *,
        step: OpenStep | None = None, lr: Rates = None, copy: bool = True, read: str = "tail", exact: bool = False,
    ) -> tuple[Step, TablesPull[H]]:  # fmt: skip
        """`push(values)`, then `pull_async(keys, out)`: the same results, but to each server one message has both,
        which spares time at both ends. Under `BSP` the round is waited for in between. Arguments of the pull that
        cannot be used raise before anything is sent.

        step: an open one, of which `values` are the last part; its own `lr` counts then.
        """
        handles = self._checked_handles(keys)
        pull = PullBehind(self._parts.reads, handles, keys, {} if out is None else out, read, exact)
        if step is None:
            step = OpenStep(self._steps, lr)
        return step.end(values, copy=copy, then=pull.then), pull.begun()

    def _checked_handles(self, keys: Mapping[H, object]) -> list[H]:
        opened = self._tables.opened
        for handle in keys:
            if opened.get(getattr(handle, "name", "")) is not handle:
                raise InputError(f"pull takes the tables and tensors of this client as keys, got {handle!r}")
        return list(keys)

    def pull_many(
        self, tensors: Iterable[DenseTensor], outs: Iterable[NDArray[np.float32]] | None = None
    ) -> list[ArrayRead | PartRead]:
        """Asks for several tensors now, each server once; the `result()` of each read, in their order, waits for it.
        Into `outs`, as many arrays, if given."""
        pairs = ((tensor, None) for tensor in tensors) if outs is None else zip(tensors, outs, strict=True)
        reads = [tensor.prepare(out, "tail") for tensor, out in pairs]
        return self._parts.reads.start_tensors(reads)

    def step(self, *, lr: Rates = None) -> OpenStep:
        """Begins a step that is sent in parts."""
        return OpenStep(self._steps, lr)
