"""What the ledgers of a run tell: how long each fault was felt, the longest stall, how much was done. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chaos.live.load import BEGUN, COMMITTED, FAILED, READ, READ_FAILED, STALE

Records = NDArray[np.void]

AFTERMATH_S = 3.0  # a silent leader's office is free after so long
ALONE = ", leader or etcd away"


@dataclass(frozen=True)
class Life:
    """The records of one life of one worker; times are seconds since the start of the load. ended: when it was over by
    then, because its worker was started again or asked to end; NaN where nobody knows."""

    worker: str
    number: int
    records: Records
    ended: float = math.nan


@dataclass(frozen=True)
class Stall:
    """The longest time that a worker went without a commit, and when that began."""

    seconds: float
    worker: str
    at: float


def recovery(incarnations: Iterable[Life], at: float) -> dict[str, float]:
    """For each worker that was at work, seconds from `at` until a step was committed that it began at `at` or later.
    Every step goes to every range, so that is when all ranges served again. A worker whose life ended before it got so
    far is left out."""
    found: dict[str, float] = {}
    for life in incarnations:
        begun = life.records[life.records["kind"] == BEGUN]
        later = begun["step"][begun["time"] >= at]
        if not later.size or begun["time"][0] >= at:
            continue
        done = life.records[(life.records["kind"] == COMMITTED) & (life.records["step"] >= later[0])]
        if done.size:
            found[life.worker] = float(done["time"].min() - at)
    return found


def progressed(incarnations: Iterable[Life], at: float) -> bool:
    """Whether anything was committed that had begun after `at`."""
    return any(
        np.isin(
            life.records["step"][(life.records["kind"] == BEGUN) & (life.records["time"] >= at)],
            life.records["step"][life.records["kind"] == COMMITTED],
        ).any()
        for life in incarnations
    )


def idle(incarnations: Iterable[Life]) -> list[Life]:
    """Those that have left nothing, not even the beginning of a step."""
    return [life for life in incarnations if not life.records.size]


def longest_stall(incarnations: Iterable[Life], excused: Mapping[str, Sequence[tuple[float, float]]]) -> Stall:
    """Over all lives; `excused`: per worker, times in which the worker itself was paused, cut off or not there, which
    do not count. What comes before a life's first step, such as imports, is no stall; all that it waits for then is."""
    worst = Stall(0.0, "", 0.0)
    for life in incarnations:
        times = _signs(life)
        gaps = np.diff(times)
        for index in np.argsort(gaps)[::-1].tolist():
            if gaps[index] <= worst.seconds:
                break
            seconds, start = _free(float(times[index]), float(times[index + 1]), excused.get(life.worker, ()))
            if seconds > worst.seconds:
                worst = Stall(seconds, life.worker, start)
    return worst


def _signs(life: Life) -> NDArray[np.float64]:
    """When a life showed that it goes on: as it began steps, until the first was committed, and with each commit. At
    last when it ended, if it had not shown that it was done: who is asked to end waits for its commits."""
    kinds, times = life.records["kind"], life.records["time"]
    first = int(np.argmax(kinds == COMMITTED)) if (kinds == COMMITTED).any() else len(kinds)
    signs = times[(kinds == COMMITTED) | ((kinds == BEGUN) & (np.arange(len(kinds)) < first))]
    return np.append(signs, life.ended) if signs.size and life.ended > signs[-1] else signs


def _free(start: float, end: float, excused: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The longest part of a time in which nothing is excused: how long it is, and when it begins."""
    parts = []
    for first, last in sorted(excused):
        parts.append((min(first, end) - start, start))
        start = max(start, last)
    return max([*parts, (end - start, start)])


def counts(incarnations: Iterable[Life]) -> dict[str, int]:
    """Operations by what became of them."""
    kinds = {"steps_begun": BEGUN, "steps_committed": COMMITTED, "steps_failed": FAILED, "pulls": READ,
             "pulls_failed": READ_FAILED, "pulls_stale": STALE}  # fmt: skip
    totals = dict.fromkeys(kinds, 0)
    for life in incarnations:
        for name, kind in kinds.items():
            totals[name] += int((life.records["kind"] == kind).sum())
    return totals


def throughput(incarnations: Iterable[Life], seconds: float, bucket_s: float) -> NDArray[np.float64]:
    """Commits per second in each bucket of the run."""
    edges = np.arange(0.0, seconds + bucket_s, bucket_s)
    total = np.zeros(len(edges) - 1)
    for life in incarnations:
        total += np.histogram(life.records["time"][life.records["kind"] == COMMITTED], edges)[0]
    return total / bucket_s


def by_kind(reports: Iterable[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Recovery times in ms from reports of runs, per kind of fault and what it hit: of each fault, those of its slowest
    worker. Workers that were hit themselves meanwhile are left out, and servers that were hit when nobody could decide
    on it, because etcd or the leader was away, are a kind of their own."""
    found: dict[str, list[float]] = {}
    for report in reports:
        faults = [fault for fault in report["faults"] if fault["began"] >= 0]
        for fault in faults:
            began = fault["began"]
            times = [
                ms for worker, ms in fault["recovery_ms"].items()
                if not any(_hit(each, worker) and _goes_on(each, began, began + ms / 1e3) for each in faults)
            ]  # fmt: skip
            alone = any(_decides(each) and _goes_on(each, began, began + 0.1) for each in faults if each is not fault)
            if times:
                kind = f"{fault['do']} {fault['role']}".strip() + (ALONE if alone and fault["role"] == "server" else "")
                found.setdefault(kind, []).append(max(times))
    return dict(sorted(found.items()))


def _hit(fault: Mapping[str, Any], worker: str) -> bool:
    return bool(fault["role"] == "worker" and fault["target"] == worker)


def _decides(fault: Mapping[str, Any]) -> bool:
    """Whether it hit somebody without whom no view is written."""
    return bool(fault["do"] == "etcd-outage" or fault["role"] in ("coordinator", "etcd")) and fault["do"] != "restart"


def _goes_on(fault: Mapping[str, Any], first: float, last: float) -> bool:
    """Whether a fault, or what follows from it, touches this time."""
    ended = fault["ended"] if fault["ended"] >= 0 else fault["began"]
    return bool(fault["began"] <= last and first <= ended + AFTERMATH_S)
