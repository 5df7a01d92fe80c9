from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest

from elasticps import logs
from elasticps.errors import ConfigError


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)


def line(level: str = "info", **extra: object) -> str:
    stream = io.StringIO()
    logs.configure("debug", stream, process="s0")
    logging.getLogger("elasticps.server").log(logging.getLevelName(level.upper()), "view adopted", extra=extra)
    return stream.getvalue()


def test_an_event_is_one_line_of_pairs() -> None:
    text = line(epoch=7, reason="s3 lost")
    assert text.startswith("ts=2")
    assert text.endswith(
        ' level=info process=s0 logger=elasticps.server event="view adopted" epoch=7 reason="s3 lost"\n'
    )


@pytest.mark.parametrize("value", ['a"b', "a\nlevel=error", "", "a=b", "\x1b[31m"])
def test_a_value_can_neither_forge_a_line_nor_a_pair(value: str) -> None:
    text = line(key=value)
    assert text.count("\n") == 1
    assert "\x1b" not in text
    assert 'key="' in text


def test_a_traceback_stays_on_the_line() -> None:
    stream = io.StringIO()
    logs.configure("info", stream)
    try:
        raise RuntimeError("boom")
    except RuntimeError:
        logging.getLogger("x").exception("it failed")
    assert stream.getvalue().count("\n") == 1
    assert "RuntimeError: boom" in stream.getvalue()


def test_levels_below_the_chosen_one_are_left_out() -> None:
    stream = io.StringIO()
    logs.configure("warning", stream)
    logging.getLogger("x").info("quiet")
    assert stream.getvalue() == ""


def test_an_unknown_level_is_a_clear_error() -> None:
    with pytest.raises(ConfigError, match="'loud' is no log level"):
        logs.configure("loud")
