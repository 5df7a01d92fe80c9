"""Processes beside a benchmark: how it starts and asks them, and how they answer.

`python -m benchmarks.workers MODULE:CLASS JOB` makes `CLASS(**JOB)`; JOB is JSON. A line on standard input,
`[METHOD, ARGUMENTS]` as JSON, asks for a call of that method, and a line on standard output has what it returned. The
process ends as standard input does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from elasticps.errors import Error

ANSWER_S = 180.0  # a worker that has not answered so long after its time hangs

# --- the parent's side


@dataclass(frozen=True)
class Interpreter:
    """The Python that runs a process. environment: variables beside those of this process."""

    python: str = sys.executable
    environment: Mapping[str, str] = field(default_factory=dict)


THIS = Interpreter()


class Process:
    """A process that makes one object and answers for it. kind: "MODULE:CLASS", the module one of `benchmarks`."""

    def __init__(self, kind: str, interpreter: Interpreter = THIS, /, **job: object) -> None:
        self._process = subprocess.Popen(
            [interpreter.python, "-m", "benchmarks.workers", f"benchmarks.{kind}", json.dumps(job)],
            env={**os.environ, **interpreter.environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, method: str, **arguments: object) -> Any:
        """Calls a method of the object, and returns its answer. Error if the process has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(OSError):  # it has ended
            self._process.stdin.write(json.dumps([method, arguments]) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise Error(f"a worker of the benchmark ended with exit code {self._process.wait()}; its error is above")
        return json.loads(line)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):  # what was written as it ended
                    pipe.close()


def worker_jobs(url: str, workers: int, processes: int, **more: object) -> list[dict[str, object]]:
    """Jobs of processes that have so many workers together, about as many each, numbered by `first` and `count`; none
    for a process that has none. more: the same in each."""
    counts = [workers // processes + (i < workers % processes) for i in range(min(processes, workers))]
    return [{"url": url, "first": sum(counts[:i]), "count": count, **more} for i, count in enumerate(counts)]


class Team:
    """Processes of one kind, one for each job. The first few of them are asked at once; each answers within
    `answer_s`."""

    def __init__(
        self,
        kind: str,
        jobs: Sequence[Mapping[str, object]],
        answer_s: float = ANSWER_S,
        interpreter: Interpreter = THIS,
    ) -> None:
        self._answer_s = answer_s
        self.workers = [Process(kind, interpreter, **job) for job in jobs]
        self._threads = ThreadPoolExecutor(len(jobs))

    def ask(self, count: int, method: str, **arguments: object) -> list[Any]:
        """The answers of the first `count`. Error if one ends, or does not answer in time; then all of them are
        ended."""
        answers = [self._threads.submit(worker.ask, method, **arguments) for worker in self.workers[:count]]
        done, waiting = wait(answers, self._answer_s, FIRST_EXCEPTION)
        failed = next((f.exception() for f in done if f.exception() is not None), None)
        if failed is not None or waiting:
            self.close()  # the others may wait for the one that ended
            raise failed or Error(f"a worker of the benchmark did not answer {method!r} within {self._answer_s:g} s")
        return [future.result() for future in answers]

    def __enter__(self) -> Team:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all of them."""
        for worker in self.workers:
            worker.close()
        self._threads.shutdown()


# --- the worker's side


class BusyWorker(ABC):
    """A worker that works in a thread of its own while it answers, from `begin` to `end`."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self._done: Future[None] | None = None

    @abstractmethod
    def run(self) -> None:
        """Works until `ended` is set."""

    def begin(self) -> None:
        """Starts the work."""
        threads = ThreadPoolExecutor(1, thread_name_prefix="work")
        self._done = threads.submit(self.run)
        threads.shutdown(wait=False)

    def check(self) -> None:
        """Raises what ended the work too early."""
        if self._done is not None and self._done.done():
            self._done.result()

    def close(self) -> None:
        """Ends the work and waits until it has ended."""
        self.ended.set()
        if self._done is not None:
            self._done.result()


def main() -> None:
    """Makes the object that the command line names, and answers for it."""
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    with open(os.devnull, "w") as nowhere:  # what libraries print goes there
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
    module, _, name = sys.argv[1].partition(":")
    worker = getattr(import_module(module), name)(**json.loads(sys.argv[2]))
    for line in sys.stdin:
        method, arguments = json.loads(line)
        try:
            print(json.dumps(getattr(worker, method)(**arguments)), file=out, flush=True)
        except BrokenPipeError:
            break
    worker.close()


if __name__ == "__main__":
    main()
