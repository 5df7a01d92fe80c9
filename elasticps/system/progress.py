"""How far a long call is: a bar in a terminal or a notebook, or a function of the caller's."""

from __future__ import annotations

import html
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bar
    from rich.progress import ProgressColumn

Progress = bool | Callable[[int, int | None], None]
"""What a long call takes as `progress`: True for a bar, False for nothing, or a function of (done, of how many; None
where nobody knows)."""

_SHOW_EVERY_S = 0.2  # in a notebook


class Report:
    """Hears how far a call is. total: of how many, None where nobody knows."""

    def __init__(self, show: Callable[[int, int | None], None] | None, total: int | None = None) -> None:
        self._show = show
        self.done = 0
        self.total = total

    def advance(self, more: int) -> None:
        """So many more are done."""
        self.update(self.done + more, self.total)

    def update(self, done: int, total: int | None) -> None:
        """So many are done, of so many."""
        self.done, self.total = done, total
        if self._show is not None:
            self._show(done, total)


class Displayed(Protocol):
    """Something that a notebook shows, and shows again."""

    def update(self, shown: Any) -> None: ...


@contextmanager
def reporting(progress: Progress, title: str, unit: str, total: int | None = None) -> Iterator[Report]:
    """Shows how far a call is while the block runs, as the caller wants it; yields who hears of it."""
    if not progress:
        yield Report(None, total)
    elif progress is not True:
        report = Report(progress, total)
        report.update(0, total)
        yield report
    elif (displayed := _in_notebook()) is not None:
        report = Report(_NotebookBar(displayed, title, unit), total)
        report.update(0, total)
        yield report
        report.update(report.done, report.done)
    else:
        with _in_terminal(title, unit, total) as show:
            yield Report(show, total)


@contextmanager
def _in_terminal(title: str, unit: str, total: int | None) -> Iterator[Callable[[int, int | None], None]]:
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, TextColumn

    with make_bar(Console(stderr=True), MofNCompleteColumn(), TextColumn(unit)) as bar:
        task = bar.add_task(title, total=total)
        yield lambda done, of: bar.update(task, completed=done, total=of)


def make_bar(console: Console, *columns: ProgressColumn) -> Bar:
    """A progress bar with these columns that is gone when it ends; it shows nothing where there is no terminal."""
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    return Bar(
        TextColumn("[bold]{task.description}"), BarColumn(bar_width=28), *columns, TimeElapsedColumn(),
        TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal,
    )  # fmt: skip


def _in_notebook() -> Displayed | None:
    """Something empty in the cell of the notebook that this process serves; None where there is none. It is HTML, and
    needs no widgets."""
    from rich.console import Console

    if not Console().is_jupyter:
        return None
    from IPython.display import HTML, display

    shown: Displayed = display(HTML(""), display_id=True)
    return shown


class _NotebookBar:
    def __init__(self, displayed: Displayed, title: str, unit: str) -> None:
        self._displayed = displayed
        self._title, self._unit = html.escape(title), html.escape(unit)
        self._began = time.monotonic()
        self._shown = 0.0

    def __call__(self, done: int, total: int | None) -> None:
        now = time.monotonic()
        if now - self._shown < _SHOW_EVERY_S and done != total:
            return
        self._shown = now
        bar = "<progress></progress>" if total is None else f'<progress value="{done}" max="{total or 1}"></progress>'
        of = "" if total is None else f" of {total:,}"
        text = f"{self._title} {bar} {done:,}{of} {self._unit}, {now - self._began:.0f} s"
        from IPython.display import HTML

        self._displayed.update(HTML(text))
