"""Rows of the next batch, asked for as a step ends: in one message with its last gradients, and its dense weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import nn

from elasticps.model.spec import BSP
from elasticps.torch.collection import Collection, Table
from elasticps.torch.embedding import Rows, Want
from elasticps.torch.group.client import GroupClient

if TYPE_CHECKING:
    from elasticps.client import Client, OpenStep, Step
    from elasticps.torch.group import GroupStep
    from elasticps.torch.parameters import Dense

Pulled = Callable[[], NDArray[np.float32]]
"""waits for a dense parameter's values"""


class Exchange(NamedTuple):
    """What a step gave: itself, and what waits for the values of each parameter."""

    step: Step | GroupStep
    arriving: list[tuple[Dense, Pulled]]


class Wanted:
    """What is to be pulled when a step ends: dense weights, and rows that layers expect to be asked for next."""

    def __init__(self, dense: Iterable[Dense], wants: Iterable[Want]) -> None:
        self._dense = list(dense)
        self._joined: list[Want] = []
        self._alone: list[Want] = []
        self._keys: dict[Any, Any] = {dense.tensor: None for dense in self._dense}
        self._places: dict[Any, NDArray[np.float32]] = {}
        for want in wants:
            # A table is asked once in a pull; and one that keeps rows shows the step only when it has left.
            if any(table in self._keys or getattr(table, "cache", None) is not None for table in want.keys):
                self._alone.append(want)
            else:
                self._joined.append(want)
                self._keys |= want.keys
                self._places |= want.places

    def behind(self, ps: Client, values: dict[Any, Any], step: OpenStep | None, lr: dict[Any, float]) -> Exchange:
        """Ends a step, and pulls."""
        done, pull = ps.push_pull(values, self._keys, self._places, step=step, lr=lr)
        return Exchange(done, self._begun(pull))

    def now(self, ps: Client | GroupClient) -> list[tuple[Dense, Pulled]]:
        """Pulls, as the step has ended already."""
        if not isinstance(ps, GroupClient):
            return self._begun(ps.pull_async(self._keys, self._places))
        tensors: list[Any] = [dense.tensor for dense in self._dense]
        reads = ps.pull_many(tensors)
        self._alone, self._joined = self._joined + self._alone, []
        return [(dense, read.result) for dense, read in zip(self._dense, reads, strict=True)]

    def _begun(self, pull: Any) -> list[tuple[Dense, Pulled]]:
        for want in self._joined:
            want.begun(pull)

        def of(tensor: object) -> Pulled:
            return lambda: pull.result()[tensor]

        return [(dense, of(dense.tensor)) for dense in self._dense]

    def rest(self, ps: Client | GroupClient) -> None:
        """Pulls what could not be pulled with the others."""
        for want in self._alone:
            keys: Any = want.keys
            want.begun(ps.pull_async(keys, want.places))


def layers_of(model: nn.Module) -> list[Rows | Collection]:
    """What may expect rows."""
    return [
        module for module in model.modules()
        if isinstance(module, Collection) or (isinstance(module, Rows) and not isinstance(module, Table))
    ]  # fmt: skip


def in_one(ps: Client | GroupClient) -> bool:
    """Whether a step's end and a pull can leave together."""
    return not isinstance(ps, GroupClient) and not isinstance(getattr(ps, "consistency", None), BSP)
