"""Sums over all stories that were played, in this run and, with a record, in earlier ones."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elasticps.system import temporary

if TYPE_CHECKING:
    from chaos.sim.run import Result

BROKEN_LISTED = 20
COUNTED = ("events", "views", "steps", "pulls", "rounds", "shards", "cuts")
MINUTE_S = 60


class RecordError(Exception):
    """A record cannot be continued; the text says why, and what to do."""


@dataclass
class Totals:
    """The stories that were played: sums, the first ones that broke a promise, and the time that they took."""

    first: int
    last: int = -1
    runs: int = 0
    failed: int = 0
    cpu_s: float = 0.0  # of all processes
    before_s: float = 0.0  # what earlier sittings took
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTED, 0))
    broken: list[dict[str, Any]] = field(default_factory=list)
    began_s: float = field(default_factory=time.monotonic)

    def add(self, result: Result, cpu_s: float) -> None:
        """Adds a story's result. Results come in the order of their seeds."""
        self.runs += 1
        self.last = result.seed
        self.cpu_s += cpu_s
        for what in COUNTED:
            self.counts[what] += getattr(result, what)
        if not result.ok:
            self.failed += 1
            if len(self.broken) < BROKEN_LISTED:
                self.broken.append(asdict(result) | {"trace": None, "told": str(result)})

    @property
    def took_s(self) -> float:
        """The real seconds of all runs so far."""
        return self.before_s + time.monotonic() - self.began_s

    def __str__(self) -> str:
        counts = ", ".join(f"{count:,} {what}" for what, count in {"runs": self.runs, **self.counts}.items())
        return f"{counts}: {self.failed} broke a promise"

    def speed(self, jobs: int) -> str:
        """Says which seeds were played, how long that took, and how many a second: all that differs between runs."""
        took_s, processes = self.took_s, "1 process" if jobs == 1 else f"{jobs} processes"
        if not self.runs:
            return f"no story came to its end within {duration(took_s)} in {processes}"
        rates = f"{self.runs / max(took_s, 1e-9):.2f} stories/s, {self.cpu_s / self.runs:.2f} CPU s a story"
        return f"seeds {self.first} to {self.last} took {duration(took_s)} in {processes}: {rates}"

    def as_json(self, jobs: int) -> dict[str, Any]:
        """The totals as plain values, for JSON."""
        seeds = {"first": self.first, "last": self.last} if self.runs else {}
        took = {"jobs": jobs, "took_s": round(self.took_s, 3), "cpu_s": round(self.cpu_s, 3)}
        return {"runs": self.runs, **self.counts, **seeds, **took, "failed": self.failed, "broken": self.broken}


@dataclass(frozen=True)
class Record:
    """A file with the totals of the stories of one code and kind, and the seed to go on from."""

    path: Path
    code: str  # of `chaos.sim.code`
    kind: dict[str, Any]

    def read(self) -> Totals | None:
        """Returns the totals of earlier runs; None if there were none, or if they played other code.

        Raises RecordError if the file cannot be read, is no record, or is of another kind of story."""
        try:
            found = json.loads(self.path.read_text())
            totals = Totals(
                found["first"], found["last"], found["runs"], found["failed"], found["cpu_s"], found["took_s"],
                {what: found[what] for what in COUNTED}, found["broken"],
            )  # fmt: skip
            code, kind = found["code"], found["kind"]
        except FileNotFoundError:
            return None
        except OSError as error:
            raise RecordError(f"{self.path} cannot be read: {error.strerror}") from None
        except (ValueError, KeyError, TypeError):
            raise RecordError(f"{self.path} is no record of stories: name another file") from None
        if code != self.code:
            return None
        if kind != self.kind:
            raise RecordError(f"{self.path} is of other stories ({kind}): name another file")
        return totals

    def write(self, totals: Totals, jobs: int) -> None:
        """Replaces the file, once a story was played. Raises RecordError if that fails."""
        text = {"code": self.code, "kind": self.kind, **totals.as_json(jobs)}
        with self._beside(json.dumps(text, indent=1) + "\n") as written:
            if totals.runs:
                os.replace(written, self.path)

    @contextmanager
    def _beside(self, text: str) -> Iterator[Path]:
        """Makes a file beside the record, which may take its place; removes it at the end."""
        beside = temporary.new_path(self.path.parent)
        try:
            with temporary.create(beside) as file:
                file.write(text.encode())
            yield beside
        except OSError as error:
            raise RecordError(f"{self.path} cannot be written: {error.strerror}") from None
        finally:
            with suppress(OSError):
                beside.unlink()


def duration(seconds: float) -> str:
    """Formats seconds for people: 4.1 s, 3 min 20 s, 2 h 5 min."""
    if seconds < MINUTE_S:
        return f"{seconds:.1f} s"
    minutes, left_s = divmod(round(seconds), MINUTE_S)
    hours, minutes_left = divmod(minutes, 60)
    return f"{hours} h {minutes_left} min" if hours else f"{minutes} min {left_s} s"
