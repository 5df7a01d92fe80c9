"""Reads the JSON objects in the store. A client with the right to write may have written anything: an unusable object
raises ValueError, so that the caller can leave it out."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from coordinator.core import fields

log = fields.logger(__name__)

MOST = (1 << 63) - 1


def read(key: str, value: bytes, **kinds: type) -> dict[str, Any]:
    """Reads the object under a key. Raises ValueError unless it has at least these fields, of these types: whole
    numbers from 0 to `MOST`, finite floats; `object` is anything."""
    try:
        record = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{key} is no JSON: {error}") from None
    if not isinstance(record, dict):
        raise ValueError(f"{key} is no JSON object")
    check(key, record, **kinds)
    return record


def check(key: str, record: dict[str, Any], **kinds: type) -> None:
    """Raises ValueError unless an object has these fields, as for `read`."""
    for name, kind in kinds.items():
        if name not in record or not _fits(record[name], kind):
            raise ValueError(f"{key} has no {name} that is a {kind.__name__}")


@contextmanager
def noted(key: str, errors: dict[str, str]) -> Iterator[None]:
    """Notes the text of a ValueError within, of an entry that makes no sense, under its key."""
    try:
        yield
    except ValueError as error:
        errors[key] = str(error)


@contextmanager
def left_out() -> Iterator[None]:
    """Turns a ValueError within, of an entry that makes no sense, into a warning."""
    try:
        yield
    except ValueError as error:
        log.warning("an entry is left out", why=error)


def _fits(value: object, kind: type) -> bool:
    if kind is int:
        return type(value) is int and 0 <= value <= MOST
    if kind is float:
        return (type(value) is int and abs(value) <= MOST) or (type(value) is float and math.isfinite(value))
    return isinstance(value, kind)
