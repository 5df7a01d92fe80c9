"""How the processes of elasticps log: one line per event on standard error, as key=value pairs or as one JSON object.

    log = fields.logger(__name__)
    log.info("view adopted", epoch=7, reason=reason)

gives

    ts=2026-03-01T12:00:00.125Z level=info process=s0 logger=elasticps.server event="view adopted" epoch=7 reason="…"

or, in the format `json`, the same with numbers as numbers. What every line of a process says beside its event (its
cluster and name, a server's incarnation and epoch) comes before the logger's name. Lines of other packages, which log
through the standard library, look the same.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, TextIO

import structlog
from structlog.typing import EventDict, WrappedLogger

from coordinator.core import fields
from coordinator.sparing import Sparing
from elasticps.errors import ConfigError

LEVELS = ("debug", "info", "warning", "error")

OTHERS_MOST, OTHERS_EVERY_S = 10, 10.0  # lines of one level of another package's logger that are shown in so long
_OURS = ("elasticps", "coordinator", "replication", "chaos")

FORMATS = ("logfmt", "json")

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", fields.FIELDS}


def bind(**context: Any) -> None:
    """Adds fields to every further line; a callable value is called for each line. Does nothing before `configure`."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, _Formatter):
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
    handler.setFormatter(_Formatter(_json if log_format == "json" else _logfmt, context))
    handler.addFilter(_Others())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for chatty in ("numba", "asyncio", "grpc", "aetcd"):
        logging.getLogger(chatty).setLevel(max(logging.WARNING, root.level))
    logging.captureWarnings(True)


class _Others(logging.Filter):
    """Limits repeated lines of other packages, such as gRPC's stack for each unreadable call; the next line that passes
    says how many were left out."""

    def __init__(self) -> None:
        super().__init__()
        self._sparing = Sparing(OTHERS_MOST, OTHERS_EVERY_S)

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name.startswith(_OURS):
            return True
        left_out = self._sparing.due((record.name, record.levelno))
        if left_out:
            record.left_out = left_out
        return left_out is not None


class _Formatter(structlog.stdlib.ProcessorFormatter):
    """Formats lines of structlog and of the standard library's logging: `context` first, then the line's own fields."""

    def __init__(self, render: Callable[[WrappedLogger, str, EventDict], str], context: dict[str, Any]) -> None:
        super().__init__(processors=[self._arrange, render])
        self.context = context

    def _arrange(self, _: WrappedLogger, method: str, event: EventDict) -> EventDict:
        record: logging.LogRecord = event["_record"]
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        values = getattr(record, fields.FIELDS, None)
        if values is None:
            values = {"event": event["event"]} | {k: v for k, v in vars(record).items() if k not in _STANDARD}
        arranged = {
            "ts": when.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            **{key: value() if callable(value) else value for key, value in self.context.items()},
            "logger": record.name,
            **values,
        }
        if event.get("exc_info"):
            arranged["error"] = self.formatException(event["exc_info"])
        return arranged


def _logfmt(_: WrappedLogger, method: str, event: EventDict) -> str:
    return " ".join(fields.pair(key, value) for key, value in event.items())


def _json(_: WrappedLogger, method: str, event: EventDict) -> str:
    values = {key: fields.plain(value) for key, value in event.items()}
    return fields.safe(json.dumps(values, ensure_ascii=False, separators=(",", ":")))
