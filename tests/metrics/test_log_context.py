"""Fields that every line of a process's log has."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from elasticps.errors import ConfigError
from elasticps.system import logs


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)


def test_context_bound_later_is_in_every_line_and_computed_each_time() -> None:
    stream, epochs = io.StringIO(), iter((7, 8))
    logs.configure("info", stream, cluster="train", process="s0")
    logs.bind(incarnation=3, epoch=lambda: next(epochs))
    for event in ("adopted epoch=7", "adopted epoch=8"):
        logging.getLogger("x").info(event)
    first, second = stream.getvalue().splitlines()
    assert ' cluster=train process=s0 incarnation=3 epoch=7 logger=x event="adopted epoch=7"' in first
    assert " epoch=8 logger=x " in second


def test_json_lines_have_the_same_fields() -> None:
    stream = io.StringIO()
    logs.configure("info", stream, log_format="json", cluster="train")
    logging.getLogger("x").info('it said "no"\n', extra={"epoch": 7, "who": {1}})
    found = json.loads(stream.getvalue())
    assert stream.getvalue().count("\n") == 1
    assert (found["cluster"], found["event"], found["epoch"], found["who"]) == ("train", 'it said "no"\n', 7, "{1}")
    assert found["level"] == "info"


def test_an_unknown_format_is_a_clear_error() -> None:
    with pytest.raises(ConfigError, match="'xml' is no log format"):
        logs.configure(log_format="xml")
