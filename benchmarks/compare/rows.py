"""Rows at another process: a parameter server as one writes it with torch.distributed.rpc, or as a Ray actor."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.training import DIM, ROWS_LR, ROWS_STD


def initial_rows(values: int, seed: int) -> Tensor:
    """What all contestants begin with: float32 [values, DIM]."""
    return torch.randn(values, DIM, generator=torch.Generator().manual_seed(seed)) * ROWS_STD


class RowServer:
    """Rows in memory, trained by torch's Adagrad: no copies elsewhere, and nothing on disk."""

    def __init__(self, values: int, seed: int) -> None:
        torch.sparse.check_sparse_tensor_invariants.disable()
        self._rows = torch.nn.Parameter(initial_rows(values, seed))
        self._optimizer = torch.optim.Adagrad([self._rows], lr=ROWS_LR)

    def pid(self) -> int:
        """Of the process that holds the rows."""
        return os.getpid()

    def pull(self, ids: Tensor) -> Tensor:
        """Rows, float32 [n, DIM], of ids, int64 [n]."""
        with torch.no_grad():
            return functional.embedding(ids, self._rows)

    def push(self, ids: Tensor, grads: Tensor) -> None:
        """Takes a step: gradients float32 [n, DIM] of ids, int64 [n] without repeats, in ascending order."""
        self._rows.grad = torch.sparse_coo_tensor(ids[None], grads, self._rows.shape, is_coalesced=True)
        self._optimizer.step()


class RemoteRows:
    """The rows of a DLRM at a `RowServer`: each id of a batch is pulled once, and pushed once.

    pull  gets the rows of ids
    push  begins to send gradients of ids; what it returns waits until they are applied
    """

    def __init__(self, pull: Callable[[Tensor], Tensor], push: Callable[[Tensor, Tensor], Callable[[], None]]) -> None:
        self._pull, self._push = pull, push
        self._pushed: Callable[[], None] | None = None

    def __call__(self, ids: Tensor) -> Tensor:
        """ids [n, categories] -> [n, categories, DIM]."""
        self.finish()
        unique, inverse = torch.unique(ids, return_inverse=True)
        pulled = self._pull(unique)
        if torch.is_grad_enabled():

            def send(rows: Tensor) -> None:
                assert rows.grad is not None
                self._pushed = self._push(unique, rows.grad)

            pulled.requires_grad_().register_post_accumulate_grad_hook(send)
        return functional.embedding(inverse, pulled)

    def finish(self) -> None:
        """Waits until the last step is applied."""
        pushed, self._pushed = self._pushed, None
        if pushed is not None:
            pushed()
