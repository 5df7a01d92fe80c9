"""How the processes of elasticps log: one line of key=value pairs per event, on standard error.

    log = logging.getLogger(__name__)
    log.info("view adopted", extra={"epoch": 7, "reason": reason})

gives

    ts=2026-03-01T12:00:00.125Z level=info process=s0 logger=elasticps.server event="view adopted" epoch=7 reason="…"
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any, TextIO

from elasticps.errors import ConfigError

LEVELS = ("debug", "info", "warning", "error")

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}
_NEEDS_QUOTES = frozenset(' ="\\')


class KeyValueFormatter(logging.Formatter):
    """Formats a record as key=value pairs; `context` comes in every line, `extra` of the call after it."""

    def __init__(self, context: Mapping[str, Any]) -> None:
        super().__init__()
        self._context = dict(context)

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds")
        pairs: dict[str, Any] = {
            "ts": when.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            **self._context,
            "logger": record.name,
            "event": record.getMessage(),
            **{key: value for key, value in vars(record).items() if key not in _STANDARD},
        }
        if record.exc_info:
            pairs["error"] = self.formatException(record.exc_info)
        return " ".join(f"{key}={_value(value)}" for key, value in pairs.items())


def _value(value: Any) -> str:
    text = value if isinstance(value, str) else str(value)
    if text.isprintable() and text and _NEEDS_QUOTES.isdisjoint(text):
        return text
    return json.dumps(text, ensure_ascii=False)  # also keeps a line break inside a value from starting a new line


def configure(level: str = "info", stream: TextIO | None = None, **context: Any) -> None:
    """Sends every logger's lines of at least `level` to `stream` (standard error), `context` in each of them.

    Raises ConfigError for a level that there is not.
    """
    if level not in LEVELS:
        raise ConfigError(f"{level!r} is no log level; there are {', '.join(LEVELS)}")
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(KeyValueFormatter(context))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for chatty in ("numba", "asyncio", "grpc", "aetcd"):
        logging.getLogger(chatty).setLevel(max(logging.WARNING, root.level))
    logging.captureWarnings(True)
