"""Handles of tables and tensors in a group: a call of one is an operation of all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, NoReturn, SupportsIndex, TypeVar

import numpy as np
from numpy.typing import NDArray

from elasticps.client.filtering import Feedback
from elasticps.client.inputs import checked_floats, checked_gradients, checked_keys, checked_out, refuse_pickling
from elasticps.client.short_keys import Saved
from elasticps.errors import ConfigError
from elasticps.model.policies import Admission, Eviction
from elasticps.model.spec import ServerOptimizer
from elasticps.torch.group.layout import GradientSize
from elasticps.torch.group.ranks import Ranks
from elasticps.torch.group.reads import ClientRead, GroupPull, GroupRead, WeightsRead, ask_rows, ask_weights

if TYPE_CHECKING:
    from elasticps.client import DenseTensor, SparseTable
    from elasticps.client.lifecycle import KeyUsage, TableState
    from elasticps.client.pull import ServerPull
    from elasticps.client.rates import SetRate
    from elasticps.client.row_cache import CachedPull

Floats = NDArray[np.float32]
Real = TypeVar("Real", "SparseTable", "DenseTensor")


class _Handle(Generic[Real]):
    """A table or tensor of a group. number: counts the group's handles, in the order in which they were opened; real:
    the client's handle, at rank 0."""

    real: Real | None

    def __init__(self, ps: Ranks, name: str, number: int, optimizer: ServerOptimizer, real: Real | None) -> None:
        self.name = name
        self.number = number
        self.real = real
        self._ps = ps
        self._optimizer = optimizer
        self.changes = 0  # how often rows were changed past steps

    @property
    def optimizer(self) -> ServerOptimizer:
        """As the client has it; elsewhere than at rank 0 as it was opened."""
        return self._optimizer if self.real is None else self.real.optimizer

    @property
    def rate_set(self) -> SetRate | None:
        """The rate that `set_lr` gave all workers; None at other ranks than rank 0, whose rates count."""
        return None if self.real is None else self.real.rate_set

    @property
    def feedback(self) -> Feedback:
        """As the client's, at rank 0. ConfigError elsewhere."""
        return self._here("feedback").feedback

    @property
    def zstd_bytes(self) -> Saved:
        """As the client's, at rank 0. ConfigError elsewhere."""
        return self._here("zstd_bytes").zstd_bytes

    def set_lr(self, lr: float | None) -> None:
        """As the client's; every rank calls it."""
        self._ps.together(f"set_lr of {self.name!r}", lambda: self._here("").set_lr(lr))

    def load(self, *values: object, **options: Any) -> None:
        """As the client's, with what rank 0 gives; every rank calls it."""

        def loaded() -> None:
            self._here("").load(*values, **options)

        self.changes += 1
        self._ps.together(f"load of {self.name!r}", loaded)

    def drop_feedback(self) -> None:
        """As the client's, which rank 0 has; every rank calls it."""
        self._ps.together(f"drop_feedback of {self.name!r}", lambda: self._here("").drop_feedback())

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        refuse_pickling(f"the handle of table {self.name!r}")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} at rank {self._ps.rank} of {self._ps.size}>"

    def _here(self, what: str) -> Real:
        if self.real is None:
            self._refuse(what)
        return self.real

    def _refuse(self, what: str) -> NoReturn:
        raise ConfigError(f"{what} of {self.name!r}: rank 0 alone has the client; do it there, `with ps.alone():`")


class GroupTable(_Handle["SparseTable"]):
    """A sparse table; made by `GroupClient.table`."""

    def __init__(
        self, ps: Ranks, name: str, number: int, optimizer: ServerOptimizer, dim: int, real: SparseTable | None, *,
        scored: bool = False,
    ) -> None:  # fmt: skip
        """scored: it keeps scores, which are a last column beside the gradients."""
        super().__init__(ps, name, number, optimizer, real)
        self.dim = dim
        self.target = GradientSize(0, dim + scored)
        self._scored = scored

    @property
    def key_bytes(self) -> Saved:
        """As the client's, at rank 0. ConfigError elsewhere."""
        return self._here("key_bytes").key_bytes

    def pull_async(
        self, keys: object, out: Floats | None = None, *, read: str = "tail", exact: bool = False
    ) -> GroupRead | ServerPull | CachedPull:
        """Asks for rows of `keys`, int64 [n], as every rank does for its own; each key is pulled once for all."""
        real, mine = self.real, checked_keys(self.name, keys)
        rows = np.empty((len(mine), self.dim), np.float32)
        if out is not None:
            rows = checked_out(f"table {self.name!r}", out, rows.shape)
        if real is not None and self._ps.is_alone:
            return real.pull_async(mine, rows, read=read, exact=exact)

        def pull(_: object, unions: list[NDArray[np.int64]], into: list[Floats]) -> ClientRead:
            assert real is not None
            return real.pull_async(unions[0], into[0], read=read, exact=exact)

        operation, outs = f"pull of {self.name!r} {read}{' exact' * exact}", {self: rows}
        links, slots = self._ps.links, self._ps.slots
        ticket = ask_rows(links, slots, operation, {self: mine}, outs, None if real is None else pull)
        return GroupRead(GroupPull(links, ticket, outs, {}), self)

    def pull(self, keys: object, out: Floats | None = None, *, read: str = "tail", exact: bool = False) -> Floats:
        """The rows of `keys`, float32 [n, dim] in their order."""
        return self.pull_async(keys, out, read=read, exact=exact).result()

    def checked(self, value: object) -> tuple[NDArray[np.int64], Floats]:
        """Checks a gradient: (keys int64 [n], float32 [n, dim]), [n, dim + 1] with scores. InputError for anything
        else."""
        return checked_gradients(self.name, value, self.dim, self._scored)

    def pushed(self, summed: tuple[NDArray[np.int64], Floats]) -> tuple[Any, ...]:
        """What the client's push takes of sums of what `checked` returned."""
        keys, sums = summed
        if not self._scored:
            return keys, sums
        return keys, np.ascontiguousarray(sums[:, : self.dim]), np.ascontiguousarray(sums[:, self.dim])

    def usage(self, keys: object) -> KeyUsage:
        """As the client's, at rank 0. ConfigError elsewhere."""
        return self._here("usage()").usage(keys)

    def state(self) -> TableState:
        """As the client's, at rank 0. ConfigError elsewhere."""
        return self._here("state()").state()

    def evict(self, dry_run: bool = False) -> dict[str, int]:
        """As the client's, at rank 0. ConfigError elsewhere."""
        return self._here("evict()").evict(dry_run)

    def set_admission(self, policy: Admission | None) -> None:
        """As the client's; every rank calls it."""
        self._ps.together(f"set_admission of {self.name!r}", lambda: self._here("").set_admission(policy))

    def set_eviction(self, policies: Eviction | Sequence[Eviction] | None) -> None:
        """As the client's; every rank calls it."""
        self._ps.together(f"set_eviction of {self.name!r}", lambda: self._here("").set_eviction(policies))

    def delete(self, keys: object) -> None:
        """As the client's, of the keys that rank 0 gives; every rank calls it."""
        self.changes += 1
        self._ps.together(f"delete of {self.name!r}", lambda: self._here("delete").delete(keys))

    def clear(self) -> None:
        """As the client's; every rank calls it."""
        self.changes += 1
        self._ps.together(f"clear of {self.name!r}", lambda: self._here("clear").clear())

    def keys(self, **options: int) -> Iterator[NDArray[np.int64]]:
        """As the client's, at rank 0. ConfigError elsewhere."""
        return self._here("keys()").keys(**options)

    def items(self, **options: int) -> Iterator[tuple[NDArray[np.int64], Floats]]:
        """As the client's, at rank 0. ConfigError elsewhere."""
        return self._here("items()").items(**options)

    def __len__(self) -> int:
        return len(self._here("len()"))

    def __bool__(self) -> bool:
        return True


class GroupTensor(_Handle["DenseTensor"]):
    """A dense tensor; made by `GroupClient.tensor`."""

    def __init__(
        self, ps: Ranks, name: str, number: int, optimizer: ServerOptimizer, shape: tuple[int, ...],
        real: DenseTensor | None,
    ) -> None:  # fmt: skip
        super().__init__(ps, name, number, optimizer, real)
        self.shape = shape
        self.target = GradientSize(math.prod(shape), 0)

    def pull_async(self) -> WeightsRead | ServerPull:
        """Asks for the tensor, as every rank does. `result()` gives memory that all ranks see: copy it to change
        it."""
        return pull_many(self._ps, [self])[0]

    def pull(self) -> Floats:
        """The tensor, float32 of its shape, in memory of its own."""
        return self.pull_async().result().copy()

    def checked(self, value: object) -> Floats:
        """Checks a gradient, and returns it flat. InputError for anything but float32 of the tensor's shape."""
        return checked_floats(f"tensor {self.name!r}", value, self.shape).reshape(-1)

    def pushed(self, summed: Floats) -> Floats:
        """What the client's push takes of a sum."""
        return summed


Handle = GroupTable | GroupTensor


def pull_many(ps: Ranks, tensors: Sequence[GroupTensor]) -> Sequence[WeightsRead | ServerPull]:
    """Asks for several tensors, as every rank does; by rank 0 alone, like any client."""
    client, many = ps.client, list(tensors)
    real: list[Any] = [each.real for each in many]
    if client is not None and ps.is_alone:
        return client.pull_many(real)

    def pull(outs: list[Any]) -> Sequence[ClientRead]:
        assert client is not None
        return client.pull_many(real, outs)

    numbers = np.array([each.number for each in many], np.int64)
    shapes = [each.shape for each in many]
    reads: list[WeightsRead] = ask_weights(ps.links, ps.slots, shapes, numbers, None if client is None else pull)
    return reads
