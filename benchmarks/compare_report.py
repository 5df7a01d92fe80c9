"""The result of a comparison: what was found of each contestant, as tables and as a page's Markdown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from benchmarks.runner import table


@dataclass(frozen=True)
class Speed:
    """How fast a contestant trains batches of one size: medians of its turns.

    cpu_s_per_million  CPU time for a million samples, of all processes of the contestant, in seconds
    of_best            its samples/s by those of the fastest contestant
    """

    batch: int
    samples_per_s: float
    cpu_s_per_million: float
    of_best: float


@dataclass(frozen=True)
class Death:
    """What `kill -9` of a process that holds rows did; times in seconds since then.

    resumed_s  when the first step begun afterwards was done; None: none was, within `limit_s`
    ended      whether the process that trained was the one that died
    error      of the first step that failed, "" for none, and when it failed
    same       part of the rows trained before, and not since, that a process still has as they were; None: no process
    """

    limit_s: float
    resumed_s: float | None = None
    ended: bool = False
    error: str = ""
    error_s: float | None = None
    same: float | None = None

    @property
    def sequel(self) -> str:
        """When training went on, or why it did not."""
        if self.resumed_s is not None:
            return f"{self.resumed_s:.2f} s, by itself"
        if self.ended:
            return "never: the job is gone"
        if not self.error:
            return f"never: it waits, without an error, for {self.limit_s:g} s and more"
        kind = self.error.partition(":")[0]
        return f"never: `{kind}` after {self.error_s:.1f} s, and at every step from then on"

    @property
    def state(self) -> str:
        """What became of the rows."""
        if self.same is None:
            return "lost" if self.ended else "none can be read"
        if self.resumed_s is None:
            part = "all" if self.same > 0.999 else f"{self.same:.0%} of the rows"
            return f"{part} in the process that is left, which cannot go on"
        if self.same > 0.999:
            return "whole"
        return f"**{self.same:.0%} of the trained rows; the others begin again, silently**"


@dataclass(frozen=True)
class Standing:
    """All that was found of a contestant.

    name           by which the command knows it
    title          what it is
    victim         what was killed
    processes      how many it has
    start_s        seconds from starting its processes until it can train
    bytes_per_row  resident memory of all its processes for each of the rows, with Adagrad's sums
    auc            on samples that nobody trained, after the same steps for all
    death          None: not tried
    """

    name: str
    title: str
    victim: str
    processes: int
    start_s: float
    bytes_per_row: float
    speeds: Sequence[Speed]
    auc: float
    death: Death | None


@dataclass(frozen=True)
class Comparison:
    """Everything of one run.

    rows      of the model; samples: trained by each contestant before it was scored
    left_out  titles of contestants whose packages are missing, and what is missing
    """

    machine: str
    versions: Mapping[str, str]
    rows: int
    samples: int
    rounds: int
    standings: Sequence[Standing]
    left_out: Mapping[str, Sequence[str]]


Columns = list[tuple[str, Callable[[Standing], object]]]


def _speed(batch: int) -> Callable[[Standing], object]:
    def show(standing: Standing) -> str:
        (found,) = [each for each in standing.speeds if each.batch == batch]
        return f"{found.samples_per_s:,.0f} ({found.of_best:.2f})"

    return show


def _training(standings: Sequence[Standing]) -> Columns:
    batches = [each.batch for each in standings[0].speeds] if standings else []
    listed = " / ".join(f"{batch:,}" for batch in batches)
    return [
        ("system", lambda each: each.title),
        *((f"samples/s, batch {batch:,}", _speed(batch)) for batch in batches),
        (
            f"CPU s per million samples, {listed}",
            lambda each: " / ".join(f"{speed.cpu_s_per_million:,.0f}" for speed in each.speeds),
        ),
        ("bytes per row", lambda each: f"{each.bytes_per_row:,.0f}"),
        ("AUC", lambda each: f"{each.auc:.4f}"),
    ]


def _deaths() -> Columns:
    def death(show: Callable[[Death], str]) -> Callable[[Standing], object]:
        return lambda each: show(each.death) if each.death is not None else ""

    return [
        ("system", lambda each: each.title),
        ("killed", lambda each: each.victim),
        ("training goes on after", death(lambda found: found.sequel)),
        ("rows", death(lambda found: found.state)),
        ("starting it takes", lambda each: f"{each.start_s:.0f} s"),
    ]


def _parts(found: Comparison) -> list[tuple[str, list[Standing], Columns]]:
    tried = [each for each in found.standings if each.death is not None]
    title = f"the same DLRM, {found.rows:,} rows; medians of {found.rounds} turns"
    parts = [(title, list(found.standings), _training(found.standings))]
    return [*parts, ("after kill -9 of a process that holds rows", tried, _deaths())] if tried else parts


def _context(found: Comparison) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items() if version)
    return f"{found.machine}; {versions}; {found.samples:,} samples each."


def shown(found: Comparison, hint: str) -> list[Table | str]:
    """Tables, and lines beneath them. hint: how to get what is missing."""
    tables: list[Table | str] = [table(title, lines, columns) for title, lines, columns in _parts(found)]
    left_out = [f"left out: {title}, which needs {', '.join(needs)}" for title, needs in found.left_out.items()]
    return [*tables, _context(found), *left_out, *([hint] if left_out else [])]


def markdown(found: Comparison) -> str:
    """The same for a page of the documentation."""
    blocks = []
    for _, lines, columns in _parts(found):
        rows: list[list[Any]] = [[heading for heading, _ in columns], ["---"] * len(columns)]
        rows += [[show(line) for _, show in columns] for line in lines]
        blocks.append("\n".join(f"| {' | '.join(str(cell) for cell in row)} |" for row in rows))
    return "\n\n".join([*blocks, _context(found)]) + "\n"
