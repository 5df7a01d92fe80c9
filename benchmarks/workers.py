"""Worker processes of benchmarks: how the parent starts and asks them, and how they answer.

A line on standard input is a request, a line of JSON on standard output is the answer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from elasticps.errors import Error

ANSWER_S = 180.0  # a worker that has not answered so long after its time hangs

# --- the parent's side


class Worker:
    """A process of a benchmark, `python -m MODULE ARGUMENTS`, that answers each line with a line of JSON."""

    def __init__(self, module: str, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, request: str) -> dict[str, Any]:
        """Sends a request; its answer. Error if the worker has ended."""
        assert self._process.stdin is not None
        with suppress(OSError):  # it has ended
            self._process.stdin.write(request + "\n")
            self._process.stdin.flush()
        answer: dict[str, Any] = self.answer()
        return answer

    def answer(self) -> Any:
        """The next line that it writes."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise Error(f"a worker of the benchmark ended with exit code {self._process.wait()}; its error is above")
        return json.loads(line)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


@contextmanager
def started(module: str, *arguments: str) -> Iterator[Worker]:
    """A worker process, until the block ends."""
    worker = Worker(module, *arguments)
    try:
        yield worker
    finally:
        worker.close()


class Team:
    """Worker processes of one module, `python -m MODULE JOB`, one for each job. A request goes to the first few of them
    at once; each answers within `answer_s`."""

    def __init__(self, module: str, jobs: Sequence[Mapping[str, object]], answer_s: float = ANSWER_S) -> None:
        self._answer_s = answer_s
        self.workers = [Worker(module, json.dumps(job)) for job in jobs]
        self._threads = ThreadPoolExecutor(len(jobs))

    def ask(self, request: str, count: int) -> list[dict[str, Any]]:
        """The answers. Error if one ends, or does not answer in time; then all of them are ended."""
        answers = [self._threads.submit(worker.ask, request) for worker in self.workers[:count]]
        done, waiting = wait(answers, self._answer_s, FIRST_EXCEPTION)
        failed = next((f.exception() for f in done if f.exception() is not None), None)
        if failed is not None or waiting:
            self.close()  # the others may wait for the one that ended
            raise failed or Error(f"a worker of the benchmark did not answer {request!r} within {self._answer_s:g} s")
        return [future.result() for future in answers]

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self._threads.shutdown()


# --- the worker's side


class BusyWorker(ABC):
    """A worker process that works in one thread, until `ended` is set, and answers requests in another."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    @abstractmethod
    def run(self) -> None:
        """Works until `ended` is set, then tells the outcome."""

    @abstractmethod
    def answer(self, word: str, rest: str) -> dict[str, object]:
        """The answer to a line, of its first word and what follows."""

    def serve(self) -> None:
        """Works in this thread and answers in another."""
        threading.Thread(target=self._listen, name="answers", daemon=True).start()
        self.run()

    def tell(self, **values: object) -> None:
        """Writes one answer; ends if nobody is there to read it."""
        try:
            print(json.dumps(values), flush=True)
        except BrokenPipeError:
            self.ended.set()
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - or the interpreter tries once more when it ends

    def _listen(self) -> None:
        for line in sys.stdin:
            word, _, rest = line.strip().partition(" ")
            if word == "end":
                break
            self.tell(**self.answer(word, rest))
        self.ended.set()


def answers() -> TextIO:
    """Standard output, for answers alone: what libraries print from now on goes nowhere."""
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
    return out


def answer_all(out: TextIO, answer: Callable[[str], object]) -> None:
    """Answers each line of standard input with one of JSON, until it ends."""
    for line in sys.stdin:
        print(json.dumps(answer(line)), file=out, flush=True)
