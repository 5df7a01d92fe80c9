"""Compares all replicas of every range of a live cluster, and the acknowledged steps of workers with the applied ones.

Replicas are equal only at the same place of their logs. So a mark goes down the logs of all ranges, each replica notes
digests when the mark passes, and the digests are compared. What workers know to be committed is read before the mark is
sent: when the mark passes, all of it must be in every full replica.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from coordinator.core.keys import ROSTER, roster_of
from coordinator.core.store import Store
from coordinator.core.view import ServerInfo, View
from coordinator.membership import list_drains
from elasticps.admin import admin_pb2
from elasticps.admin.client import fetch_marked, take_mark
from elasticps.errors import ClusterUnreachable
from elasticps.security import credentials_of
from elasticps.system import background
from elasticps.system.coordination import opened, read_view
from replication.chain import Member
from replication.progress import ERASER
from replication.step_records import home_range

if TYPE_CHECKING:
    from elasticps.security.credentials import Credentials

MARK_BITS = 62
_PAUSE_S = 0.1  # between rounds
_LOOK_S = 0.25  # between looks whether silent servers are still in the view


class Found(NamedTuple):
    """A range at a mark, as one replica noted it. clocks: worker id -> steps completed in this range."""

    seq: int
    digest: bytes
    clocks: Mapping[int, int]


@dataclass(frozen=True)
class Difference:
    """A range whose replicas are not equal, though they should be. server: which one differs from the head."""

    range: int
    server: str
    text: str


@dataclass(frozen=True)
class WorkerClocks:
    """What one worker knows to be committed, and what is there.

    name          "" if it is not in the roster any more
    acknowledged  it knows that its steps up to here are committed; 0: no server has heard from it lately
    applied       its steps up to here are in every full replica of its home range, which each step ticks. Other ranges
                  have those of them that tick them: a head takes none without the one before
    pending       replicas of that range without any of its steps, while others have some: its first step is under way,
                  or never ended
    broken        it knows more steps to be committed than there are
    """

    id: int
    name: str
    acknowledged: int
    applied: int
    pending: int
    broken: bool

    @property
    def lag(self) -> int:
        """Applied steps that the worker does not know yet to be committed; 0 for one that has left: nobody knows what
        it knew last."""
        return max(0, self.applied - self.acknowledged) if self.name else 0


@dataclass(frozen=True)
class AuditReport:
    """What an audit found.

    ranges, replicas  as the cluster is meant to be; epoch: of the view at the end
    compared          replicas that were compared
    alone             ranges with one replica, which was compared with nothing
    short             ranges with fewer replicas than wanted: no failure
    unjudged          range -> why it was not compared in time
    lost              servers that held ranges and were left out of the view without a request, with the view's reason
    """

    cluster: str
    epoch: int
    ranges: int
    replicas: int
    compared: int
    alone: int
    short: int
    differences: tuple[Difference, ...]
    workers: tuple[WorkerClocks, ...]
    unjudged: Mapping[int, str]
    lost: Mapping[str, str]
    seconds: float

    @property
    def clean(self) -> bool:
        """Every range was compared, all replicas are equal, no promise was broken, and no server was lost."""
        return not (self.wrong or self.unjudged or self.lost or self.idle)

    @property
    def idle(self) -> bool:
        """Whether no range had two replicas to compare, though the cluster is meant to have several."""
        return self.replicas > 1 and self.alone + len(self.unjudged) == self.ranges

    @property
    def wrong(self) -> bool:
        """Whether a replica differs, or a step that a worker knows to be committed is missing."""
        return bool(self.differences) or any(worker.broken for worker in self.workers)

    def as_dict(self) -> dict[str, Any]:
        """The report as plain values."""
        workers = [_as_dict(worker) for worker in self.workers]
        unjudged = [{"range": r, "reason": text} for r, text in self.unjudged.items()]
        return {**asdict(self), "clean": self.clean, "idle": self.idle, "workers": workers, "unjudged": unjudged}


def _as_dict(worker: WorkerClocks) -> dict[str, Any]:
    fields = {"told" if name == "acknowledged" else name: value for name, value in asdict(worker).items()}
    return fields | {"lag": worker.lag}


def audit(url: str, timeout_s: float = 30.0) -> AuditReport:
    """Audits the cluster at `url`. Training may go on meanwhile.

    Ranges whose view changes are marked again, until `timeout_s`; what could not be compared by then is in `unjudged`.
    Raises ConfigError for an unusable URL, ServerError if the caller may not audit, ClusterUnreachable or
    StoreUnavailable when etcd does not answer.
    """
    return background.run(_audit_url(url, timeout_s))


async def _audit_url(url: str, timeout_s: float) -> AuditReport:
    credentials = credentials_of(url)
    async with opened(url, timeout_s) as store:
        return await audit_store(store, timeout_s, credentials)


async def audit_store(store: Store, timeout_s: float, credentials: Credentials | None = None) -> AuditReport:
    """As `audit`, for an open store."""
    began = time.monotonic()
    deadline = began + timeout_s
    view = await read_view(store)
    answers, _ = await _ask(store, view.servers, 0, deadline, credentials)
    promised = _newest(answers.values())
    judged, lost = Judged(view.ranges), dict[str, str]()
    while True:
        drains = await list_drains(store)  # a request is taken away when it is done
        await _round(store, view, judged, deadline, credentials)
        before, view = view, await read_view(store)
        lost |= _lost(before, view, drains | await list_drains(store))
        names = await _names(store)
        workers = judged.workers(promised, names)
        settled = not judged.open and not any(worker.pending and worker.name for worker in workers)
        if settled or time.monotonic() + _PAUSE_S >= deadline:
            break
        if not judged.open:  # a first step is under way: it is either there a little later, or never
            judged.open.update(range(view.ranges))
        await asyncio.sleep(_PAUSE_S)
    short = int((view.chains < 0).any(axis=1).sum())
    return AuditReport(
        view.cluster, view.epoch, view.ranges, view.replicas, judged.compared, judged.alone, short,
        tuple(judged.differences), tuple(workers),
        {r: judged.reasons.get(r, "no time was left") for r in sorted(judged.open)}, lost,
        time.monotonic() - began,
    )  # fmt: skip


@dataclass
class Judged:
    """What has been compared so far. open: ranges not compared yet; reasons: why not, by range."""

    ranges: int
    open: set[int] = field(default_factory=set)
    reasons: dict[int, str] = field(default_factory=dict)
    differences: list[Difference] = field(default_factory=list)
    _replicas: dict[int, list[Found]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.open = set(range(self.ranges))

    @property
    def compared(self) -> int:
        """Replicas compared."""
        return sum(len(replicas) for replicas in self._replicas.values())

    @property
    def alone(self) -> int:
        """Ranges of which there was one replica only."""
        return sum(len(replicas) == 1 for replicas in self._replicas.values())

    def judge(self, before: View, after: View, found: Mapping[str, Mapping[int, Found]]) -> None:
        """Compares the replicas of the open ranges that had the same chain from before the mark until after it.

        found: server -> range -> what it noted at the mark; servers that did not answer are missing.
        """
        for r in sorted(self.open):
            chain = [before.servers[i].name for i in before.chains[r].tolist() if i >= 0]
            if not chain:
                self.reasons[r] = "it has no replica"
            elif before.since[r] != after.since[r]:
                self.reasons[r] = "its chain changed meanwhile"
            elif silent := [name for name in chain if name not in found]:
                self.reasons[r] = f"{', '.join(silent)} did not answer"
            elif missing := [name for name in chain if r not in found[name]]:
                self.reasons[r] = f"the mark did not get to {', '.join(missing)}"
            else:
                replicas = [found[name][r] for name in chain]
                self.open.discard(r)
                self._replicas[r] = replicas
                self.differences = [known for known in self.differences if known.range != r]
                self.differences += compare(r, chain, replicas)

    def workers(self, promised: Mapping[int, int], names: Mapping[int, str]) -> list[WorkerClocks]:
        """The clocks of every worker that some range knows, from what was compared last of each range; without those
        whose home range could not be compared."""
        least: dict[int, int] = {}  # anywhere
        for replicas in self._replicas.values():
            for found in replicas:
                for worker, clock in found.clocks.items():
                    least[worker] = min(clock, least.get(worker, clock))
        homes = {worker: self._replicas.get(home_range(worker, self.ranges)) for worker in least if worker < ERASER}
        return [
            _clocks(worker, names.get(worker, ""), promised.get(worker, 0), least[worker], home)
            for worker, home in sorted(homes.items(), key=lambda one: one[0])
            if home is not None
        ]


def compare(r: int, chain: Sequence[str], replicas: Sequence[Found]) -> list[Difference]:
    """Compares the replicas of range r with its head, which is the first of them."""
    head = replicas[0]
    differences = []
    for server, found in zip(chain[1:], replicas[1:], strict=True):
        if found.seq != head.seq:
            text = f"the mark stands at operation {found.seq} of the log, at the head at {head.seq}"
        elif found.digest != head.digest:
            text = f"other rows than at the head {chain[0]} at operation {found.seq}"
        elif dict(found.clocks) != dict(head.clocks):
            workers = sorted(w for w in {*found.clocks, *head.clocks} if found.clocks.get(w) != head.clocks.get(w))
            text = f"other clocks than at the head {chain[0]} for worker id {', '.join(map(str, workers))}"
        else:
            continue
        differences.append(Difference(r, server, text))
    return differences


def _clocks(worker: int, name: str, acknowledged: int, somewhere: int, home: Sequence[Found]) -> WorkerClocks:
    """A worker starts above a base clock, which a range learns with its first push. So a home range that knows nothing
    of it breaks a promise only if the worker knows of a committed step that others have. somewhere: the least clock
    that a range has of it; home: the replicas of its home range."""
    clocks = [found.clocks[worker] for found in home if worker in found.clocks]
    pending = len(home) - len(clocks)
    least = min(clocks, default=somewhere)
    return WorkerClocks(
        worker,
        name,
        acknowledged,
        0 if pending else least,
        pending,
        acknowledged > least or (pending > 0 and acknowledged == least),
    )


async def _round(store: Store, view: View, judged: Judged, deadline: float, credentials: Credentials | None) -> None:
    """Sends one mark through the open ranges and compares what replicas noted at it."""
    mark = secrets.randbelow(1 << MARK_BITS) + 1
    heads = np.unique(view.heads[sorted(judged.open)])
    marked = {view.servers[i].member: _mark(view.servers[i], mark, deadline, credentials) for i in heads if i >= 0}
    await _while_listed(store, marked)
    holders = [view.servers[i] for i in np.unique(view.chains).tolist() if i >= 0]
    answers, unreachable = await _ask(store, holders, mark, deadline, credentials)
    found = {name: _found(answer) for name, answer in answers.items()}
    judged.judge(view, await read_view(store), found)
    for r in judged.open:
        chain = {view.servers[i].name for i in view.chains[r].tolist() if i >= 0}
        if texts := [unreachable[name] for name in sorted(chain & unreachable.keys())]:
            judged.reasons[r] = texts[0]


async def _mark(server: ServerInfo, mark: int, deadline: float, credentials: Credentials | None) -> None:
    with suppress(ClusterUnreachable):  # whether the mark got through is seen where it should have arrived
        await take_mark(server.admin, mark, _left(deadline), credentials)


async def _while_listed(store: Store, calls: Mapping[Member, Coroutine[Any, Any, None]]) -> None:
    """Waits for calls to servers, except those that are left out of the view meanwhile: they may never answer."""
    members = {asyncio.ensure_future(call): member for member, call in calls.items()}
    waiting = set(members)
    try:
        while waiting:
            done, waiting = await asyncio.wait(waiting, timeout=_LOOK_S)
            for call in done:
                call.result()
            if waiting:
                listed = {server.member for server in (await read_view(store)).servers}
                waiting = {call for call in waiting if members[call] in listed}
    finally:
        for call in members:
            call.cancel()
        await asyncio.gather(*members, return_exceptions=True)


async def _ask(
    store: Store, servers: Iterable[ServerInfo], mark: int, deadline: float, credentials: Credentials | None
) -> tuple[dict[str, admin_pb2.MarkedResponse], dict[str, str]]:
    """Asks servers what they noted at a mark. Returns the answers by name, and why the others did not answer."""
    answers: dict[str, admin_pb2.MarkedResponse] = {}
    unreachable: dict[str, str] = {}

    async def ask(server: ServerInfo) -> None:
        try:
            answer = await fetch_marked(server.admin, mark, _left(deadline), credentials)
        except ClusterUnreachable as error:
            unreachable[server.name] = f"{server.name}: {error}"
        else:
            if answer.incarnation == server.incarnation:
                answers[server.name] = answer
            else:
                unreachable[server.name] = f"{server.name} is incarnation {answer.incarnation} now"

    await _while_listed(store, {server.member: ask(server) for server in servers})
    return answers, unreachable


def _found(answer: admin_pb2.MarkedResponse) -> dict[int, Found]:
    return {
        each.range: Found(each.seq, each.digest, dict(zip(each.workers, each.clocks, strict=True)))
        for each in answer.ranges
    }


def _newest(answers: Collection[admin_pb2.MarkedResponse]) -> dict[int, int]:
    promised: dict[int, int] = {}
    for answer in answers:
        for known in answer.told:
            promised[known.worker] = max(known.clock, promised.get(known.worker, 0))
    return promised


def _lost(before: View, after: View, drains: Mapping[str, int]) -> dict[str, str]:
    """Servers that were in a chain and have left the view without a request to drain."""
    listed = {server.member for server in after.servers}
    held = (before.servers[i] for i in np.unique(before.chains).tolist() if i >= 0)
    gone = (server for server in held if server.member not in listed and drains.get(server.name) != server.incarnation)
    return {server.name: after.reason for server in gone}


async def _names(store: Store) -> dict[int, str]:
    entry = await store.get(ROSTER)
    return {} if entry is None else {worker.id: worker.name for worker in roster_of(entry).workers}


def _left(deadline: float) -> float:
    return max(0.1, deadline - time.monotonic())
