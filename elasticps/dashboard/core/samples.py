"""What passes through a cluster, second by second: rates from what its servers have counted. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from coordinator.core.view import WorkerInfo
from elasticps.admin.attached_readers import merge_readers
from elasticps.dashboard.core.fleet import ServerState
from elasticps.dashboard.core.history import SERVERS_MAX, History

RATES = {
    "push_s": "pushes", "pull_s": "pulls", "rows_pushed_s": "rows_pushed", "rows_pulled_s": "rows_pulled",
    "refused_s": "refused", "sent_s": "sent_bytes",
}  # fmt: skip
GAUGES = ("parked", "log_bytes", "rows", "bytes", "memory_used", "memory_mark", "memory_limit", "connections")
TRAFFIC = ("received_s", "busy")
LATENCIES = ("push_p50", "push_p99", "pull_p50", "pull_p99")  # seconds
SERVER_COLUMNS = (*RATES, *GAUGES, *TRAFFIC, *LATENCIES)
CLUSTER_COLUMNS = (*SERVER_COLUMNS, "steps_s", "lag", "outstanding")

Sample = dict[str, float | None]

_STEPS_S = 10.0  # a worker's pace is its mean over so long
_STALE_S = 15.0  # clocks from a server count for so long
_REPORT_STALE_S = 60.0  # and a worker's own report: an idle worker repeats the same
_UNKNOWN, _UNREPORTED = (None,) * 3, (None,) * 4


class Samples:
    """cluster: everything together; servers: each for itself; newest: the last sample, in the order of the columns."""

    def __init__(self, samples: int) -> None:
        self.cluster = History(CLUSTER_COLUMNS, samples)
        self.servers: dict[str, History] = {}
        self.workers = Workers()
        self.reports = WorkerReports()
        self.newest: dict[str, Any] | None = None
        self._capacity = samples
        self._before: dict[str, tuple[float, Mapping[str, Any]]] = {}
        self._active: dict[str, tuple[float, Mapping[str, Any]]] = {}
        self._active_before: dict[str, tuple[float, Mapping[str, Any]]] = {}
        self._past: dict[str, Mapping[float, Sample]] = {}

    def remember(self, cluster: Mapping[float, Sample], servers: Mapping[str, Mapping[float, Sample]]) -> None:
        """What was before the first sample, by time: of everything together, and of each server."""
        self.cluster.add_before(cluster)
        for name, history in self.servers.items():
            history.add_before(servers.get(name, {}))
        self._past = {name: past for name, past in servers.items() if name not in self.servers}

    def activity(self, now: float, name: str, answer: Mapping[str, Any]) -> None:
        """What passes through a server."""
        self._active[name] = now, answer
        self.workers.note(now, name, zip(answer["workers"], answer["clocks"], strict=True))
        self.reports.note(now, answer["uses"])

    def take(self, now: float, servers: Mapping[str, ServerState], workers: Sequence[WorkerInfo]) -> None:
        """Takes a sample of all servers that answer."""
        rows = {name: self._of(name, server) for name, server in servers.items() if server.answers}
        whole: Sample = {}
        for column in (*RATES, *GAUGES, *TRAFFIC):
            values = [value for row in rows.values() if (value := row.get(column)) is not None]
            whole[column] = sum(values) if values else None
        whole |= self._latencies(list(rows))
        clocks, whole["steps_s"], whole["lag"] = self.workers.look(now, workers)
        reports = self.reports.look(now, {w.id for w in workers})
        whole["outstanding"] = sum(each[0] or 0 for each in reports.values()) if reports else None
        self.cluster.add(now, whole)
        for name, row in rows.items():
            if name in self.servers or len(self.servers) < SERVERS_MAX:
                if name not in self.servers:
                    self.servers[name] = History(SERVER_COLUMNS, self._capacity)
                    self.servers[name].add_before(self._past.pop(name, {}))
                self.servers[name].add(now, row)
        for name in self.servers.keys() - servers.keys():
            del self.servers[name]
        for known in (self._before, self._active, self._active_before):
            for name in known.keys() - rows.keys():
                del known[name]
        self._active_before = dict(self._active)
        self.newest = {
            "t": now,
            "cluster": [_rounded(whole.get(column)) for column in CLUSTER_COLUMNS],
            "readers": merge_readers(server.status or {} for server in servers.values() if server.answers),
            "servers": {n: [_rounded(row.get(column)) for column in SERVER_COLUMNS] for n, row in rows.items()},
            "workers": {
                i: [*(clocks.get(i) or _UNKNOWN), *(reports.get(i) or _UNREPORTED)]
                for i in clocks.keys() | reports.keys()
            },
        }

    def _of(self, name: str, server: ServerState) -> Sample:
        status = server.status or {}
        sample: Sample = {column: status[column] for column in GAUGES}
        at, before = self._before.get(name, (0.0, None))
        if before is not None and before["incarnation"] == status["incarnation"] and server.at > at:
            for column, counter in RATES.items():
                sample[column] = max(0, status[counter] - before[counter]) / (server.at - at)
        if before is None or server.at > at:
            self._before[name] = server.at, status
        now, then = self._active.get(name), self._active_before.get(name)
        if now is not None and then is not None and now[0] > then[0]:
            span = now[0] - then[0]
            received = (now[1]["received_bytes"] - then[1]["received_bytes"]) / span
            sample["received_s"] = received if received >= 0 else None  # another life of the process
            if now[1]["bounds_s"]:
                sample["busy"] = max(0.0, now[1]["busy_s"] - then[1]["busy_s"]) / span
        return sample | self._latencies([name])

    def _latencies(self, some: Iterable[str]) -> Sample:
        """Of the requests that these servers have answered since the last sample."""
        found: Sample = {}
        for kind in ("push", "pull"):
            bounds: Sequence[float] = ()
            sums: list[int] = []
            for name in some:
                now, then = self._active.get(name), self._active_before.get(name)
                if now is None or then is None or not now[1]["bounds_s"]:
                    continue
                bounds = now[1]["bounds_s"]
                more = [a - b for a, b in zip(now[1][kind], then[1][kind], strict=True)]
                sums = more if not sums else [a + b for a, b in zip(sums, more, strict=True)]
            for share, column in ((0.5, f"{kind}_p50"), (0.99, f"{kind}_p99")):
                found[column] = percentile(bounds, sums, share)
        return found


def percentile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """From a histogram: counts[i] values lie between bounds[i - 1] and bounds[i]; the last ones above all bounds. As
    Prometheus does: even within a bucket, the highest bound for what is above it. None if there are no values."""
    total = sum(counts)
    if total <= 0 or min(counts) < 0:
        return None
    rank, below = share * total, 0
    for (low, high), count in zip(pairwise((0.0, *bounds)), counts, strict=False):
        if count and below + count >= rank:
            return low + (high - low) * (rank - below) / count
        below += count
    return bounds[-1]


class WorkerReports:
    """The newest report of each worker about itself, sent every few seconds, and the one before it."""

    def __init__(self) -> None:
        self._newest: dict[int, tuple[float, Mapping[str, int], Mapping[str, int] | None]] = {}

    def note(self, now: float, reports: Iterable[Mapping[str, int]]) -> None:
        """Takes the reports (WorkerUse) that a server has from its workers; repeated ones change nothing."""
        for report in reports:
            _, last, before = self._newest.get(report["worker"], (0.0, report, None))
            if report["sent"] > last["sent"]:  # else a repeated report, or another server's older one
                last, before = report, last
            self._newest[report["worker"]] = now, last, before

    def look(self, now: float, workers: Collection[int]) -> dict[int, list[float | None]]:
        """By id: steps that are not committed, the part of rows that a cache had, bytes for a step, shards in hand."""
        self._newest = {
            i: report for i, report in self._newest.items() if i in workers and now - report[0] < _REPORT_STALE_S
        }
        found: dict[int, list[float | None]] = {}
        for i, (_, last, before) in self._newest.items():
            rate = nbytes = None
            if before is not None:
                steps, pulled = last["clock"] - before["clock"], last["wanted"] - before["wanted"]
                moved = last["sent"] + last["received"] - before["sent"] - before["received"]
                nbytes = _rounded(moved / steps) if steps > 0 else None
                rate = _rounded(max(0, last["kept"] - before["kept"]) / pulled) if pulled > 0 else None
            found[i] = [last["clock"] - last["committed"], rate, nbytes, last["shards"]]
        return found


class Workers:
    """The clock of each worker, by its id, in its home range, as the head of that range says."""

    def __init__(self) -> None:
        self._clocks: dict[str, tuple[float, dict[int, int]]] = {}  # by server
        self._past: dict[int, deque[tuple[float, int]]] = {}

    def keep(self, ids: Collection[int]) -> None:
        """Forgets all other workers."""
        self._past = {i: past for i, past in self._past.items() if i in ids}

    def note(self, now: float, server: str, clocks: Iterable[tuple[int, int]]) -> None:
        """Takes the clocks of workers whose home ranges a server heads."""
        self._clocks[server] = now, dict(clocks)

    def look(
        self, now: float, workers: Sequence[WorkerInfo]
    ) -> tuple[dict[int, list[float | None]], float | None, float | None]:
        """By id: clock, steps behind the first of its application, seconds for a step; all workers' steps a second; how
        far the last one is behind."""
        self._clocks = {name: clocks for name, clocks in self._clocks.items() if now - clocks[0] < _STALE_S}
        at: dict[int, int] = {}
        for _, clocks in self._clocks.values():
            for worker, clock in clocks.items():
                at[worker] = max(clock, at.get(worker, 0))  # who headed its home before says less
        first: dict[str, int] = {}
        for w in workers:
            if w.id in at:
                first[w.app] = max(at[w.id], first.get(w.app, 0))
        found: dict[int, list[float | None]] = {}
        pace, lags = 0.0, [0]
        for w in workers:
            if w.id not in at:
                continue
            past = self._past.setdefault(w.id, deque())
            past.append((now, at[w.id]))
            while now - past[0][0] > _STEPS_S:
                past.popleft()
            span, steps = now - past[0][0], at[w.id] - past[0][1]
            lags.append(first[w.app] - at[w.id])
            found[w.id] = [at[w.id], lags[-1], _rounded(span / steps) if steps > 0 else None]
            pace += steps / span if span > 0 and steps > 0 else 0.0
        return found, pace if found else None, max(lags) if found else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else value if isinstance(value, int) else float(f"{value:.5g}")
