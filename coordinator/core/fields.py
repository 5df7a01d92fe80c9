"""Loggers whose lines have fields.

    log = fields.logger(__name__)
    log.info("view adopted", epoch=7, reason=reason)

In a process that configures nothing, such as a training script, this makes a line of the standard library's logging,
"view adopted epoch=7 reason=…"; the record has the fields as well, for any other format.
"""

from __future__ import annotations

import json
import logging
import math
from numbers import Integral
from typing import Any

import structlog
from structlog.typing import EventDict, WrappedLogger

FIELDS = "fields"  # the attribute of a record that holds them
VALUE_MAX = 8192  # characters: what peers say may be long

_NEEDS_QUOTES = frozenset(' ="\\')
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def logger(name: str) -> structlog.stdlib.BoundLogger:
    """Returns the logger of that name."""
    made: structlog.stdlib.BoundLogger = structlog.wrap_logger(
        logging.getLogger(name),
        processors=[structlog.stdlib.filter_by_level, _to_record],
        wrapper_class=structlog.stdlib.BoundLogger,
        context_class=dict,
    )
    return made


def _to_record(_: WrappedLogger, method: str, event: EventDict) -> tuple[tuple[str], dict[str, Any]]:
    reserved = {key: event.pop(key) for key in ("exc_info", "stack_info") if key in event}
    what = str(event.pop("event"))
    pairs = "".join(f" {pair(key, value)}" for key, value in event.items())
    return (f"{what}{pairs}",), {"extra": {FIELDS: {"event": what, **event}}, **reserved}


def pair(key: str, value: Any) -> str:
    """Formats "key=value", with quotes around a value that has blanks, quotes or invisible characters."""
    shown = text(value)
    if shown and shown.isprintable() and _NEEDS_QUOTES.isdisjoint(shown):
        return f"{safe(key)}={shown}"
    return f"{safe(key)}={safe(json.dumps(shown, ensure_ascii=False))}"


def text(value: Any) -> str:
    """Returns a value as text, cut if it is too long for a line."""
    found = value if isinstance(value, str) else str(value)
    return found if len(found) <= VALUE_MAX else f"{found[:VALUE_MAX]}… ({len(found)} characters)"


def plain(value: Any) -> bool | int | float | str | None:
    """Returns a value for JSON: numbers as numbers, values of other types as text."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Integral):  # NumPy's too
        return int(value)
    return float(value) if isinstance(value, float) and math.isfinite(value) else text(value)


def safe(line: str) -> str:
    """Escapes every invisible character of a text, such as control characters, marks that turn the direction of text,
    and line separators: so no text of a peer can forge a line or move a cursor."""
    return line if line.isprintable() else "".join(c if c.isprintable() else _escape(c) for c in line)


def _escape(c: str) -> str:
    if c in _SHORT:
        return _SHORT[c]
    units = c.encode("utf-16-be", "surrogatepass")  # as in JSON, where two stand for what is beyond U+FFFF
    return "".join(f"\\u{units[i] << 8 | units[i + 1]:04x}" for i in range(0, len(units), 2))
