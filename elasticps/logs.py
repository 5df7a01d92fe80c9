"""How the processes of elasticps log: one line of key=value pairs per event, on standard error.

    log = logging.getLogger(__name__)
    log.info("view adopted", extra={"epoch": 7, "reason": reason})

gives

    ts=2026-03-01T12:00:00.125Z level=info process=s0 logger=elasticps.server event="view adopted" epoch=7 reason="…"

or, in the format `json`, the same as one JSON object. What every line of a process says beside its event (its cluster
and name, a server's incarnation and epoch) comes before the logger's name.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, TextIO

from elasticps.errors import ConfigError

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("logfmt", "json")

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}
_NEEDS_QUOTES = frozenset(' ="\\')


class KeyValueFormatter(logging.Formatter):
    """Formats a record as key=value pairs; `context` comes in every line, `extra` of the call after it.

    Values of `context` that can be called are, for each line.
    """

    def __init__(self, context: Mapping[str, Any]) -> None:
        super().__init__()
        self.context = dict(context)

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        return " ".join(f"{key}={_value(value)}" for key, value in self.pairs(record).items())

    def pairs(self, record: logging.LogRecord) -> dict[str, Any]:
        """What the line says."""
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        pairs: dict[str, Any] = {
            "ts": when.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            **{key: value() if callable(value) else value for key, value in self.context.items()},
            "logger": record.name,
            "event": record.getMessage(),
            **{key: value for key, value in vars(record).items() if key not in _STANDARD},
        }
        if record.exc_info:
            pairs["error"] = self.formatException(record.exc_info)
        return pairs


class JsonFormatter(KeyValueFormatter):
    """Formats a record as one JSON object; what JSON has no word for becomes text."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        return json.dumps(self.pairs(record), ensure_ascii=False, separators=(",", ":"), default=str)


def _value(value: Any) -> str:
    text = value if isinstance(value, str) else str(value)
    if text.isprintable() and text and _NEEDS_QUOTES.isdisjoint(text):
        return text
    return json.dumps(text, ensure_ascii=False)  # also keeps a line break inside a value from starting a new line


def bind(**context: Any) -> None:
    """Adds to what every further line says; a value that can be called is called for each. No-op before `configure`."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, KeyValueFormatter):
            handler.formatter.context.update(context)


def configure(level: str = "info", stream: TextIO | None = None, *, log_format: str = "logfmt", **context: Any) -> None:
    """Sends every logger's lines of at least `level` to `stream` (standard error), `context` in each of them.

    Raises ConfigError for a level or a format that there is not.
    """
    if log_format not in FORMATS:
        raise ConfigError(f"{log_format!r} is no log format; there are {', '.join(FORMATS)}")
    if level not in LEVELS:
        raise ConfigError(f"{level!r} is no log level; there are {', '.join(LEVELS)}")
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter((JsonFormatter if log_format == "json" else KeyValueFormatter)(context))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for chatty in ("numba", "asyncio", "grpc", "aetcd"):
        logging.getLogger(chatty).setLevel(max(logging.WARNING, root.level))
    logging.captureWarnings(True)
