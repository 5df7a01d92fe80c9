"""Runs the comparison: every contestant in processes of its own, measured in turns, at last killed.

All contestants are there from the beginning, and only the one whose turn it is works. Each trains the same batches in
the same order, so all have learned the same when they are scored.
"""

from __future__ import annotations

import math
import os
import platform
import signal
import statistics
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.compare import environment
from benchmarks.compare.report import Comparison, Death, Speed, Standing, markdown, shown
from benchmarks.core.criteo import MOST_VALUES
from benchmarks.machine import marked, marked_cpu_seconds, pss_bytes
from benchmarks.runner import Progress, Result, Side, Turn, in_turns, silent
from benchmarks.train import took_s
from benchmarks.workers import Interpreter, Team
from elasticps.errors import ConfigError, Error

BATCHES = (256, 1024, 4096)
ROUNDS = 5
STEPS = 64  # of a turn with 256 samples
FEW_VALUES = 100  # of a category, in the model before whose memory is compared
MEMORY_STEPS = 2  # before memory is measured
SCORE_BATCH, SCORED = 1024, 40
DEATH_BATCH, DEATH_S = 1024, 45.0
ANSWER_S = 300.0
END_S = 20.0  # for leaving

_MARK = "ELASTICPS_CONTESTANT"
_TORCHREC, _FBGEMM, _RAY = "torchrec", "fbgemm_gpu", "ray"


@dataclass(frozen=True)
class Way:
    """A contestant.

    system    a name in `systems.SYSTEMS`
    victim    what is killed
    ranks     its processes that the benchmark starts, of which the first `trainers` train
    threads   of each trainer; 0: as many as there are cores
    replicas  of elasticps
    needs     modules beside torch and elasticps
    """

    title: str
    system: str
    victim: str
    ranks: int = 1
    trainers: int = 1
    threads: int = 1
    replicas: int = 0
    needs: Sequence[str] = ()


WAYS: Mapping[str, Way] = {
    "fbgemm": Way("torchrec + FBGEMM, one process, 1 thread", "fbgemm", "the process", needs=(_TORCHREC, _FBGEMM)),
    "fbgemm-threads": Way(
        "torchrec + FBGEMM, one process, all cores", "fbgemm", "the process", threads=0, needs=(_TORCHREC, _FBGEMM)
    ),
    "torchrec": Way(
        "torchrec, sharded over 2 processes (gloo)", "torchrec", "one of both", 2, 2, needs=(_TORCHREC, _FBGEMM)
    ),
    "ddp": Way("torch DDP, 2 processes (gloo)", "ddp", "one of both", 2, 2),
    "rpc": Way("torch.distributed.rpc, 1 trainer, 1 server", "rpc", "the server", 2),
    "ray": Way("Ray, 1 trainer, an actor as server", "ray", "the actor", needs=(_RAY,)),
    "elasticps-1": Way("elasticps, 1 trainer, 3 servers, 1 replica", "elasticps", "one of three servers", replicas=1),
    "elasticps-2": Way("elasticps, 1 trainer, 3 servers, 2 replicas", "elasticps", "one of three servers", replicas=2),
}


def run(
    *,
    ways: Sequence[str] = (),
    batches: Sequence[int] = BATCHES,
    rounds: int = ROUNDS,
    steps: int = STEPS,
    most_values: int = MOST_VALUES,
    deaths: bool = True,
    folder: Path | None = None,
    page: Path | None = None,
    progress: Progress = silent,
) -> Result:
    """Compares the contestants named in `ways`, or all.

    steps        of a turn with 256 samples; with 4 times as many half of them, and so on
    most_values  ids of a category at most
    deaths       whether processes are killed at the end
    folder       the environment of the contestants, made if it does not exist; None: the present one
    page         a file to which the tables are written as Markdown

    Raises ConfigError for unknown ways, or if none can run; Error if a contestant fails.
    """
    chosen = {name: WAYS[name] for name in ways or WAYS if name in WAYS}
    if unknown := sorted(set(ways) - set(WAYS)):
        raise ConfigError(f"unknown contestant {unknown[0]!r}: there are {', '.join(WAYS)}")
    if folder is not None and not folder.exists():
        environment.make(folder, progress)
    python = environment.python_of(folder)
    missing, versions = environment.look(python, [_TORCHREC, _FBGEMM, _RAY])
    lacking = {name: [each for each in way.needs if each in missing] for name, way in chosen.items()}
    left_out = {way.title: lacking[name] for name, way in chosen.items() if lacking[name]}
    hint = "elasticps bench compare --environment FOLDER makes an environment that has all of it, with\n" + "\n".join(
        f"    pip install {' '.join(arguments)}" for arguments in environment.installing()
    )
    if not (running := {name: way for name, way in chosen.items() if not lacking[name]}):
        raise ConfigError(f"no contestant can run: {', '.join(missing)} are not installed; {hint}")
    with ExitStack() as stack:
        entrants = {}
        for name, way in running.items():
            progress(f"starting {way.title}")
            entrants[name] = stack.enter_context(_Entrant(way, python, most_values))
        turns, first = _train(entrants, batches, rounds, steps, progress)
        aucs = {}
        for name, entrant in entrants.items():
            progress(f"{name}: scoring")
            aucs[name] = entrant.score()
        found_deaths: dict[str, Death] = {}
        for name, entrant in entrants.items() if deaths else ():
            progress(f"{name}: kill -9 of {entrant.way.victim}")
            found_deaths[name] = entrant.kill(first)
            entrant.close()
        samples = next(iter(entrants.values())).samples
        rows = next(iter(entrants.values())).rows
    speeds = _speeds(turns, batches)
    standings = [
        Standing(
            name, entrant.way.title, entrant.way.victim, entrant.processes, entrant.start_s, entrant.bytes_per_row,
            speeds[name], aucs[name], found_deaths.get(name),
        )
        for name, entrant in entrants.items()
    ]  # fmt: skip
    machine = f"{os.cpu_count()} cores, {platform.machine()}"
    found = Comparison(machine, versions, rows, samples, rounds, standings, left_out)
    if page is not None:
        page.write_text(markdown(found), encoding="utf-8")
    return Result(found, shown(found, hint))


def _train(
    entrants: Mapping[str, _Entrant], batches: Sequence[int], rounds: int, steps: int, progress: Progress
) -> tuple[dict[int, dict[str, list[Turn]]], int]:
    """Turns of each contestant by size of a batch, and the number of the first batch that was not trained."""
    turns, first = {}, MEMORY_STEPS
    for batch in batches:
        each = max(2, int(steps * math.sqrt(256 / batch)))
        warm = max(1, each // 4)
        sides = {}
        for name, entrant in entrants.items():
            progress(f"{name}: warming up with batches of {batch:,}")
            entrant.prepare(batch, first, warm + rounds * each)
            entrant.train(warm)
            sides[name] = Side(entrant.train, each, entrant.cpu_s)
        turns[batch] = in_turns(sides, rounds, progress)
        first += warm + rounds * each
    return turns, first


def _speeds(turns: Mapping[int, Mapping[str, Sequence[Turn]]], batches: Sequence[int]) -> dict[str, list[Speed]]:
    speeds: dict[str, list[Speed]] = {name: [] for name in turns[batches[0]]}
    for batch, of_all in turns.items():
        fast = {name: statistics.median(t.steps * batch / t.seconds for t in each) for name, each in of_all.items()}
        for name, each in of_all.items():
            cpu_s = statistics.median(t.cpu_s["all"] / t.steps / batch * 1e6 for t in each)
            of_best = round(fast[name] / max(fast.values()), 3)
            speeds[name].append(Speed(batch, round(fast[name], 1), round(cpu_s, 1), of_best))
    return speeds


class _Entrant:
    """A contestant that runs: its processes, what it needs, and how many samples it has trained."""

    def __init__(self, way: Way, python: str, most_values: int) -> None:
        self.way = way
        self._mark = f"{_MARK}={uuid.uuid4().hex}"
        self._closed = False
        self._stack = ExitStack()
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="eps-", ignore_cleanup_errors=True))
        name, _, value = self._mark.partition("=")
        interpreter = Interpreter(
            python, {name: value, "PYTHONPATH": str(environment.ROOT), "PYTHONWARNINGS": "ignore"}
        )
        job = {
            "system": way.system, "ranks": way.ranks, "trainers": way.trainers, "replicas": way.replicas,
            "threads": way.threads or os.cpu_count() or 1, "meeting": str(Path(folder) / "meeting"),
        }  # fmt: skip
        began = time.monotonic()
        self._team = Team(
            "compare.rank:Rank", [{**job, "rank": rank} for rank in range(way.ranks)], ANSWER_S, interpreter
        )
        self.samples = 0
        try:
            few = self._ask("build", most_values=FEW_VALUES)[0]
            joined = time.monotonic()
            small = self._memory()
            began += time.monotonic() - joined
            self.rows = self._ask("build", most_values=most_values)[0]
            self.start_s = round(time.monotonic() - began, 1)
            self.bytes_per_row = round((self._memory() - small) / (self.rows - few), 1)
        except BaseException:
            self.close()
            raise
        self.processes = len(marked(self._mark))

    def _ask(self, method: str, **arguments: object) -> list[Any]:
        return self._team.ask(self.way.trainers, method, **arguments)

    def _memory(self) -> int:
        """Bytes of all processes after the first steps of a model."""
        self.samples = 0
        self.prepare(SCORE_BATCH, 0, MEMORY_STEPS)
        self.train(MEMORY_STEPS)
        total = 0
        for pid in marked(self._mark):
            with suppress(OSError):  # it has ended
                total += pss_bytes(pid)
        return total

    def prepare(self, batch: int, first: int, batches: int) -> None:
        """Has batches made, number `first` and so on."""
        self._batch = batch
        self._ask("prepare", batch=batch, first=first, batches=batches)

    def train(self, steps: int) -> float:
        """Trains so many of them; seconds that took."""
        self.samples += steps * self._batch
        return took_s(self._ask("train", steps=steps))

    def cpu_s(self) -> dict[str, float]:
        """CPU time of all processes so far."""
        return {"all": marked_cpu_seconds(self._mark)}

    def score(self) -> float:
        """Its AUC."""
        return round(float(self._ask("score", batch=SCORE_BATCH, batches=SCORED)[0]), 5)

    def kill(self, first: int) -> Death:
        """Kills a holder of rows while it trains."""
        workers = self._team.workers[: self.way.trainers]
        options = {"batch": DEATH_BATCH, "first": first, "limit_s": DEATH_S}
        with ThreadPoolExecutor(len(workers)) as threads:
            victim = self._team.workers[-1].pid
            asked = [
                threads.submit(worker.ask, "survive", victim=-1 if rank else victim, **options)
                for rank, worker in enumerate(workers)
            ]
            try:
                return Death(DEATH_S, **asked[0].result())
            except Error:
                return Death(DEATH_S, ended=True)

    def __enter__(self) -> _Entrant:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends everything that belongs to it."""
        if self._closed:
            return
        self._closed = True
        with suppress(Error):
            self._team.ask(self.way.ranks, "leave", within_s=END_S)
        self._team.close()
        deadline = time.monotonic() + END_S
        while (rest := marked(self._mark)) and time.monotonic() < deadline:
            time.sleep(0.05)
        for pid in rest:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._stack.close()
