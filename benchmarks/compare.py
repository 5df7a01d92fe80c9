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
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import compare_environment as environment
from benchmarks.compare_report import Comparison, Death, Speed, Standing, markdown, shown
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
DEATH_BATCH, DEATH_S = 1024, 30.0
ANSWER_S = 300.0
END_S = 20.0  # for leaving

_MARK = "ELASTICPS_CONTESTANT"
_TORCHREC, _FBGEMM, _RAY = "torchrec", "fbgemm_gpu", "ray"


@dataclass(frozen=True)
class Contestant:
    """What is compared.

    system    a name in `compare_systems.SYSTEMS`
    victim    what is killed
    ranks     its processes that the benchmark starts, of which the first `trainers` train
    threads   of each trainer; 0: as many as there are cores
    replicas  of elasticps
    needs     modules beside torch and elasticps
    spins     whether its processes take CPU time while they wait: they are stopped while others have their turns
    """

    title: str
    system: str
    victim: str
    ranks: int = 1
    trainers: int = 1
    threads: int = 1
    replicas: int = 0
    needs: Sequence[str] = ()
    spins: bool = False


CONTESTANTS: Mapping[str, Contestant] = {
    "fbgemm": Contestant(
        "torchrec + FBGEMM, one process, 1 thread", "fbgemm", "the process", needs=(_TORCHREC, _FBGEMM)
    ),
    "fbgemm-threads": Contestant(
        "torchrec + FBGEMM, one process, all cores", "fbgemm", "the process", threads=0, needs=(_TORCHREC, _FBGEMM)
    ),
    "torchrec": Contestant(
        "torchrec, sharded over 2 processes (gloo)", "torchrec", "one of both", 2, 2, needs=(_TORCHREC, _FBGEMM)
    ),
    "ddp": Contestant("torch DDP, 2 processes (gloo)", "ddp", "one of both", 2, 2),
    "rpc": Contestant("torch.distributed.rpc, 1 trainer, 1 server", "rpc", "the server", 2, spins=True),
    "ray": Contestant("Ray, 1 trainer, an actor as server", "ray", "the actor", needs=(_RAY,)),
    "elasticps-1": Contestant(
        "elasticps, 1 trainer, 3 servers, 1 replica", "elasticps", "one of three servers", replicas=1
    ),
    "elasticps-2": Contestant(
        "elasticps, 1 trainer, 3 servers, 2 replicas", "elasticps", "one of three servers", replicas=2
    ),
}


def run(
    *,
    names: Sequence[str] = (),
    batches: Sequence[int] = BATCHES,
    rounds: int = ROUNDS,
    steps: int = STEPS,
    most_values: int = MOST_VALUES,
    deaths: bool = True,
    folder: Path | None = None,
    page: Path | None = None,
    progress: Progress = silent,
) -> Result:
    """Compares the contestants of these names, or all.

    steps        of a turn with 256 samples; with 4 times as many half of them, and so on
    most_values  ids of a category at most
    deaths       whether processes are killed at the end
    folder       the environment of the contestants, made if it does not exist; None: the present one
    page         a file to which the tables are written as Markdown

    Raises ConfigError for unknown names, or if none can run; Error if a contestant fails.
    """
    if unknown := sorted(set(names) - set(CONTESTANTS)):
        raise ConfigError(f"unknown contestant {unknown[0]!r}: there are {', '.join(CONTESTANTS)}")
    if folder is not None and not folder.exists():
        environment.make(folder, progress)
    python = environment.python_of(folder)
    missing, versions = environment.look(python, [_TORCHREC, _FBGEMM, _RAY])
    chosen = {name: each for name, each in CONTESTANTS.items() if not names or name in names}
    lacking = {name: [module for module in each.needs if module in missing] for name, each in chosen.items()}
    left_out = {each.title: lacking[name] for name, each in chosen.items() if lacking[name]}
    lines = "\n".join(f"    pip install {' '.join(arguments)}" for arguments in environment.installing())
    hint = f"elasticps bench compare --environment FOLDER makes an environment that has all of it, with\n{lines}"
    if len(left_out) == len(chosen):
        raise ConfigError(f"no contestant can run: {', '.join(missing)} are not installed; {hint}")

    def found(entrants: Mapping[str, _Entrant], speeds: Mapping[str, Sequence[Speed]]) -> Comparison:
        """What is known so far."""
        standings = [entrant.standing(speeds[name]) for name, entrant in entrants.items()]
        one = next(iter(entrants.values()))
        machine = f"{os.cpu_count()} cores, {platform.machine()}"
        result = Comparison(machine, versions, one.rows, one.samples, rounds, standings, left_out)
        if page is not None:
            page.write_text(markdown(result), encoding="utf-8")
        return result

    with ExitStack() as stack:
        entrants = {}
        for name in [name for name in chosen if not lacking[name]]:
            progress(f"starting {chosen[name].title}")
            entrants[name] = stack.enter_context(_Entrant(name, chosen[name], python, most_values))
        turns, first = _train(entrants, batches, rounds, steps, progress)
        for name, entrant in entrants.items():
            progress(f"{name}: scoring")
            entrant.score()
        speeds = _speeds(turns, batches)
        result = found(entrants, speeds)
        for name, entrant in entrants.items() if deaths else ():
            progress(f"{name}: kill -9 of {entrant.contestant.victim}")
            entrant.kill(first)
            entrant.close()
            result = found(entrants, speeds)
    return Result(result, shown(result, hint))


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
    """A contestant that runs.

    rows     of its model
    samples  that it has trained since the model was made
    """

    def __init__(self, name: str, contestant: Contestant, python: str, most_values: int) -> None:
        self.contestant = contestant
        self.samples = 0
        self._name = name
        self._batch = 0
        self._auc = 0.0
        self._death: Death | None = None
        self._closed = False
        self._mark = f"{_MARK}={uuid.uuid4().hex}"
        self._stack = ExitStack()
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="eps-", ignore_cleanup_errors=True))
        variable, _, value = self._mark.partition("=")
        # Threads of OpenMP that wait awake for each other take ten times the time where anything else runs.
        variables = {"PYTHONPATH": str(environment.ROOT), "PYTHONWARNINGS": "ignore", "OMP_WAIT_POLICY": "PASSIVE"}
        interpreter = Interpreter(python, {**variables, variable: value})
        job = {
            "system": contestant.system, "ranks": contestant.ranks, "trainers": contestant.trainers,
            "replicas": contestant.replicas, "threads": contestant.threads or os.cpu_count() or 1,
            "meeting": str(Path(folder) / "meeting"), "values": most_values,
        }  # fmt: skip
        jobs = [{**job, "rank": rank} for rank in range(contestant.ranks)]
        began = time.monotonic()
        self._team = Team("compare_rank:Rank", jobs, ANSWER_S, interpreter)
        try:
            few = self._ask("build", values=FEW_VALUES)[0]
            joined = time.monotonic()
            small = self._memory()
            began += time.monotonic() - joined
            self.rows: int = self._ask("build")[0]
            self._start_s = round(time.monotonic() - began, 1)
            self._bytes_per_row = round((self._memory() - small) / (self.rows - few), 1)
        except BaseException:
            self.close()
            raise
        self._processes = len(marked(self._mark))

    def standing(self, speeds: Sequence[Speed]) -> Standing:
        """What was found of it."""
        return Standing(
            self._name, self.contestant.title, self.contestant.victim, self._processes, self._start_s,
            self._bytes_per_row, speeds, self._auc, self._death,
        )  # fmt: skip

    def _ask(self, method: str, **arguments: object) -> list[Any]:
        with self._awake():
            return self._team.ask(self.contestant.trainers, method, **arguments)

    @contextmanager
    def _awake(self) -> Iterator[None]:
        """Lets processes that spin run."""
        self._signal(signal.SIGCONT)
        yield
        self._signal(signal.SIGSTOP)

    def _signal(self, number: int) -> None:
        for pid in marked(self._mark) if self.contestant.spins else ():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

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

    def score(self) -> None:
        """Takes its AUC."""
        self._auc = round(float(self._ask("score", batch=SCORE_BATCH, batches=SCORED)[0]), 5)

    def kill(self, first: int) -> None:
        """Kills a holder of rows while it trains. first: the number of a batch that was not trained."""
        self._signal(signal.SIGCONT)
        workers = self._team.workers[: self.contestant.trainers]
        options = {"batch": DEATH_BATCH, "first": first, "limit_s": DEATH_S}
        with ThreadPoolExecutor(len(workers)) as threads:
            victim = self._team.workers[-1].pid
            answers = [
                threads.submit(worker.ask, "survive", victim=-1 if rank else victim, **options)
                for rank, worker in enumerate(workers)
            ]
            try:
                self._death = Death(DEATH_S, **answers[0].result())
            except Error:
                self._death = Death(DEATH_S, ended=True)

    def __enter__(self) -> _Entrant:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends everything that belongs to it."""
        if self._closed:
            return
        self._closed = True
        self._signal(signal.SIGCONT)
        with suppress(Error):
            self._team.ask(self.contestant.ranks, "leave", within_s=END_S)
        self._team.close()
        deadline = time.monotonic() + END_S
        while (rest := marked(self._mark)) and time.monotonic() < deadline:
            time.sleep(0.05)
        for pid in rest:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._stack.close()
