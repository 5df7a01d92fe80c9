"""The readers of a run: one in a process of its own, one as `elasticps reader`, one behind that; what they found."""

from __future__ import annotations

import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

import elasticps as eps
from chaos.live import churn
from chaos.live.follower import REST_S, FollowerJob, findings_of
from chaos.live.load import APP, TIMEOUT_S, Job, open_filtered, open_tables
from chaos.live.plan import Plan
from chaos.live.stage import Processes

FOLLOWER, PROCESS, OUTER = "r0", "r1", "r2"
"""In-process, `elasticps reader --listen`, and what follows that."""
END_S = REST_S + 2 * TIMEOUT_S
POLL_S = 0.05


@dataclass
class Findings:
    """What one reader has found. looks: pulls compared; undecided: rows of which nothing could be said; apart:
    attempts to hold without a moment; failed: pulls without an answer; compared: rows at rest, -1: none were; ages,
    lags, holds: seconds: how old rows were, and for how long something had been committed that they lacked; late_s:
    the most that was missing of what the rows' time promised."""

    reader: str
    looks: int = 0
    undecided: int = 0
    failed: int = 0
    apart: int = 0
    compared: int = -1
    late_s: float = 0.0
    ages: list[float] = field(default_factory=list)
    lags: list[float] = field(default_factory=list)
    holds: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """The findings as plain values, for the report."""
        return {
            "reader": self.reader, "looks": self.looks, "undecided": self.undecided, "failed": self.failed,
            "held": len(self.holds), "apart": self.apart, "compared": self.compared,
            "age_ms": _percentiles(self.ages), "lag_ms": _percentiles(self.lags),
            "late_ms": round(self.late_s * 1e3, 1),
            "hold_ms": round(float(np.median(self.holds)) * 1e3, 1) if self.holds else 0.0,
        }  # fmt: skip


def _percentiles(times: Sequence[float]) -> dict[str, float]:
    """Of seconds, in ms."""
    found = np.percentile(times, (50, 99, 100)) * 1e3 if times else np.zeros(3)
    return dict(zip(("p50", "p99", "most"), found.round(1).tolist(), strict=True))


def read_findings(name: str, lines: Iterable[str]) -> Findings:
    """What the process of a reader has written, all its lives; a line that was not finished is left out."""
    found = Findings(name)
    for line in lines:
        if not line.endswith("\n"):
            continue
        note = json.loads(line)
        if "age" in note:
            found.looks += 1
            found.ages += [note["age"]] if math.isfinite(note["age"]) else []  # it was just opened
        found.lags += [note["lag"]] if "lag" in note else []
        found.late_s = max(found.late_s, note.get("late", 0.0))
        if "held" in note:
            found.holds.append(note["held"])
        found.apart += "timeout" in note
        found.failed += "failed" in note
        found.undecided += note.get("undecided", 0)
        found.compared = note.get("compared", found.compared)
        if note.get("wrong"):
            found.wrong.append(note["wrong"])
    return found


def judge_findings(found: Findings) -> list[str]:
    """The promises that a reader has broken, a sentence each."""
    words = [f"reader {found.reader}: {text}" for text in dict.fromkeys(found.wrong[:3])]
    words += (
        [f"reader {found.reader}: and {len(found.wrong) - 3} more looks were wrong"] if len(found.wrong) > 3 else []
    )
    if not found.looks:
        words.append(f"reader {found.reader} has shown nothing that could be compared")
    if found.compared < 0:
        words.append(f"reader {found.reader} was not compared with the servers at rest")
    return words


class Readers:
    """The readers of one run. names: of their processes."""

    def __init__(self, plan: Plan, seed: int, stage: Processes) -> None:
        self.names: list[str] = []
        self._plan = plan
        self._seed = seed
        self._stage = stage
        self._salts: dict[str, int] = {}
        self._tls = plan.cluster.tls

    def start(self) -> None:
        """Starts all readers, unless the plan has none, and waits until each is ready."""
        load = self._plan.load
        if not load.readers or load.command or self._plan.cluster.kind == "kubernetes":
            return
        stage = self._stage
        self._salts = _salts(stage.reader_url)
        listens, address = stage.listening(PROCESS)
        self.names = [FOLLOWER, PROCESS, OUTER]
        stage.add_reader(FOLLOWER, partial(self._follow, FOLLOWER, stage.follower_url, ""))
        stage.add_reader(PROCESS, partial(self._serve, listens))
        stage.wait_ready([PROCESS])
        numbers = itertools.count()
        stage.add_reader(OUTER, lambda: self._outer(address, next(numbers)))
        stage.wait_ready([FOLLOWER, OUTER])

    def finish(self, wait: Callable[[], None] = lambda: time.sleep(POLL_S)) -> list[str]:
        """Has the readers compare what they have with the servers, and ends them. What they, and all before, found
        wrong. Training must rest."""
        names = [name for name in (FOLLOWER, OUTER) if name in self.names and self._stage.running(name)]
        for name in names:
            self._stage.terminate(name)
        until_s = time.monotonic() + END_S
        while any(self._stage.running(name) for name in names) and time.monotonic() < until_s:
            wait()
        hanging = [name for name in names if self._stage.running(name)]
        words = [f"reader {name} did not end within {END_S:g} s" for name in hanging]
        codes = {name: self._stage.code(name) for name in names if name not in hanging}
        words += [
            f"reader {name} ended with exit code {code}; its log says why" for name, code in codes.items() if code
        ]
        if PROCESS in self.names:
            self._stage.terminate(PROCESS)
        return words + [text for found in self.findings() for text in judge_findings(found)]

    def findings(self) -> list[Findings]:
        """What each of them has found so far."""
        found = []
        for name in (FOLLOWER, OUTER):
            path = findings_of(Path(self._stage.folder), name)
            if name in self.names:
                found.append(read_findings(name, path.read_text().splitlines(keepends=True) if path.exists() else ()))
        return found

    def _outer(self, address: str, life: int) -> list[str]:
        """What follows the process: by pulls and as a relay's reader, in turns."""
        cluster = urlsplit(self._stage.follower_url)
        if life % 2:
            return self._follow(OUTER, cluster.geturl() if self._tls else "", address)
        return self._follow(OUTER, f"reader://{address}" + (f"{cluster.path}?{cluster.query}" if self._tls else ""), "")

    def _follow(self, name: str, url: str, address: str) -> list[str]:
        plan, stage = self._plan, self._stage
        any_life = Job(stage.url, self._seed, 0, 0, plan.load.keys, plan.load.window, 0.0, plan.cluster.ranges, "")
        job = FollowerJob(name, url, address, stage.url, str(stage.folder), self._salts, asdict(any_life))
        return [sys.executable, "-m", "chaos.live.follower", json.dumps(asdict(job))]

    def _serve(self, listens: str) -> list[str]:
        words = ["--url", self._stage.follower_url, "--listen", listens, "--app", APP, "--name", PROCESS]
        words += ["--dtype", "float32", "--insecure"]
        return [sys.executable, "-m", "elasticps", "reader", *words]


def _salts(url: str) -> dict[str, int]:
    """The salts of the load's tables, which say in which range a key is."""
    with eps.connect(url, worker="measure", app=APP, timeout=TIMEOUT_S) as ps:
        counted, tensor = open_tables(ps)
        found = [counted, tensor, *open_filtered(ps), churn.open_passing(ps)]
        return {table.name: int(table.salt) for table in found}
