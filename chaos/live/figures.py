"""Figures from the ledgers of a run: how long each fault was felt, the longest stall, how much was done. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chaos.live.load import BEGUN, COMMITTED, FAILED, READ, READ_FAILED, STALE

Records = NDArray[np.void]

AFTERMATH_S = 3.0  # after so long another coordinator leads in place of a silent one
ALONE = ", leader or etcd away"


@dataclass(frozen=True)
class Life:
    """The records of one life of one worker. Times are seconds since the start of the load. ended: when the life was
    over at the latest, because its worker was started again or asked to end; NaN if unknown."""

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
    """Returns for each worker that was at work the seconds from `at` until the first commit of a step that it began at
    `at` or later. Every step goes to every range, so all ranges serve again by then. Leaves out workers whose life
    ended before."""
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
    """Whether any step was committed that had begun after `at`."""
    return any(
        np.isin(
            life.records["step"][(life.records["kind"] == BEGUN) & (life.records["time"] >= at)],
            life.records["step"][life.records["kind"] == COMMITTED],
        ).any()
        for life in incarnations
    )


def idle(incarnations: Iterable[Life]) -> list[Life]:
    """Returns the lives without a record, not even of the beginning of a step."""
    return [life for life in incarnations if not life.records.size]


def longest_stall(incarnations: Iterable[Life], excused: Mapping[str, Sequence[tuple[float, float]]]) -> Stall:
    """Returns the longest stall of all lives. excused: times, by worker, that do not count, because the worker itself
    was paused, cut off or not there. The time before a life's first step, such as for imports, is no stall."""
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
    """Returns when a life showed progress: at the beginnings of steps until the first commit, and at each commit. Its
    end is the last of these times: a worker that is asked to end waits for its commits first."""
    kinds, times = life.records["kind"], life.records["time"]
    first = int(np.argmax(kinds == COMMITTED)) if (kinds == COMMITTED).any() else len(kinds)
    signs = times[(kinds == COMMITTED) | ((kinds == BEGUN) & (np.arange(len(kinds)) < first))]
    return np.append(signs, life.ended) if signs.size and life.ended > signs[-1] else signs


def _free(start: float, end: float, excused: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Returns the longest part of a time that is not excused: its length, and when it begins."""
    parts = []
    for first, last in sorted(excused):
        parts.append((min(first, end) - start, start))
        start = max(start, last)
    return max([*parts, (end - start, start)])


def counts(incarnations: Iterable[Life]) -> dict[str, int]:
    """Counts operations by their outcome."""
    kinds = {"steps_begun": BEGUN, "steps_committed": COMMITTED, "steps_failed": FAILED, "pulls": READ,
             "pulls_failed": READ_FAILED, "pulls_stale": STALE}  # fmt: skip
    totals = dict.fromkeys(kinds, 0)
    for life in incarnations:
        for name, kind in kinds.items():
            totals[name] += int((life.records["kind"] == kind).sum())
    return totals


def throughput(incarnations: Iterable[Life], seconds: float, bucket_s: float) -> NDArray[np.float64]:
    """Returns the commits per second in each bucket of the run."""
    edges = np.arange(0.0, seconds + bucket_s, bucket_s)
    total = np.zeros(len(edges) - 1)
    for life in incarnations:
        total += np.histogram(life.records["time"][life.records["kind"] == COMMITTED], edges)[0]
    return total / bucket_s


def by_kind(reports: Iterable[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Returns recovery times in ms from reports of runs, by kind of fault and of target: for each fault that of the
    slowest worker. Leaves out workers that were hit themselves meanwhile. Faults of servers while etcd or the leader
    was away, so that no view could be written, are a kind of their own."""
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
    """Whether a fault hit a process without which no view is written."""
    return bool(fault["do"] == "etcd-outage" or fault["role"] in ("coordinator", "etcd")) and fault["do"] != "restart"


def _goes_on(fault: Mapping[str, Any], first: float, last: float) -> bool:
    """Whether a fault, or its aftermath, overlaps with this time."""
    ended = fault["ended"] if fault["ended"] >= 0 else fault["began"]
    return bool(fault["began"] <= last and first <= ended + AFTERMATH_S)
