"""Trains, serves and asks, and kills servers on the way: python -m examples.serving.run [--seconds 20] [--out FOLDER]

Needs the extras `demo`. Writes `served.json` and `served.png`: how old was what was served.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import elasticps as eps
from elasticps.local import LocalCluster
from examples.serving.load import Served, ask
from examples.serving.service import BIAS, WEIGHT

START_S = 120.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0 if no request failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="how long to serve")
    parser.add_argument("--kills", type=int, default=2, help="servers that are killed meanwhile; each starts again")
    parser.add_argument("--out", type=Path, default=Path("runs/serving"), help="where the results go")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    served, failed, kills = run(options.seconds, options.kills, options.out)
    summary = summarise(served, failed, kills)
    (options.out / "served.json").write_text(json.dumps(summary, indent=1))
    from examples.serving.picture import draw  # matplotlib takes half a second

    draw(served, kills, options.out / "served.png")
    print(json.dumps(summary))
    return 0 if served and not failed else 1


def run(seconds: float, kills: int, out: Path) -> tuple[list[Served], int, list[tuple[float, str]]]:
    """Serves for a while: the answers, how many requests failed, and when which server was killed."""
    happened: list[tuple[float, str]] = []
    with ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster(servers=3, replicas=2, restart=True))
        log = stack.enter_context((out / "processes.log").open("w"))
        stack.enter_context(_process(["-m", "examples.serving.train", cluster.url], cluster.url, log))
        _wait_for_model(cluster.url)
        port = _free_port()
        command = ["-m", "uvicorn", "examples.serving.service:app", "--port", str(port), "--log-level", "warning"]
        stack.enter_context(_process(command, cluster.url, log))
        _wait_for_service(port)
        stop, began = threading.Event(), time.monotonic()
        threads = stack.enter_context(ThreadPoolExecutor(1))
        stack.callback(stop.set)
        asking = threads.submit(ask, port, began, stop)
        for i in range(kills):
            _sleep_until(began + seconds * (i + 1) / (kills + 1))
            name = f"s{i % 3}"
            cluster.kill(name)
            happened.append((time.monotonic() - began, name))
        _sleep_until(began + seconds)
        stop.set()
        served, failed = asking.result()
    return served, failed, happened


def summarise(served: Sequence[Served], failed: int, kills: Sequence[tuple[float, str]]) -> dict[str, Any]:
    """Ages and latencies in milliseconds."""

    def percentiles(values: list[float]) -> dict[str, float]:
        p50, p99, most = np.percentile(values or [0.0], (50, 99, 100)) * 1e3
        return {"p50_ms": round(p50, 2), "p99_ms": round(p99, 2), "most_ms": round(most, 2)}

    steps = [one.step for one in served]
    return {
        "answers": len(served), "failed": failed, "kills": [name for _, name in kills],
        "age": percentiles([one.age_s for one in served]),
        "latency": percentiles([one.latency_s for one in served]),
        "steps": [min(steps, default=0), max(steps, default=0)],
    }  # fmt: skip


@contextmanager
def _process(arguments: Sequence[str], url: str, log: Any) -> Iterator[None]:
    """A Python process beside, which ends with the run."""
    process = subprocess.Popen(
        [sys.executable, *arguments], env=os.environ | {"ELASTICPS_URL": url}, stdout=log, stderr=log
    )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for_model(url: str) -> None:
    """Until training has made the tables that are served."""
    deadline = time.monotonic() + START_S
    with eps.connect(url, worker="look") as ps:
        while not {"items", WEIGHT, BIAS} <= ps.tables().keys():
            if time.monotonic() > deadline:
                raise TimeoutError("training has made no tables; processes.log says why")
            time.sleep(0.1)


def _wait_for_service(port: int) -> None:
    """Until the service answers."""
    deadline = time.monotonic() + START_S
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5):
                return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))


if __name__ == "__main__":
    sys.exit(main())
