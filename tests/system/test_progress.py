"""How far a long call is."""

from __future__ import annotations

import io
import sys
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

from elasticps.system import html, progress
from elasticps.system.progress import make_bar, reporting


def test_a_function_hears_how_far_a_call_is() -> None:
    heard: list[tuple[int, int | None]] = []
    with reporting(lambda done, of: heard.append((done, of)), "load", "rows", 10) as report:
        report.advance(4)
        report.advance(6)
        report.update(3, None)
    assert heard == [(0, 10), (4, 10), (10, 10), (3, None)]


def test_who_wants_nothing_sees_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    for given in (False, True):  # there is no terminal
        with reporting(given, "load", "rows", 10) as report:
            report.advance(4)
        assert report.done == 4
    assert capsys.readouterr() == ("", "")


def test_a_terminal_shows_a_bar_that_is_gone_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    terminal = Console(file=shown, force_terminal=True, width=100)
    monkeypatch.setattr("elasticps.system.progress.make_bar", lambda console, *columns: make_bar(terminal, *columns))
    with reporting(True, "load", "rows", 10) as report:
        report.advance(4)
    assert "4/10" in shown.getvalue()
    assert "rows" in shown.getvalue()


def test_a_notebook_shows_a_bar_without_widgets(monkeypatch: pytest.MonkeyPatch) -> None:
    pages: list[str] = []

    class Page(str):
        pass

    class Displayed:
        def update(self, page: str) -> None:
            pages.append(page)

    module = ModuleType("IPython.display")
    module.HTML = Page  # type: ignore[attr-defined]
    module.display = lambda page, display_id: Displayed()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    monkeypatch.setattr(Console, "is_jupyter", True, raising=False)
    real = Console.__init__

    def in_jupyter(self: Any, *given: Any, **more: Any) -> None:
        real(self, *given, **more)
        self.is_jupyter = True

    monkeypatch.setattr(Console, "__init__", in_jupyter)
    with reporting(True, "load <t>", "rows", 10) as report:
        report.advance(4)
        report.advance(6)
    assert pages[0].startswith('load &lt;t&gt; <progress value="0" max="10"></progress> 0 of 10 rows')
    assert 'value="10" max="10"' in pages[-1]
    pages.clear()
    with reporting(True, "checkpoint", "ranges") as report:
        report.advance(4)
    assert pages[0].startswith("checkpoint <progress></progress> 0 ranges")
    assert 'value="4" max="4"' in pages[-1]
    assert progress._SHOW_EVERY_S > 0


def test_what_a_notebook_shows_is_escaped_and_short() -> None:
    page = html.described("<script>", [("<b>", "&"), ("long", "x" * 1_000), ("many", 1_234_567)])
    assert "&lt;script&gt;" in page
    assert "<script>" not in page
    assert "&lt;b&gt;" in page
    assert "&amp;" in page
    assert "x…" in page
    assert "x" * 201 not in page
    assert "1,234,567" in page
    rows = html.table(("<a>", "b"), [(i, "<i>") for i in range(100)])
    assert rows.count("<tr>") == 1 + 40 + 1
    assert "and 60 more" in rows
    assert "&lt;a&gt;" in rows
    assert "<i>" not in rows
