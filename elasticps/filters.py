"""Filters as values: what happens to rows before they are sent, and is undone where they arrive.

A table's spec has a list of them for pushes and one for pulls; they travel as names and numbers. Each leaves floats of
a row for the next one, and adds 4-byte words of its own. So a row has the same number of words on the wire, whatever is
in it, and whoever only hands rows on need not know what they mean. `elasticps.store.codec` computes them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import ClassVar

from elasticps.errors import SpecError
from elasticps.optimizers import Checked

MAX_FILTERS = 4
GROUP = 256  # floats that share a scale


class Filter(Checked, ABC):
    """One step of a row's way onto the wire."""

    kind: ClassVar[str]
    feedback: bool
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
class BFloat16(Precision):
    """The upper half of a float32, rounded to nearest even: its range, 8 bits of precision."""

    kind: ClassVar[str] = "bfloat16"
    feedback: bool = False

    def words(self, dim: int) -> int:
        return -(-dim // 2)


@dataclass(frozen=True)
class Float16(Precision):
    """IEEE's half precision, rounded to nearest even: 11 bits, from 6e-8 to 65504, at which what is larger stops."""

    kind: ClassVar[str] = "float16"
    feedback: bool = False

    def words(self, dim: int) -> int:
        return -(-dim // 2)


@dataclass(frozen=True)
class Int8(Precision):
    """Whole numbers from -127 to 127 and a scale, the row's largest magnitude by 127; of long rows, as tensors have
    them, one for each 256 floats."""

    kind: ClassVar[str] = "int8"
    feedback: bool = True

    def words(self, dim: int) -> int:
        return -(-dim // GROUP) + -(-dim // 4)


KINDS: dict[str, type[Filter]] = {cls.kind: cls for cls in (BFloat16, Float16, Int8)}


def checked(filters: object, where: str, dim: int) -> tuple[Filter, ...]:
    """A list of filters for rows of `dim` floats, as a tuple. SpecError if they cannot follow each other."""
    if isinstance(filters, Filter):
        filters = (filters,)
    if not isinstance(filters, Iterable) or isinstance(filters, str | bytes | Mapping):
        raise SpecError(f"{where} must be a list of filters, got {filters!r}")
    found: list[Filter] = []
    for each in filters:
        if not isinstance(each, Filter):
            raise SpecError(f"{where} must be a list of filters, such as elasticps.BFloat16(), got {each!r}")
        if len(found) == MAX_FILTERS:
            raise SpecError(f"{where} has at most {MAX_FILTERS} filters")
        if found and not dim:
            raise SpecError(f"{where}: {found[-1]} leaves nothing for {each}, and has to come last")
        dim = each.left(dim)
        found.append(each)
    return tuple(found)
