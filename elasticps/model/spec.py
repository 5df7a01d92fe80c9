"""What tables, optimizers, initialisers and consistency models are, as values.

Nothing here touches memory, sockets or time. A `TableSpec` travels as JSON to the registry and to every server; two
workers that open a table under one name must bring equal specs.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any, ClassVar

from elasticps.errors import SpecError
from elasticps.model import filters, policies
from elasticps.model.filters import (
    KKT,
    BFloat16,
    CustomFilter,
    Filter,
    Float16,
    Int8,
    KeyDeltas,
    KeysOnce,
    RandomK,
    Threshold,
    TopK,
    Zstd,
)
from elasticps.model.optimizers import (
    FLOAT32_LIMIT,
    FTRL,
    MAX_DIM,
    SGD,
    Accumulate,
    Adagrad,
    Adam,
    AdamW,
    Assign,
    Checked,
    Custom,
    RowAdagrad,
    Schedule,
    ServerOptimizer,
    integer,
    number,
    text,
)
from elasticps.model.policies import Admission, Eviction

__all__ = [
    "ASP",
    "BSP",
    "DTYPES",
    "FTRL",
    "KKT",
    "MAX_BLOCK",
    "MAX_DIM",
    "SGD",
    "SSP",
    "Accumulate",
    "Adagrad",
    "Adam",
    "AdamW",
    "Assign",
    "BFloat16",
    "Consistency",
    "Constant",
    "Custom",
    "CustomFilter",
    "Filter",
    "Float16",
    "Init",
    "Int8",
    "KeyDeltas",
    "KeysOnce",
    "Normal",
    "RandomK",
    "RowAdagrad",
    "Schedule",
    "ServerOptimizer",
    "TableSpec",
    "Threshold",
    "TopK",
    "Uniform",
    "Zeros",
    "Zstd",
    "dense_block",
]

MAX_BLOCK = 16_384
MAX_NAME = 200
MAX_FLOATS = 1 << 40  # of a dense tensor
MAX_JSON = 1 << 16  # characters of a spec, of which each takes two at most in a frame of a server to another
REMEMBERED_CHARS = 4096  # of a spec that is not read again
DTYPES = ("float32", "float16", "bfloat16")
_BLOCK_ALIGN = 16  # floats: one cache line, so that blocks of a large tensor start on one


class Init(Checked, ABC):
    """Values of a row never pushed: a function of (seed, key), the same on every server and in every language.

    Tables with the same initialiser and seed start with the same rows.
    """

    kind: ClassVar[str]
    seed: int = 0

    @abstractmethod
    def parameters(self) -> tuple[float, float]:
        """The kernel's two numbers."""

    def to_dict(self) -> dict[str, object]:
        """JSON form."""
        return {"kind": self.kind} | {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]


@dataclass(frozen=True)
class Zeros(Init):
    """All zero."""

    kind: ClassVar[str] = "zeros"

    def parameters(self) -> tuple[float, float]:
        return 0.0, 0.0


@dataclass(frozen=True)
class Constant(Init):
    """All `value`."""

    kind: ClassVar[str] = "constant"
    value: float

    def __post_init__(self) -> None:
        self._set(value=number(self.value, "Constant.value", low=-FLOAT32_LIMIT))

    def parameters(self) -> tuple[float, float]:
        return self.value, 0.0


@dataclass(frozen=True)
class Uniform(Init):
    """Uniform over [low, high), also where rounding to the table's type would leave it."""

    kind: ClassVar[str] = "uniform"
    low: float
    high: float
    seed: int = 0

    def __post_init__(self) -> None:
        self._set(
            low=number(self.low, "Uniform.low", low=-FLOAT32_LIMIT),
            high=number(self.high, "Uniform.high", low=-FLOAT32_LIMIT),
            seed=integer(self.seed, "Uniform.seed", 0, 2**63 - 1),
        )
        if self.low > self.high:
            raise SpecError(f"Uniform.low must not be above high, got {self.low} and {self.high}")

    def parameters(self) -> tuple[float, float]:
        return self.low, self.high


@dataclass(frozen=True)
class Normal(Init):
    """Normal with the given mean and standard deviation."""

    kind: ClassVar[str] = "normal"
    mean: float = 0.0
    std: float = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        self._set(
            mean=number(self.mean, "Normal.mean", low=-3.4e37, below=3.4e37),
            std=number(self.std, "Normal.std", below=3.4e37),
            seed=integer(self.seed, "Normal.seed", 0, 2**63 - 1),
        )

    def parameters(self) -> tuple[float, float]:
        return self.mean, self.std


# --- consistency ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ASP:
    """Asynchronous: a pull returns what is committed, however far other workers are."""

    kind: ClassVar[str] = "asp"

    @property
    def bound(self) -> int | None:
        """Steps by which the slowest active worker may lag behind a pull's own clock; None = any."""
        return None


@dataclass(frozen=True)
class SSP(Checked):
    """Bounded delay (Li et al., OSDI 2014): at most `staleness` steps ahead of the slowest active worker."""

    kind: ClassVar[str] = "ssp"
    staleness: int

    def __post_init__(self) -> None:
        self._set(staleness=integer(self.staleness, "SSP.staleness", 0, 2**31 - 1))

    @property
    def bound(self) -> int | None:
        """See `ASP.bound`."""
        return self.staleness


@dataclass(frozen=True)
class BSP:
    """Synchronous: all workers' gradients of a round are averaged, in the order of their ids, and applied as one step.

    Bitwise what one process gives that averages the same gradients. A worker that joins is counted from the next round
    on; one that leaves or dies is no longer waited for.
    """

    kind: ClassVar[str] = "bsp"

    @property
    def bound(self) -> int | None:
        """See `ASP.bound`: nothing waits at a pull, because the round is closed before it."""
        return None


Consistency = ASP | SSP | BSP

# --- tables -----------------------------------------------------------------------------------------------------------

_OPTIMIZERS: dict[str, type[ServerOptimizer]] = {
    cls.kind: cls for cls in (SGD, Adagrad, RowAdagrad, Adam, AdamW, FTRL, Assign, Accumulate, Custom)
}
_INITS: dict[str, type[Init]] = {cls.kind: cls for cls in (Zeros, Constant, Uniform, Normal)}


def shows(name: str) -> bool:
    """Names become parts of keys and sentences: half a surrogate pair, say, can be written nowhere."""
    return name.isprintable() and not any(letter.isspace() for letter in name)


def dense_block(size: int) -> int:
    """Block length in floats for a dense tensor of `size` floats: one block up to 16384, else near-equal blocks."""
    if size <= MAX_BLOCK:
        return max(size, 1)
    blocks = -(-size // MAX_BLOCK)
    return -(-size // (blocks * _BLOCK_ALIGN)) * _BLOCK_ALIGN


@dataclass(frozen=True)
class TableSpec(Checked):
    """A table: int64 key -> `dim` weights and the optimizer's slots.

    With a `shape` it is a dense tensor, C-ordered and cut into rows of `dim` floats whose keys are 0..blocks-1, the
    last padded with zeros. Slots are float32 whatever the weights' dtype. finite: gradients are refused that hold NaN
    or infinity. push, pull: how gradients, and rows that are read, are shortened on their way (docs/guides/filters.md).
    admission, eviction: which keys of a sparse table get a row, and which rows are forgotten. usage: what rows keep of
    their use, "" for nothing, "count" for last use and count, "score" for a score too; at least what the policies need.
    A row's usage is part of its layout, and never changes; policies of a living table may (`with_policies`).
    """

    name: str
    dim: int
    optimizer: ServerOptimizer
    init: Init = field(default_factory=Zeros)
    dtype: str = "float32"
    shape: tuple[int, ...] | None = None
    finite: bool = False
    push: Sequence[Filter] = ()
    pull: Sequence[Filter] = ()
    admission: Admission | None = None
    eviction: Sequence[Eviction] = ()
    usage: str = policies.NO_USAGE

    def __post_init__(self) -> None:
        if len(text(self.name, "a table name")) > MAX_NAME or "/" in self.name or not shows(self.name):
            raise SpecError(
                f"a table name has 1 to {MAX_NAME} characters that can be printed, none of them a blank or '/', got "
                f"{self.name!r:.{2 * MAX_NAME}}"
            )
        where = f"table {self.name!r}: "
        if not isinstance(self.optimizer, ServerOptimizer):
            raise SpecError(
                f"{where}optimizer must be one of elasticps' optimizers, such as SGD(lr=0.1), got "
                f"{_shown(self.optimizer)}"
            )
        if not isinstance(self.init, Init):
            raise SpecError(f"{where}init must be one of elasticps' initialisers, got {self.init!r}")
        if self.dtype not in DTYPES:
            raise SpecError(f"{where}dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if not isinstance(self.finite, bool):
            raise SpecError(f"{where}finite must be True or False, got {self.finite!r}")
        self._set(dim=integer(self.dim, f"{where}dim", 1, MAX_DIM))
        for which in ("push", "pull"):
            self._set(**{which: filters.checked(getattr(self, which), f"{where}{which}", self.dim, which == "pull")})
        for each in self.push:
            if isinstance(each, KKT):
                each.bound(self.optimizer)
        self._check_policies(where)
        if self.shape is not None:
            self._check_dense(where, self.shape)
        if (size := len(self.to_json())) > MAX_JSON:
            raise SpecError(f"{where}its spec has {size} characters as JSON, and may have {MAX_JSON}")

    def _check_dense(self, where: str, shape: tuple[int, ...]) -> None:
        self._set(shape=tuple(integer(n, f"{where}shape", 0, 2**40) for n in shape))
        if math.prod(self.shape or ()) > MAX_FLOATS:
            raise SpecError(f"{where}a dense tensor has at most 2^40 floats, and {list(self.shape or ())} are more")
        if self.dim > MAX_BLOCK:
            raise SpecError(f"{where}a dense tensor's blocks have at most {MAX_BLOCK} floats, got {self.dim}")
        if isinstance(self.optimizer, RowAdagrad):
            raise SpecError(f"{where}RowAdagrad keeps one accumulator per row, and a dense tensor has no rows")

    def _check_policies(self, where: str) -> None:
        admission = policies.check_admission(self.admission, where)
        self._set(admission=admission, eviction=policies.check_evictions(self.eviction, where))
        if self.usage not in tuple(policies.USAGE_FLOATS):
            raise SpecError(f'{where}usage must be "", "count" or "score", got {self.usage!r}')
        needed = policies.usage_of(self.admission, self.eviction)
        if policies.USAGE_FLOATS[needed] > policies.USAGE_FLOATS[self.usage]:
            self._set(usage=needed)
        if self.usage and self.shape is not None:
            raise SpecError(f"{where}a dense tensor's rows are its blocks: it has no admission, eviction or usage")
        if self.usage == policies.SCORES and self.push:
            raise SpecError(f"{where}a table with scores takes no push filters: scores travel beside the gradients")

    @property
    def usage_floats(self) -> int:
        """Words of 4 bytes that a row has for its usage."""
        return policies.USAGE_FLOATS[self.usage]

    @property
    def push_width(self) -> int:
        """Floats of a row that is pushed without filters: a gradient, and a score where the table keeps scores."""
        return self.dim + (self.usage == policies.SCORES)

    def with_usage_of(self, other: TableSpec) -> TableSpec:
        """This spec with the usage of `other`, if that is more: whoever opens a table need not name what rows keep."""
        return replace(self, usage=other.usage) if other.usage_floats > self.usage_floats else self

    def with_policies(self, admission: Admission | None, eviction: Sequence[Eviction]) -> TableSpec:
        """The same table under other policies. Raises SpecError if they need more than its rows keep of their usage."""
        needed = policies.usage_of(admission, policies.check_evictions(eviction, f"table {self.name!r}: "))
        if policies.USAGE_FLOATS[needed] > self.usage_floats:
            usage = f"keep usage={self.usage!r}" if self.usage else "keep no usage"
            raise SpecError(
                f"table {self.name!r}: its rows {usage}, and these policies need usage={needed!r}; a row's layout is "
                f"fixed when its table is made: make another table with usage={needed!r}, and load the rows into it"
            )
        return replace(self, admission=admission, eviction=eviction)

    @classmethod
    def dense(
        cls, name: str, shape: tuple[int, ...], optimizer: ServerOptimizer, dtype: str = "float32", *,
        finite: bool = False, push: Sequence[Filter] = (), pull: Sequence[Filter] = (),
    ) -> TableSpec:  # fmt: skip
        """Spec of a dense tensor of `shape`, its block length chosen here."""
        block = dense_block(math.prod(shape))
        return cls(name, block, optimizer, Zeros(), dtype, shape, finite, push, pull)

    @property
    def size(self) -> int:
        """Floats of a dense tensor, padding not counted. A sparse table has no size: SpecError."""
        if self.shape is None:
            raise SpecError(f"table {self.name!r} is sparse and has no size")
        return math.prod(self.shape)

    @property
    def blocks(self) -> int:
        """Rows of a dense tensor. A sparse table has none: SpecError."""
        return -(-self.size // self.dim)

    def to_json(self) -> str:
        """Canonical JSON: equal specs give equal texts."""
        values = {
            "name": self.name,
            "dim": self.dim,
            "optimizer": self.optimizer.to_dict(),
            "init": self.init.to_dict(),
            "dtype": self.dtype,
            "shape": self.shape,
            "finite": self.finite,
        }
        # Left out where there are none: a version that knows no filters or policies reads that, and refuses others.
        values |= {which: [each.to_dict() for each in found] for which, found in self._filters().items() if found}
        if self.admission is not None:
            values["admission"] = self.admission.to_dict()
        if self.eviction:
            values["eviction"] = [each.to_dict() for each in self.eviction]
        if self.usage:
            values["usage"] = self.usage
        return json.dumps(values, separators=(",", ":"))

    @classmethod
    def from_json(cls, data: str | bytes) -> TableSpec:
        """The spec that `to_json` wrote. Raises SpecError for anything else."""
        return _read(data) if len(data) > REMEMBERED_CHARS else _remembered(data)

    def _filters(self) -> dict[str, Sequence[Filter]]:
        return {"push": self.push, "pull": self.pull}

    def difference(self, other: TableSpec) -> str:
        """What differs from `other`, in words: "dim is 64, not 32". Empty when rows of the one are rows of the other:
        another learning rate is no difference, nor are other policies."""
        if other is self:
            return ""
        same = {"admission", "eviction"}
        if self.optimizer.same_rows(other.optimizer):
            same.add("optimizer")
        pairs = ((f.name, getattr(self, f.name), getattr(other, f.name)) for f in fields(self) if f.name not in same)
        return "; ".join(f"{name} is {mine!r}, not {theirs!r}" for name, mine, theirs in pairs if mine != theirs)


def _shown(value: object) -> str:
    """A value in an error; a class that should have been called by its name."""
    return f"the class {value.__name__}" if isinstance(value, type) else repr(value)


def _read(data: str | bytes) -> TableSpec:
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise SpecError(f"a table's spec is not JSON: {error}") from error
    if isinstance(values, dict):
        values = {"push": [], "pull": [], "admission": None, "eviction": [], "usage": policies.NO_USAGE} | values
    names = [f.name for f in fields(TableSpec)]
    if not isinstance(values, dict) or values.keys() != set(names):
        raise SpecError(f"a table's spec must be an object of {names}, got {values!r:.200}")
    shape = values["shape"]
    if not (shape is None or isinstance(shape, list)):
        raise SpecError(f"a table's shape must be a list or null, got {shape!r}")
    if not (isinstance(values["push"], list) and isinstance(values["pull"], list)):
        raise SpecError("a table's filters must be lists")
    admission, eviction = values["admission"], values["eviction"]
    if not isinstance(eviction, list):
        raise SpecError("a table's eviction policies must be a list")
    return TableSpec(
        name=values["name"],
        dim=values["dim"],
        optimizer=_from_dict(_OPTIMIZERS, values["optimizer"], "optimizer"),
        init=_from_dict(_INITS, values["init"], "init"),
        dtype=values["dtype"],
        shape=None if shape is None else tuple(shape),
        finite=values["finite"],
        push=tuple(_from_dict(filters.KINDS, each, "filter") for each in values["push"]),
        pull=tuple(_from_dict(filters.KINDS, each, "filter") for each in values["pull"]),
        admission=None if admission is None else read_admission(admission),
        eviction=read_evictions(eviction),
        usage=values["usage"],
    )


def read_admission(values: object) -> Admission | None:
    """The admission policy that `to_dict` wrote, or None. Raises SpecError for one that this version does not know."""
    return None if values is None else _from_dict(policies.ADMISSIONS, values, "admission policy")


def read_evictions(values: Sequence[object]) -> tuple[Eviction, ...]:
    """The eviction policies that `to_dict` wrote. Raises SpecError for one that this version does not know."""
    return tuple(_from_dict(policies.EVICTIONS, each, "eviction policy") for each in values)


# A piece of a range names all tables, and a server that is filled gets one for each range: read and compared anew each
# time (170 µs, twice), 200 tables in 256 ranges took it 17 s.
_remembered = lru_cache(maxsize=4096)(_read)


def _from_dict(known: Mapping[str, type[Any]], values: object, what: str) -> Any:
    if not isinstance(values, dict) or not isinstance(values.get("kind"), str):
        raise SpecError(f"a table's {what} must be an object with a kind, got {values!r}")
    cls = known.get(values["kind"])
    if cls is None:
        raise SpecError(f"unknown {what} kind {values['kind']!r}; this version knows {', '.join(sorted(known))}")
    arguments = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items() if k != "kind"}
    if "lr" in arguments and arguments["lr"] is None:
        arguments["lr"] = Schedule()
    try:
        return cls(**arguments)
    except TypeError as error:
        raise SpecError(f"{what} {values['kind']!r}: {error}") from error
