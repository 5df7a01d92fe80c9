"""Filters as values: what happens to rows before they are sent, and is undone where they arrive.

A table's spec has a list of them for pushes and one for pulls; they travel as names and numbers. Each leaves floats of
a row for the next one, and adds 4-byte words of its own. So a row has the same number of words on the wire, whatever is
in it, and whoever only hands rows on need not know what they mean. `elasticps.store.codec` computes them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import ClassVar

from elasticps.errors import SpecError
from elasticps.model.optimizers import FTRL, Checked, Custom, ServerOptimizer, integer, number, numbers, text

MAX_FILTERS = 6
GROUP = 256  # floats that share a scale


class Filter(Checked, ABC):
    """One step of a row's way onto the wire."""

    kind: ClassVar[str]
    for_pulls: ClassVar[bool] = True
    """Whether rows that are read may go through it, too."""
    feedback: bool = False
    """Of pushes: what it drops of a gradient is kept at the worker, and added to the next one of the same key."""

    @abstractmethod
    def left(self, dim: int) -> int:
        """How many floats it leaves of a row of `dim` for the next filter; 0: nothing, it is the last."""

    @abstractmethod
    def words(self, dim: int) -> int:
        """How many words of its own it makes of a row of `dim` floats."""

    def to_dict(self) -> dict[str, object]:
        """JSON form."""
        return {"kind": self.kind} | {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]

    def __post_init__(self) -> None:
        if not isinstance(self.feedback, bool):
            raise SpecError(f"{type(self).__name__}.feedback must be True or False, got {self.feedback!r}")


class Precision(Filter):
    """Writes a row's floats shorter, and so comes last."""

    def left(self, dim: int) -> int:
        return 0


@dataclass(frozen=True)
class Half(Precision):
    """Two bytes for each float."""

    feedback: bool = False

    def words(self, dim: int) -> int:
        return -(-dim // 2)


@dataclass(frozen=True)
class BFloat16(Half):
    """The upper half of a float32, rounded to nearest even: its range, 8 bits of precision."""

    kind: ClassVar[str] = "bfloat16"


@dataclass(frozen=True)
class Float16(Half):
    """IEEE's half precision, rounded to nearest even: 11 bits, from 6e-8 to 65504, at which what is larger stops."""

    kind: ClassVar[str] = "float16"


@dataclass(frozen=True)
class Int8(Precision):
    """Whole numbers from -127 to 127 and a scale, the row's largest magnitude by 127; of long rows, as tensors have
    them, one for each 256 floats."""

    kind: ClassVar[str] = "int8"
    feedback: bool = True

    def words(self, dim: int) -> int:
        return -(-dim // GROUP) + -(-dim // 4)


@dataclass(frozen=True)
class CustomFilter(Precision):
    """A filter that servers and workers know by `name`: see `elasticps.store.register_filter`.

    It makes `row_words` words of a row, and `bits` more for each float.
    """

    kind: ClassVar[str] = "custom"
    name: str
    bits: int = 0
    row_words: int = 0
    constant_values: tuple[float, ...] = ()
    feedback: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        text(self.name, "CustomFilter.name")
        self._set(
            bits=integer(self.bits, "CustomFilter.bits", 0, 64),
            row_words=integer(self.row_words, "CustomFilter.row_words", 0, 1 << 16),
            constant_values=numbers(self.constant_values, "CustomFilter.constant_values"),
        )
        if not self.bits and not self.row_words:
            raise SpecError("CustomFilter has to make something of a row: bits or row_words")

    def words(self, dim: int) -> int:
        return self.row_words - (-self.bits * dim // 32)


class SparseFilter(Filter):
    """Sends some floats of a gradient only; the others arrive as zeros."""

    for_pulls = False


@dataclass(frozen=True)
class ShareFilter(SparseFilter):
    """As many floats of each row, or of each block of a tensor (at most 16,384 floats): `fraction` of them, at least
    one."""

    fraction: float
    feedback: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        name = type(self).__name__
        self._set(fraction=number(self.fraction, f"{name}.fraction"))
        if not 0 < self.fraction <= 1:
            raise SpecError(f"{name}.fraction must be above 0 and at most 1, got {self.fraction!r}")

    def left(self, dim: int) -> int:
        return max(1, math.ceil(self.fraction * dim - 1e-6))


@dataclass(frozen=True)
class TopK(ShareFilter):
    """The floats of the largest magnitude."""

    kind: ClassVar[str] = "top_k"

    def words(self, dim: int) -> int:
        return -(-self.left(dim) // 2)  # where they stand, 2 bytes each


@dataclass(frozen=True)
class RandomK(ShareFilter):
    """Floats drawn from the row's bits and `seed`, one of each stretch of 1 / fraction. Without feedback what is sent
    is so many times larger, that the sum is right on average."""

    kind: ClassVar[str] = "random_k"
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set(seed=integer(self.seed, "RandomK.seed", 0, 2**63 - 1))

    def words(self, dim: int) -> int:
        return 1  # from which both sides know where they stand


@dataclass(frozen=True)
class Threshold(SparseFilter):
    """Only floats of at least this magnitude. A row that has none is not sent at all, and not updated; in one that is
    sent the others take their bytes, unless a filter behind this one, such as TopK, leaves them out."""

    kind: ClassVar[str] = "threshold"
    value: float
    feedback: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set(value=number(self.value, "Threshold.value"))

    def left(self, dim: int) -> int:
        return dim

    def words(self, dim: int) -> int:
        return 0


@dataclass(frozen=True)
class KKT(SparseFilter):
    """Of models with L1 regularisation, most of whose weights are zero: a float of a gradient is left out if its weight
    was zero when this worker pulled it last and the float is no larger than `l1 - slack`, for it would leave the weight
    at zero (Li et al., OSDI 2014, section 5.1). A row of which nothing is left is not sent, and not updated. For FTRL,
    whose `l1` it takes unless given one, and custom optimizers with one. It comes first; rows that this worker has not
    pulled since it pushed them are sent whole.

    What is left out may be wrong. With feedback, which adds it to the weight's next gradient, it is late: as long as
    a weight is zero, FTRL's z lacks up to `l1 - slack` of each worker (under BSP, which averages, of all together), so
    the weight may stay at zero when z without the filter would be beyond l1 by as much, or leave zero when it would be
    within by as much; then all that was kept is sent. FTRL's n gets the square of what is sent at once, not the sum of
    the squares, so a weight that leaves zero has another rate. Without feedback it is lost: right for gradients over
    all of the data and a proximal optimizer, where with slack 0 nothing changes; with minibatches a weight stays at
    zero until one gradient alone is above the bound. The larger the slack, the less is left out; with `l1`, nothing.
    """

    kind: ClassVar[str] = "kkt"
    slack: float = 0.0
    l1: float | None = None
    feedback: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set(slack=number(self.slack, "KKT.slack"))
        if self.l1 is not None:
            self._set(l1=number(self.l1, "KKT.l1"))
            self._below(self.l1)

    def _below(self, l1: float) -> float:
        if self.slack > l1:
            raise SpecError(f"KKT.slack must be at most l1, {l1}, got {self.slack!r}")
        return l1 - self.slack

    def bound(self, optimizer: ServerOptimizer) -> float:
        """Up to which magnitude gradients are left out. SpecError if the optimizer has no l1."""
        if not isinstance(optimizer, FTRL | Custom):
            raise SpecError(f"KKT is for FTRL, and custom optimizers with L1, not for {type(optimizer).__name__}")
        l1 = self.l1 if self.l1 is not None else getattr(optimizer, "l1", None)
        if l1 is None:
            raise SpecError("KKT for a custom optimizer needs l1=…")
        return self._below(l1)

    def left(self, dim: int) -> int:
        return dim

    def words(self, dim: int) -> int:
        return 0


class Around(Filter):
    """Leaves rows alone, and changes how they are sent."""

    def left(self, dim: int) -> int:
        return dim

    def words(self, dim: int) -> int:
        return 0


class Keys(Around):
    """Makes a table's keys shorter; not those of tensors, which are few."""


@dataclass(frozen=True)
class KeysOnce(Keys):
    """A list of keys that a server has had from this worker, and has kept, is not sent to it again."""

    kind: ClassVar[str] = "keys_once"


@dataclass(frozen=True)
class KeyDeltas(Keys):
    """Keys travel in order, as differences of one to eight bytes, where that is shorter."""

    kind: ClassVar[str] = "key_deltas"


@dataclass(frozen=True)
class Zstd(Around):
    """Pushes that hold some of this table are compressed, as long as that saves a tenth: it pays where many floats are
    zero, as a `Threshold` leaves them, and on slow links."""

    kind: ClassVar[str] = "zstd"
    for_pulls: ClassVar[bool] = False


KINDS: dict[str, type[Filter]] = {
    cls.kind: cls
    for cls in (BFloat16, Float16, Int8, TopK, RandomK, Threshold, KKT, KeysOnce, KeyDeltas, Zstd, CustomFilter)
}


def checked(filters: object, where: str, dim: int, pulls: bool) -> tuple[Filter, ...]:
    """A list of filters for rows of `dim` floats, as a tuple; pulls: for rows that are read. SpecError if they cannot
    follow each other."""
    if isinstance(filters, Filter):
        filters = (filters,)
    if not isinstance(filters, Iterable) or isinstance(filters, str | bytes | Mapping):
        raise SpecError(f"{where} must be a list of filters, got {filters!r}")
    found: list[Filter] = []
    for each in filters:
        if not isinstance(each, Filter):
            raise SpecError(f"{where} must be a list of filters, such as elasticps.BFloat16(), got {each!r}")
        if pulls and not each.for_pulls:
            raise SpecError(f"{where}: {each} is for pushes only")
        if isinstance(each, KKT) and not all(isinstance(one, Around) for one in found):
            raise SpecError(f"{where}: {each} looks at the gradient's own floats, and has to come first")
        if len(found) == MAX_FILTERS:
            raise SpecError(f"{where} has at most {MAX_FILTERS} filters")
        if found and not dim and not isinstance(each, Around):
            raise SpecError(f"{where}: {found[-1]} leaves nothing for {each}, and has to come last")
        dim = each.left(dim)
        found.append(each)
    return tuple(found)
