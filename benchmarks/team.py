"""Several worker processes of a benchmark that are asked at once."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any

from benchmarks.failover import Worker
from elasticps.errors import Error

ANSWER_S = 180.0  # a worker that has not answered so long after its time hangs


class Team:
    """Processes of one module, `python -m MODULE JOB`, by their jobs. Asks the first few of them at once; each answers
    within `answer_s`."""

    def __init__(self, module: str, jobs: Sequence[Mapping[str, object]], answer_s: float = ANSWER_S) -> None:
        self._answer_s = answer_s
        self.workers = [Worker(module, json.dumps(job)) for job in jobs]
        self._threads = ThreadPoolExecutor(len(jobs))

    def ask(self, request: str, count: int) -> list[dict[str, Any]]:
        """The answers. Error if one ends, or does not answer in time; then all of them are ended."""
        asked = [self._threads.submit(worker.ask, request) for worker in self.workers[:count]]
        done, waiting = wait(asked, self._answer_s, FIRST_EXCEPTION)
        failed = next((f.exception() for f in done if f.exception() is not None), None)
        if failed is not None or waiting:
            self.close()  # the others may wait for the one that ended
            raise failed or Error(f"a worker of the benchmark did not answer {request!r} within {self._answer_s:g} s")
        return [future.result() for future in asked]

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self._threads.shutdown()
