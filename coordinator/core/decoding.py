"""Reads encoded views, rosters and their differences: decompression with a limit, and JSON. Pure.

Each raises ValueError that begins with "not a" and `what` was to be read.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import MISSING, fields
from typing import Any

BODY_MAX = 32 << 20  # more than the largest view: a small message never inflates beyond it


def inflate(what: str, magic: bytes, data: bytes) -> bytes:
    """Decompresses what stands behind the magic bytes, BODY_MAX bytes at most."""
    if data[: len(magic)] != magic:
        raise ValueError(f"not a {what}: the first bytes are {bytes(data[: len(magic)])!r}, expected {magic!r}")
    inflate = zlib.decompressobj()
    try:
        body = inflate.decompress(data[len(magic) :], BODY_MAX)
    except zlib.error as error:
        raise ValueError(f"not a {what}: {error}") from error
    if not inflate.eof or inflate.unused_data:
        raise ValueError(f"not a {what}: cut short, too long, or followed by other bytes")
    return body


def read_json(what: str, data: bytes) -> Any:
    """Parses JSON."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not a {what}: {error}") from error


def read_fields(what: str, data: bytes, cls: type[Any]) -> dict[str, Any]:
    """Returns the arguments for `cls`, a dataclass, in a JSON object; `cls` checks their values."""
    found = read_json(what, data)
    if not isinstance(found, dict):
        raise ValueError(f"not a {what}: expected a JSON object")
    if unknown := sorted(set(found) - {field.name for field in fields(cls)}):
        raise ValueError(f"not a {what}: unknown fields {', '.join(unknown)}")
    if missing := [field.name for field in fields(cls) if field.default is MISSING and field.name not in found]:
        raise ValueError(f"not a {what}: fields missing: {', '.join(missing)}")
    return found


def read_rows(what: str, rows: Any, width: int) -> list[list[Any]]:
    """Returns `rows` if it is a list of lists of that width."""
    if not isinstance(rows, list) or not all(isinstance(row, list) and len(row) == width for row in rows):
        raise ValueError(f"not a {what}: expected a list of lists of {width}")
    return rows
