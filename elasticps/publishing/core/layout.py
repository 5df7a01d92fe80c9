"""Names and bytes of published rows, as docs/reference/published.md describes them. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from elasticps.errors import ConfigError

if TYPE_CHECKING:
    from elasticps.model.spec import TableSpec
    from elasticps.readers.values import AsOf

VERSION = 1
DTYPES = ("float32", "float16", "bfloat16")
META = "meta"  # behind a table's name, where its rows have their keys
MAX_PREFIX = 256
MAX_META = 1 << 20  # characters
_ROW_KEY = re.compile(rb"(.+):(-?[0-9]{1,20})\Z", re.DOTALL)
_GLOB = re.compile(r"([\\*?\[\]^-])")


def check_dtype(dtype: str) -> None:
    """Raises ConfigError for a type that rows are not published in."""
    if dtype not in DTYPES:
        raise ConfigError(f"rows are published as {', '.join(DTYPES)}, got {dtype!r}")


def check_prefix(prefix: str) -> None:
    """Raises ConfigError for a text that keys cannot begin with."""
    if len(prefix) > MAX_PREFIX or not prefix.isprintable():
        raise ConfigError(f"a prefix of keys has at most {MAX_PREFIX} characters that can be printed, got {prefix!r}")


def words(rows: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    """Rows in the type that they are published in, little-endian; bfloat16 as its 16 bits, "<u2", rounded to even."""
    if dtype == "float32":
        return rows.astype("<f4", copy=False)
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return rows.astype("<f2")
    bits = np.ascontiguousarray(rows, "<f4").view("<u4")
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(rows), (bits >> 16) | 0x40, rounded).astype("<u2")


def floats(published: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    """The inverse of `words`."""
    if dtype == "bfloat16":
        return (published.astype("<u4") << 16).view("<f4").astype(np.float32, copy=False)
    return published.astype(np.float32)


def row_keys(prefix: str, table: str, keys: NDArray[np.int64]) -> list[bytes]:
    """Where the rows of these keys lie."""
    start = f"{prefix}{table}:".encode()
    return [start + b"%d" % key for key in keys.tolist()]


def meta_key(prefix: str, table: str) -> bytes:
    """Where a table's description lies."""
    return f"{prefix}{table}:{META}".encode()


def pattern(prefix: str) -> str:
    """Matches all keys with this prefix, as SCAN takes it."""
    return _GLOB.sub(r"\\\1", prefix) + "*"


class FoundKeys(NamedTuple):
    """Keys of a store by table. described: tables whose description is among them."""

    rows: Mapping[str, NDArray[np.int64]]
    described: frozenset[str]


def sort_keys(prefix: str, names: Iterable[bytes]) -> FoundKeys:
    """Sorts what lies behind a prefix by table. Names of any other form are left out: they are somebody else's."""
    rows: dict[str, list[int]] = {}
    described = set()
    start = prefix.encode()
    for name in names:
        if not name.startswith(start):
            continue
        inner = name[len(start) :]
        if found := _ROW_KEY.match(inner):
            key, table = int(found[2]), _text(found[1])
            if table and -(2**63) <= key < 2**63 and b"%d" % key == found[2]:
                rows.setdefault(table, []).append(key)
        elif inner.endswith(b":" + META.encode()) and (table := _text(inner[: -len(META) - 1])):
            described.add(table)
    return FoundKeys({table: np.array(keys, np.int64) for table, keys in rows.items()}, frozenset(described))


def _text(name: bytes) -> str:
    try:
        return name.decode()
    except UnicodeDecodeError:
        return ""


def moment(as_of: AsOf) -> dict[str, Any]:
    """How new something is, for JSON."""
    steps = {str(worker): step for worker, step in sorted(as_of.steps.items())}
    return {"time_s": as_of.time_s, "epoch": as_of.epoch, "steps": steps}


def description(spec: TableSpec, dtype: str) -> dict[str, Any]:
    """What readers have to know of a table's rows. shape: of a tensor, whose rows are its blocks."""
    shape = None if spec.shape is None else list(spec.shape)
    return {"dtype": dtype, "dim": spec.dim, "shape": shape}


def parse_description(data: bytes) -> dict[str, Any]:
    """A table's description, {} if it is none: anybody may have written there."""
    try:
        found = json.loads(data) if len(data) <= MAX_META else None
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
