"""The progress of a run, as a person sees it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from chaos.live.runner import LINES_SHOWN, Run, Show

_RATE_OVER_S = 2.0
_REFRESH_S = 0.5


@contextmanager
def screen(console: Console) -> Iterator[Show]:
    """Yields a function that shows a run: as a live table on a terminal, elsewhere with a line for each fault."""
    if not console.is_terminal:
        yield _Lines(console)
        return
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield _Picture(live)


class _Lines:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._reported = 0

    def __call__(self, run: Run) -> None:
        for at, line in run.lines[self._reported :]:
            self._console.print(f"{at:8.2f} s  {line}", markup=False, soft_wrap=True)
        self._reported = len(run.lines)


class _Picture:
    def __init__(self, live: Live) -> None:
        self._live = live
        self._counts: deque[tuple[float, int]] = deque(maxlen=int(_RATE_OVER_S / _REFRESH_S) + 1)

    def __call__(self, run: Run) -> None:
        if run.load is None or run.over or (self._counts and run.now - self._counts[-1][0] < _REFRESH_S):
            return
        self._counts.append((run.now, run.load.committed()))
        self._live.update(_render(run, self._rate()), refresh=True)

    def _rate(self) -> float:
        (first, before), (last, now) = self._counts[0], self._counts[-1]
        return (now - before) / (last - first) if last > first else 0.0


def _render(run: Run, rate: float) -> Group:
    outcome, view = run.outcome, run.watch.view if run.watch is not None else None
    head = Text.assemble(
        (outcome.plan.name, "bold"), f"  seed {outcome.seed}  {min(run.now, outcome.seconds):.0f} of "
        f"{outcome.seconds:g} s  {rate:,.0f} steps/s",
    )  # fmt: skip
    if view is not None:
        short, joining = int((view.chains < 0).any(axis=1).sum()), int((view.joining >= 0).sum())
        head.append(f"  epoch {view.epoch}, {short} ranges short, {joining} being filled")
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("s", "fault", "state"):
        table.add_column(column, justify="right" if column == "s" else "left")
    faults = run.nemesis.faults if run.nemesis is not None else []
    begun = [fault for fault in faults if fault.began >= 0]
    coming = [fault for fault in faults if fault.state == "waiting"]
    for fault in begun[-LINES_SHOWN:]:
        style = "bold red" if fault.state == "running" else ""
        table.add_row(f"{fault.began:.1f}", Text(str(fault)), fault.stage or fault.state, style=style)
    for fault in coming[:3]:
        table.add_row(f"{fault.action.at:.1f}", Text(str(fault)), fault.note or "to come", style="dim")
    broken = [Text(text, "bold red") for text in outcome.broken]
    return Group(head, table, *broken)
