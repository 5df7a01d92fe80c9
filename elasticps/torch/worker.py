"""The worker that a model trains as: a `Client`, or the `GroupClient` of a rank; torch's layers do not ask which."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from elasticps.model.caching import Cache
from elasticps.model.policies import Admission, Eviction
from elasticps.model.spec import Filter, Init, ServerOptimizer


class PendingPull(Protocol):
    """Rows and tensors on their way."""

    def result(self, timeout: float | None = None) -> Any:
        """Waits until they are where they belong. Raises what the pull raises."""


class Worker(Protocol):
    """What layers, Optimizers and samplers call. Arguments, results and errors are those of `elasticps.Client`."""

    @property
    def collective(self) -> bool:
        """Whether several processes are this worker: all of them make the same calls in the same order, also with
        nothing to give or to ask for, and a step leaves as a whole, when all have come to its end."""

    @property
    def clock(self) -> int:
        """Steps pushed."""

    def table(
        self, name: str, *, dim: int, optimizer: ServerOptimizer, init: Init | None = None, dtype: str = "float32",
        push: Sequence[Filter] = (), pull: Sequence[Filter] = (), cache: Cache | None = None,
        admission: Admission | None = None, eviction: Eviction | Sequence[Eviction] = (), usage: str = "",
    ) -> Any:  # fmt: skip
        """Opens a sparse table."""

    def tensors(
        self, values: Mapping[str, object], *, optimizer: ServerOptimizer | Callable[[str], ServerOptimizer],
        push: Sequence[Filter] = (), pull: Sequence[Filter] = (),
    ) -> Mapping[str, Any]:  # fmt: skip
        """Opens dense tensors by name."""

    def pull_async(self, keys: Mapping[Any, Any], out: Mapping[Any, Any] | None = None) -> PendingPull:
        """Asks for rows of tables, and tensors, {table: keys int64 [n], tensor: None}."""

    def push(self, values: Mapping[Any, Any], *, lr: Any = None) -> Any:
        """Sends a step."""

    def push_pull(
        self, values: Mapping[Any, Any], keys: Mapping[Any, Any], out: Mapping[Any, Any] | None = None, *,
        step: Any = None, lr: Any = None,
    ) -> tuple[Any, PendingPull]:  # fmt: skip
        """Sends a step, or the last part of an open one, and asks for what it makes of rows and tensors."""

    def step(self, *, lr: Any = None) -> Any:
        """Opens a step that leaves in parts. ConfigError if this worker is `collective`."""

    def shards(
        self, num_samples: int, shard_size: int, epochs: int = 1, *, name: str = "train",
        shuffle_seed: int | None = None,
    ) -> Any:  # fmt: skip
        """An iterator over the shards of data that this worker trains."""
