"""Optimizers as values, and the checks that all values of `elasticps.model.spec` share.

The learning rate is a property of the step: an optimizer's `lr` is a number, or a schedule `clock -> number` that
stays in the worker. The rate is computed here in float64 and travels in each push as `step_values`, so that replicas
compute the same bits. What counts updates, as a bias correction does, is a slot of the row: a worker's clock says
nothing of rows that were made late, or that other workers train too.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from elasticps.errors import SpecError

MAX_DIM = 65_536
Rate = float | Callable[[int], float]  # a number, or a schedule: the worker's clock -> number
FLOAT32_LIMIT = 3.4e38  # numbers at or above it would reach a float32 kernel as infinity


def number(value: object, what: str, low: float = 0.0, below: float = FLOAT32_LIMIT) -> float:
    """`value` as a float with low <= value < below, both checked."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise SpecError(f"{what} must be a number, got {value!r}")
    try:
        number = float(value)
    except OverflowError:  # a whole number: of what JSON has, or a caller
        number = math.inf
    if not low <= number < below:  # also false for NaN
        bound = f"at least {low:g}" if below == FLOAT32_LIMIT else f"at least {low:g} and below {below:g}"
        raise SpecError(f"{what} must be finite and {bound}, got {value!r}")
    return number


def integer(value: object, what: str, low: int, high: int) -> int:
    """`value` as an int with low <= value <= high, both checked."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise SpecError(f"{what} must be an integer, got {value!r}")
    if not low <= int(value) <= high:
        raise SpecError(f"{what} must be from {low} to {high}, got {value!r}")
    return int(value)


def numbers(values: object, what: str) -> tuple[float, ...]:
    """`values` as a tuple of finite floats, checked."""
    if not isinstance(values, (tuple, list)):
        raise SpecError(f"{what} must be a tuple of numbers, got {values!r}")
    return tuple(number(value, what, low=-FLOAT32_LIMIT) for value in values)


def text(value: object, what: str) -> str:
    """`value`, checked to be a string that is not empty, and that can be encoded: half a surrogate pair cannot."""
    if not isinstance(value, str) or not value:
        raise SpecError(f"{what} must be a string that is not empty, got {value!r}")
    if any("\ud800" <= letter <= "\udfff" for letter in value):
        raise SpecError(f"{what} must be a text, without half a surrogate pair, got {value!r}")
    return value


class Checked:
    """Frozen dataclasses whose fields are checked and normalised once, when made."""

    def _set(self, **values: object) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)


@dataclass(frozen=True)
class Schedule:
    """A learning rate that follows the worker's clock, its number of steps, not the updates of a row or tensor.

    All schedules are equal: the function is no part of a spec.
    """

    function: Callable[[int], float] | None = field(default=None, compare=False)

    def __call__(self, clock: int) -> float:
        """The rate at `clock`. Raises SpecError for a spec that came as JSON, which carries no function."""
        if self.function is None:
            raise SpecError("this optimizer's lr is a schedule that lives in the worker; push with an explicit lr=")
        return self.function(clock)

    def __repr__(self) -> str:
        return "<schedule>"


class ServerOptimizer(Checked, ABC):
    """How a gradient changes a row of `dim` weights and its float32 slots."""

    kind: ClassVar[str]
    step_floats: ClassVar[int] = 1  # length of step_values
    shows_training: ClassVar[bool] = False  # a float32 row with its initial weights has the slots of a new row
    lr: Rate

    @abstractmethod
    def slot_shapes(self, dim: int) -> dict[str, int]:
        """What a row of `dim` weights has beside them, in this order: float32 by name, as torch names it if it does."""

    def slot_floats(self, dim: int) -> int:
        """Number of float32 slots that a row of `dim` weights needs."""
        return sum(self.slot_shapes(dim).values())

    def same_rows(self, other: ServerOptimizer) -> bool:
        """Whether rows of the one are rows of the other. The rate is no part of that: it comes with each step."""
        return type(self) is type(other) and self.to_dict() | {"lr": 0} == other.to_dict() | {"lr": 0}

    def constants(self) -> tuple[float, ...]:
        """What the kernel needs that never changes, in the kernel's order."""
        return ()

    @property
    def slot_fill(self) -> float:
        """Value of every slot of a new row."""
        return 0.0

    def step_values(self, clock: int, lr: float | None = None) -> NDArray[np.float32]:
        """What the kernel needs for the step at `clock` (1 is a worker's first): float32 [step_floats].

        `lr` overrides the optimizer's own for this step.
        """
        return np.array([self.rate(clock, lr)], dtype=np.float32)

    def rate(self, clock: int, lr: float | None = None) -> float:
        """The learning rate of the step at `clock`: `lr` if given, else the optimizer's number or schedule."""
        if lr is not None:
            return number(lr, "lr")
        return self.lr if isinstance(self.lr, float) else number(self.lr(clock), f"lr at clock {clock}")

    def _check_rate(self) -> None:
        if not isinstance(self.lr, Schedule):
            self._set(lr=Schedule(self.lr) if callable(self.lr) else number(self.lr, f"{type(self).__name__}.lr"))

    def to_dict(self) -> dict[str, object]:
        """JSON form; a schedule is null."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]
        return {"kind": self.kind} | {k: None if isinstance(v, Schedule) else v for k, v in values.items()}


@dataclass(frozen=True)
class SGD(ServerOptimizer):
    """`torch.optim.SGD` without dampening. One slot per weight if momentum > 0, else none."""

    kind: ClassVar[str] = "sgd"
    shows_training: ClassVar[bool] = True
    lr: Rate
    momentum: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        self._check_rate()
        self._set(
            momentum=number(self.momentum, "SGD.momentum", below=1.0),
            weight_decay=number(self.weight_decay, "SGD.weight_decay"),
            nesterov=bool(self.nesterov),
        )
        if self.nesterov and not self.momentum:
            raise SpecError("SGD.nesterov needs a momentum above 0")

    def slot_shapes(self, dim: int) -> dict[str, int]:
        return {"momentum_buffer": dim} if self.momentum else {}

    def constants(self) -> tuple[float, ...]:
        return (self.momentum, self.weight_decay, float(self.nesterov))


@dataclass(frozen=True)
class Adagrad(ServerOptimizer):
    """`torch.optim.Adagrad` (Duchi, Hazan, Singer 2011). One slot per weight: the sum of squares."""

    kind: ClassVar[str] = "adagrad"
    shows_training: ClassVar[bool] = True
    lr: Rate
    eps: float = 1e-10
    initial_accumulator: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        self._check_rate()
        self._set(
            eps=number(self.eps, "Adagrad.eps"),
            initial_accumulator=number(self.initial_accumulator, "Adagrad.initial_accumulator"),
            weight_decay=number(self.weight_decay, "Adagrad.weight_decay"),
        )

    def slot_shapes(self, dim: int) -> dict[str, int]:
        return {"sum": dim}

    def constants(self) -> tuple[float, ...]:
        return (self.eps, self.weight_decay)

    @property
    def slot_fill(self) -> float:
        return self.initial_accumulator


@dataclass(frozen=True)
class RowAdagrad(ServerOptimizer):
    """Adagrad with one accumulator per row, of the mean square over the row (as in FBGEMM and DLRM)."""

    kind: ClassVar[str] = "row_adagrad"
    shows_training: ClassVar[bool] = True
    lr: Rate
    eps: float = 1e-10

    def __post_init__(self) -> None:
        self._check_rate()
        self._set(eps=number(self.eps, "RowAdagrad.eps"))

    def slot_shapes(self, dim: int) -> dict[str, int]:
        return {"sum": 1}

    def constants(self) -> tuple[float, ...]:
        return (self.eps,)


@dataclass(frozen=True)
class Adam(ServerOptimizer):
    """`torch.optim.Adam` (Kingma, Ba 2015). Slots: the row's number of updates, then per weight two moments.

    Bias corrections count the updates of the row, whoever made them: a dense tensor is corrected as by torch, and a row
    that is touched for the first time at step 1,000 moves as far as one that is touched at step 1. (`SparseAdam` counts
    the table's steps: there such a row moves 3.2 times as far.)
    """

    kind: ClassVar[str] = "adam"
    lr: Rate = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        self._check_rate()
        name = type(self).__name__
        betas = numbers(self.betas, f"{name}.betas")
        if len(betas) != 2 or max(betas) >= 1.0 or min(betas) < 0.0:
            raise SpecError(f"{name}.betas must be two numbers of at least 0 and below 1, got {self.betas!r}")
        self._set(
            betas=betas,
            eps=number(self.eps, f"{name}.eps"),
            weight_decay=number(self.weight_decay, f"{name}.weight_decay"),
        )

    def slot_shapes(self, dim: int) -> dict[str, int]:
        return {"step": 1, "exp_avg": dim, "exp_avg_sq": dim}

    def constants(self) -> tuple[float, ...]:
        """Both betas with their complements, eps, weight decay; then what float32 loses of each beta."""
        (b1, b2), low = self.betas, [beta - float(np.float32(beta)) for beta in self.betas]
        return (b1, 1.0 - b1, b2, 1.0 - b2, self.eps, self.weight_decay, *low)


@dataclass(frozen=True)
class AdamW(Adam):
    """`torch.optim.AdamW` (Loshchilov, Hutter 2019): Adam with decoupled weight decay."""

    kind: ClassVar[str] = "adamw"
    weight_decay: float = 1e-2


@dataclass(frozen=True)
class FTRL(ServerOptimizer):
    """FTRL-Proximal (McMahan et al., KDD 2013, Algorithm 1); `lr` is the paper's alpha. Slots: z, then n."""

    kind: ClassVar[str] = "ftrl"
    lr: Rate
    beta: float = 1.0
    l1: float = 0.0
    l2: float = 0.0

    def __post_init__(self) -> None:
        self._check_rate()
        if self.lr == 0.0:
            raise SpecError("FTRL.lr must be above 0: the update divides by it")
        self._set(beta=number(self.beta, "FTRL.beta"), l1=number(self.l1, "FTRL.l1"), l2=number(self.l2, "FTRL.l2"))

    def slot_shapes(self, dim: int) -> dict[str, int]:
        return {"z": dim, "n": dim}

    def constants(self) -> tuple[float, ...]:
        return (self.beta, self.l1, self.l2)

    def step_values(self, clock: int, lr: float | None = None) -> NDArray[np.float32]:
        """[1 / lr]."""
        rate = self.rate(clock, lr)
        if rate == 0.0:
            raise SpecError("FTRL cannot step with lr = 0: the update divides by it")
        return np.array([1.0 / rate], dtype=np.float32)


class _Unscaled(ServerOptimizer):
    """Operations that know no learning rate; one given with a push is ignored."""

    step_floats: ClassVar[int] = 0

    def slot_shapes(self, dim: int) -> dict[str, int]:
        return {}

    def step_values(self, clock: int, lr: float | None = None) -> NDArray[np.float32]:
        return np.empty(0, dtype=np.float32)


@dataclass(frozen=True)
class Assign(_Unscaled):
    """A push replaces the row."""

    kind: ClassVar[str] = "assign"


@dataclass(frozen=True)
class Accumulate(_Unscaled):
    """A push is added to the row."""

    kind: ClassVar[str] = "accumulate"


@dataclass(frozen=True)
class Custom(ServerOptimizer):
    """An optimizer that the servers know by `name`: see `elasticps.store.register_optimizer`.

    A row has `slots` float32 per weight and then `row_slots` more. step_values are [lr, clock].
    """

    kind: ClassVar[str] = "custom"
    step_floats: ClassVar[int] = 2
    name: str
    lr: Rate = 0.0
    constant_values: tuple[float, ...] = ()
    slots: int = 0
    row_slots: int = 0

    def __post_init__(self) -> None:
        self._check_rate()
        text(self.name, "Custom.name")
        self._set(
            constant_values=numbers(self.constant_values, "Custom.constant_values"),
            slots=integer(self.slots, "Custom.slots", 0, 16),
            row_slots=integer(self.row_slots, "Custom.row_slots", 0, MAX_DIM),
        )

    def slot_shapes(self, dim: int) -> dict[str, int]:
        shapes = {f"slot{i}": dim for i in range(self.slots)}
        return shapes | {"row_slots": self.row_slots} if self.row_slots else shapes

    def constants(self) -> tuple[float, ...]:
        return self.constant_values

    def step_values(self, clock: int, lr: float | None = None) -> NDArray[np.float32]:
        """[lr, clock]."""
        return np.array([self.rate(clock, lr), clock], dtype=np.float32)
