from __future__ import annotations

import io
import json
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.core import fields
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


def line(log_format: str = "logfmt", event: str = "view adopted", **printed: Any) -> str:
    stream = io.StringIO()
    logs.configure("debug", stream, log_format=log_format, process="s0")
    fields.logger("elasticps.server").info(event, **printed)
    return stream.getvalue()


def test_an_event_is_one_line_of_pairs() -> None:
    text = line(epoch=7, reason="s3 lost")
    assert text.startswith("ts=2")
    assert text.endswith(
        ' level=info process=s0 logger=elasticps.server event="view adopted" epoch=7 reason="s3 lost"\n'
    )


def test_fields_are_fields_in_json() -> None:
    found = json.loads(line("json", epoch=np.int64(7), load=0.5, worst=math.inf, up=True, peer=None, member=Path("s3")))
    assert found.pop("ts").endswith("Z")
    assert found == {
        "level": "info", "process": "s0", "logger": "elasticps.server", "event": "view adopted",
        "epoch": 7, "load": 0.5, "worst": "inf", "up": True, "peer": None, "member": "s3",
    }  # fmt: skip


def test_lines_of_the_standard_library_have_the_same_format() -> None:
    for log_format in logs.FORMATS:
        stream = io.StringIO()
        logs.configure("info", stream, log_format=log_format)
        logging.getLogger("aetcd").warning("lost %s", "it", extra={"tries": 3})
        text = stream.getvalue()
        assert text.endswith('event="lost it" tries=3\n') or json.loads(text)["tries"] == 3


def test_without_our_formatter_the_fields_are_in_the_text(caplog: pytest.LogCaptureFixture) -> None:
    fields.logger("elasticps.client").warning("100% silent", server="s3", why="no route")
    assert caplog.messages == ['100% silent server=s3 why="no route"']


def test_fields_of_every_line_can_change() -> None:
    stream = io.StringIO()
    logs.configure("info", stream, process="s0")
    epochs = iter((4, 5))
    logs.bind(incarnation=2, epoch=lambda: next(epochs))
    log = fields.logger("x")
    log.info("one")
    log.info("two", epoch=9)
    one, two = stream.getvalue().splitlines()
    assert one.endswith(" process=s0 incarnation=2 epoch=4 logger=x event=one")
    assert two.endswith(" process=s0 incarnation=2 epoch=9 logger=x event=two")


HOSTILE = ['a"b', "a\nlevel=error", "", "a=b", "\x1b[31m", "a\u2028b", "\u202egnp.exe", "\x85", "\x9b2J", "\u200b",
           "\ud800", "\U000e0001"]  # fmt: skip


@pytest.mark.parametrize("value", HOSTILE)
def test_a_value_can_neither_forge_a_line_nor_a_pair_nor_move_a_cursor(value: str) -> None:
    text = line(key=value)
    assert text[:-1].isprintable()
    assert 'key="' in text
    assert json.loads(text.partition("key=")[2]) == value


@pytest.mark.parametrize("value", HOSTILE)
@pytest.mark.parametrize("log_format", logs.FORMATS)
def test_events_keys_and_other_packages_cannot_forge_a_line_either(value: str, log_format: str) -> None:
    pair: dict[str, Any] = {f"k{value}": 1}
    for text in (line(log_format, event=value), line(log_format, **pair)):
        assert text[:-1].isprintable()
    stream = io.StringIO()
    logs.configure("info", stream, log_format=log_format)
    logging.getLogger("other").info("%s", value)
    assert stream.getvalue()[:-1].isprintable()
    if log_format == "json":
        assert json.loads(line("json", key=value))["key"] == value


def test_values_too_long_for_a_line_are_cut() -> None:
    assert len(line(key="x" * 100_000)) < 9_000
    assert "(100000 characters)" in line("json", key="x" * 100_000)


def test_a_traceback_stays_on_the_line() -> None:
    stream = io.StringIO()
    logs.configure("info", stream)
    try:
        raise RuntimeError("boom")
    except RuntimeError:
        logging.getLogger("x").exception("it failed")
    assert stream.getvalue().count("\n") == 1
    assert "RuntimeError: boom" in stream.getvalue()


def test_levels_below_the_configured_level_are_left_out() -> None:
    stream = io.StringIO()
    logs.configure("warning", stream)
    logging.getLogger("x").info("quiet")
    assert stream.getvalue() == ""


def test_an_unknown_level_is_a_clear_error() -> None:
    with pytest.raises(ConfigError, match="'loud' is no log level"):
        logs.configure("loud")
