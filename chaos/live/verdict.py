"""Which promises a run has broken, by its records. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from chaos.live import observer as observer
from chaos.live.figures import Life
from chaos.live.load import READ
from chaos.live.nemesis import FaultRecord
from chaos.live.watch import Seen
from elasticps.admin.audit import AuditReport

GIVEN_UP_S = 3.2  # a worker that is away for so long counts as dead: it renews its lease of 5 s three times meanwhile
ADMIT_S = 15.0  # a worker that is back learns of that within this time
FORGOTTEN = ("the cluster no longer knows worker", "the cluster has forgotten it")  # the errors with which it ends


def excused(faults: list[FaultRecord]) -> dict[str, list[tuple[float, float]]]:
    """Returns for each worker when it could not go on because a fault had hit the worker itself."""
    times: dict[str, list[tuple[float, float]]] = {}
    for fault in faults:
        if fault.role == "worker" and fault.began >= 0:
            times.setdefault(fault.target, []).append((fault.began, max(fault.began, fault.ended) + 1.0))
    return times


def given_up(name: str, faults: Iterable[FaultRecord], now: float, text: str) -> str:
    """Says why a worker may end by itself now, with the error `text`: the cluster takes a worker for dead that it does
    not hear, and tells it so when it is back. "" if the worker was not away, or ended for another reason."""
    if not any(words in text for words in FORGOTTEN):
        return ""
    for fault in faults:
        if fault.role != "worker" or fault.target != name or fault.action.do not in ("pause", "cut") or fault.began < 0:
            continue
        back = fault.ended if fault.ended >= 0 else now
        if back - fault.began >= GIVEN_UP_S and now - back < ADMIT_S:
            return f"it had been away for {back - fault.began:.1f} s, and counts as dead after about {GIVEN_UP_S:g}"
    return ""


def epochs_back(views: Iterable[Seen], faults: Iterable[FaultRecord]) -> list[str]:
    """Says where a view was not newer than the one before. An etcd that has lost its data may lack the last view:
    nobody acts on that, since servers tell the new etcd what they know."""
    renewed = [(fault.began, fault.ended) for fault in faults if fault.action.do == "etcd-new" and fault.began >= 0]
    wrong, newest = list[str](), -1
    for seen in views:
        if seen.epoch <= newest and not any(began <= seen.at <= ended for began, ended in renewed):
            follows = f"was followed by another one of epoch {seen.epoch}: {seen.reason}"
            wrong.append(f"at {seen.at:.1f} s the view of epoch {newest} {follows}")
        newest = seen.epoch
    return wrong


def audit_words(report: AuditReport) -> list[str]:
    """Says what an audit has found wrong, a sentence each."""
    words = [f"range {each.range} at {each.server}: {each.text}" for each in report.differences[:10]]
    if len(report.differences) > 10:
        words.append(f"and {len(report.differences) - 10} more replicas differ")
    words += [
        f"worker {worker.name or worker.id} was told of step {worker.acknowledged}, "
        f"but only {worker.applied} is everywhere"
        for worker in report.workers if worker.broken
    ]  # fmt: skip
    if report.unjudged:
        r, why = next(iter(report.unjudged.items()))
        words.append(f"{len(report.unjudged)} ranges could not be audited: range {r}: {why}")
    if report.short:
        words.append(f"{report.short} ranges have fewer than {report.replicas} replicas")
    words += [f"{name} was left out of the view while all was compared: {why}" for name, why in report.lost.items()]
    if report.idle and not report.short and not report.unjudged:
        words.append(
            f"no replica was compared with another one, though there should be {report.replicas} of each range"
        )
    return words


def unwatched(incarnations: Iterable[Life], faults: Iterable[FaultRecord]) -> list[str]:
    """Whether there was an observer, but it has seen nothing, and nothing was done to it."""
    if any(fault.target == observer.NAME for fault in faults):
        return []
    blind = [life for life in incarnations if life.worker == observer.NAME and not (life.records["kind"] == READ).any()]
    return ["the observer has read nothing, so nobody has seen what others read"] if blind else []
