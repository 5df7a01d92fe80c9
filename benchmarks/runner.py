"""What all benchmarks share: results as JSON and as tables, and what is compared running in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

Progress: TypeAlias = Callable[[str], None]
Line = TypeVar("Line")
Name = TypeVar("Name", bound=Hashable)


def silent(text: str) -> None:
    """Progress that nobody reads."""


@dataclass(frozen=True)
class Result:
    """What a benchmark measured.

    found  for programs: a dataclass, a dict, or a list of them
    shown  for people: tables, and lines of text beneath them
    ok     False if the cluster broke a promise meanwhile: the exit code is 1
    """

    found: Any
    shown: Sequence[Table | str]
    ok: bool = True

    @property
    def document(self) -> Any:
        """`found`, made of what JSON knows."""
        return _plain(self.found)


def _plain(found: Any) -> Any:
    if isinstance(found, list):
        return [_plain(each) for each in found]
    if hasattr(found, "as_dict"):
        return found.as_dict()
    return asdict(found) if is_dataclass(found) and not isinstance(found, type) else found


def table(
    title: str,
    lines: Iterable[Line],
    columns: Iterable[tuple[str, Callable[[Line], object]]],
    left: Sequence[str] = (),
) -> Table:
    """A table with a row for each line. columns: headings, and what they show of a line; the first one, and those in
    `left`, are aligned to the left."""
    made, columns = Table(title=title), list(columns)
    for number, (heading, _) in enumerate(columns):
        made.add_column(heading, justify="left" if not number or heading in left else "right")
    for line in lines:
        made.add_row(*(str(show(line)) for _, show in columns))
    return made


def figures(
    title: str, lines: Mapping[str, Mapping[str, float]], shown: Sequence[str], digits: int = 0, unit: str = ""
) -> Table:
    """A table of figures by name, as `percentiles` gives them, with a row for each line."""

    def column(name: str) -> Callable[[str], str]:
        return lambda line: f"{lines[line][name]:,.{0 if name == 'count' else digits}f}"

    headings = {name: "operations" if name == "count" else name + unit for name in shown}
    return table(title, lines, [("", lambda line: line), *((headings[name], column(name)) for name in shown)])


@dataclass(frozen=True)
class Turn:
    """How one turn went. cpu_s: CPU time used meanwhile, by the name of the one that used it."""

    steps: int
    seconds: float
    cpu_s: Mapping[str, float] = field(default_factory=dict)


@dataclass
class Side:
    """One of the things that are compared.

    run    does so many steps, and returns how many seconds they took
    steps  of the next turn
    cpu_s  CPU time used so far, by the name of the one that used it
    """

    run: Callable[[int], float]
    steps: int
    cpu_s: Callable[[], Mapping[str, float]] = dict

    def turn(self) -> Turn:
        """Runs one turn."""
        before = self.cpu_s()
        seconds = self.run(self.steps)
        after = self.cpu_s()
        return Turn(self.steps, seconds, {name: after[name] - before[name] for name in before})

    def fit(self, turn: Turn, seconds: float, least: int) -> None:
        """Gives the next turn as many steps as fit `seconds`, at least `least`, by how long `turn` took."""
        self.steps = max(least, int(turn.steps * seconds / turn.seconds))


def in_turns(
    sides: Mapping[Name, Side],
    rounds: int,
    progress: Progress = silent,
    *,
    seconds: float | None = None,
    least: int = 1,
) -> dict[Name, list[Turn]]:
    """Runs all sides `rounds` times, one after another, so that all see the same noise of the machine. `seconds`: time
    for each side, of all rounds together, by which its steps are chosen again after each turn."""
    turns: dict[Name, list[Turn]] = {name: [] for name in sides}
    for number in range(rounds):
        for name, side in sides.items():
            progress(f"{name}: round {number + 1} of {rounds}")
            turns[name].append(side.turn())
            if seconds is not None:
                side.fit(turns[name][-1], seconds / rounds, least)
    return turns


def percentiles(
    values: Sequence[float] | NDArray[np.float64], *of: float, digits: int | None = None
) -> dict[str, float]:
    """As {"p50": …, "p99": …, "max": …}: 100 is called "max"."""
    found = np.percentile(values, of).tolist() if len(values) else []
    names = ("max" if q == 100 else f"p{q:g}" for q in of)
    return {name: value if digits is None else round(value, digits) for name, value in zip(names, found, strict=False)}


def seconds_of(call: Callable[[], object]) -> float:
    """How long a call takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
