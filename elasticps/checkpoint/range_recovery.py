"""Range recovery: ranges that lost every replica come back from the newest checkpoint, while all others are trained on.

The decision lies under the key `begin-anew` in etcd: which ranges, from which checkpoint, and which steps are lost with
them. The leader then empties their chains (`coordinator.core.planner`), has servers bring them back, and opens them to
workers when all rows are there. A new leader goes on with it.

What is lost. A range comes back with a worker's steps up to the checkpoint's. Those after it, up to the last one that
the worker knows to be committed, are missing there, and only there. A worker that lives sends again what it does not
know to be committed. The steps of a worker that has left nobody can send again, so those that the other ranges which
they tick have count as done.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from coordinator.core.data_loss import find_loss, spans
from coordinator.core.errors import Damaged
from coordinator.core.keys import NEWEST_CHECKPOINT, RANGE_RECOVERY, ROSTER, loss_key, roster_of, shown
from coordinator.core.records import left_out, read
from coordinator.core.store import Store
from coordinator.core.view import ServerInfo, View
from coordinator.membership import last_workers
from elasticps.admin import admin_pb2
from elasticps.admin.client import ask_restore
from elasticps.admin.cuts import read_sparse_steps
from elasticps.checkpoint.manifest import Manifest
from elasticps.checkpoint.restore import RESTORED, RestorePlan, opened_at
from elasticps.checkpoint.storage import Storage
from elasticps.errors import CheckpointError, ClusterUnreachable, ConfigError, Error
from elasticps.security import credentials_of
from elasticps.system import background
from elasticps.system.coordination import opened, read_servers, read_tables, read_view
from replication.chain import Member
from replication.progress import ERASER, MAX_CLOCK, PART_BITS
from replication.step_records import StepRecord, home_range, last_whole_step

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from elasticps.security.credentials import Credentials

ASK_S = 5.0
_AT_ONCE = 1024  # workers of one question
LOST = MAX_CLOCK << PART_BITS  # the progress of anybody in a range that is lost
_PAUSE_S = 0.1

Request = admin_pb2.RestoreRequest


class OverBudget(CheckpointError):
    """More steps would be lost than a table allows: a person has to allow it."""


@dataclass(frozen=True)
class Missing:
    """The steps of a worker that recovered ranges lack: those after `have`, up to `to`. to: 0 if only the worker itself
    knows."""

    name: str
    id: int
    have: int
    to: int

    @property
    def steps(self) -> int:
        """The number of missing steps."""
        return max(0, self.to - self.have)


@dataclass(frozen=True)
class RangeRecovery:
    """The recovery of some ranges, as it lies under `begin-anew`. given_up: members that a person has declared lost for
    good; time: when the checkpoint was made; tables: (id in the checkpoint or 0, id here, spec) by "application/name";
    floors: (worker, the clock up to which its steps count as done); error: why it is held up."""

    ranges: tuple[int, ...]
    given_up: tuple[tuple[str, int], ...]
    url: str
    cut: int
    time: float
    tables: Mapping[str, tuple[int, int, str]]
    floors: tuple[tuple[int, int], ...]
    workers: tuple[Missing, ...]
    error: str = ""

    def to_json(self) -> bytes:
        """The document for etcd."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> RangeRecovery:
        """The inverse of `to_json`. Raises Damaged for a document that makes no sense."""
        try:
            return msgspec.json.decode(data, type=cls)
        except (ValueError, RecursionError, msgspec.MsgspecError) as error:
            raise Damaged(
                f"the key {RANGE_RECOVERY} in etcd holds {shown(data)}, which makes no sense ({error}): delete it, "
                "and ask for the ranges again"
            ) from None

    @property
    def steps(self) -> int:
        """The most missing steps of any worker, as far as servers know."""
        return max((one.steps for one in self.workers), default=0)


@dataclass(frozen=True)
class _WorkerProgress:
    """How far workers have come in the ranges that are left. whole: by worker, the clock up to which all of its steps
    are there, in the ranges that they tick; committed: by worker, the newest clock that it knows to be committed."""

    whole: Mapping[int, int]
    committed: Mapping[int, int]


# --- what is to be done -----------------------------------------------------------------------------------------------


async def prepare(
    store: Store, ranges: Iterable[int], url: str, cut: int | None, given_up: Collection[tuple[str, int]],
    credentials: Credentials | None,
) -> RangeRecovery:  # fmt: skip
    """Plans the recovery of these ranges. url: of the checkpoints, "" for where the newest one went.

    Raises CheckpointError for a checkpoint that cannot be read or is another cluster's, ConfigError where there are
    synchronous rounds, ClusterUnreachable for servers that do not report how far workers are.
    """
    chosen = tuple(sorted(ranges))
    view = await read_view(store, ConfigError)
    url, restored = await _source(store, url)
    contents = await asyncio.to_thread(opened_at, Storage(url), cut)
    manifest = contents.manifest
    tables = await _tables(store, manifest, view.cluster, restored)
    registered = await read_servers(store)
    here = {server.member for server in registered}
    others = sorted({int(view.heads[r]) for r in range(view.ranges) if r not in set(chosen)} - {-1})
    heads = [view.servers[i] for i in others if view.servers[i].member in here]
    found = await _look(heads, np.isin(np.arange(view.ranges), chosen), credentials)
    if manifest.closed or manifest.groups or found is None:
        raise ConfigError(
            "there are synchronous rounds (BSP): a range that goes back alone would make them other than those of one "
            "process. Stop all workers, and restore the whole checkpoint into a new cluster"
        )
    floors, workers = await _missing(store, manifest, found)
    return RangeRecovery(
        chosen, tuple(sorted(given_up)), contents.storage.url, manifest.cut, manifest.time, tables, floors, workers
    )  # fmt: skip


async def _source(store: Store, url: str) -> tuple[str, RestorePlan | None]:
    entry, newest = await store.get(RESTORED), await store.get(NEWEST_CHECKPOINT)
    restored = None if entry is None else RestorePlan.from_json(entry.value)
    noted = ""
    with left_out():
        noted = "" if newest is None else str(read(newest.key, newest.value).get("url", ""))
    url = url or noted or ("" if restored is None else restored.url)
    if not url:
        raise CheckpointError(f"etcd knows of no checkpoint of cluster {store.cluster!r}: name its URL")
    return url, restored


async def _tables(
    store: Store, manifest: Manifest, identity: str, restored: RestorePlan | None
) -> dict[str, tuple[int, int, str]]:
    """All registered tables. A name that was given again is another table in the checkpoint."""
    if manifest.cluster == identity:
        there = {id_: id_ for id_, _ in manifest.tables.values()}
    elif restored is not None and (restored.sum, restored.cut) == (manifest.cluster, manifest.cut):
        there = {new: old for old, new in restored.tables.values()}
    else:
        raise CheckpointError(f"checkpoint {manifest.cut} is one of cluster {manifest.cluster}, not of {identity}")
    return {table.name: (there.get(table.id, 0), table.id, table.spec) for table in await read_tables(store)}


async def _look(
    heads: Collection[ServerInfo], lost: NDArray[np.bool_], credentials: Credentials | None
) -> _WorkerProgress | None:  # fmt: skip
    """Asks these servers how far workers are; None if there are synchronous rounds. lost: by range, bool [P]."""
    answers = await _ask(heads, credentials)
    if any(answer.rounds for answer in answers):
        return None
    committed: dict[int, int] = {}
    whole: dict[int, int] = {}
    known: dict[int, int] = {}
    records: dict[int, list[StepRecord]] = {}
    for answer in answers:
        for worker, clock, told in zip(answer.workers, answer.least, answer.told, strict=True):
            committed[worker] = max(committed.get(worker, 0), told)
            whole[worker] = min(whole.get(worker, clock), clock)
            known[worker] = known.get(worker, 0) + 1
        for worker, record in read_sparse_steps(answer.records):
            records.setdefault(worker, []).append(record)
    whole = {worker: clock if known[worker] == len(answers) else 0 for worker, clock in whole.items()}
    # Of sparse steps the records say where they should be. Ranges that are lost count as if they had them.
    sparse = sorted(records)
    for at in range(0, len(sparse), _AT_ONCE):
        some = sparse[at : at + _AT_ONCE]
        progress = np.tile(np.where(lost, LOST, 0), (len(some), 1))
        for answer in await _ask(heads, credentials, some):
            progress[:, list(answer.ranges)] = np.array(answer.progress, np.int64).reshape(len(some), -1)
        for worker, of in zip(some, progress, strict=True):
            whole[worker] = last_whole_step(whole[worker], home_range(worker, len(lost)), of, records[worker])
    return _WorkerProgress(whole, committed)


async def _ask(
    heads: Collection[ServerInfo], credentials: Credentials | None, workers: Collection[int] = ()
) -> list[admin_pb2.RestoreResponse]:
    """Asks these servers how far workers are, and of the workers that are named in each range."""
    request = Request(act=Request.LOOK, workers=workers)
    calls = (ask_restore(server.admin, ASK_S, request, credentials) for server in heads)
    return [answer for answer in await asyncio.gather(*calls) if answer.headed]


async def _missing(
    store: Store, manifest: Manifest, found: _WorkerProgress
) -> tuple[tuple[tuple[int, int], ...], tuple[Missing, ...]]:
    """The floors, and the missing steps of each worker."""
    entry = await store.get(ROSTER)
    roster = {} if entry is None else {w.id: w.name for w in roster_of(entry).workers}
    names = {worker.id: name for name, worker in manifest.workers.items()} | roster
    have = {worker.id: worker.clock for worker in manifest.workers.values()} | dict(manifest.former)
    lowest = min((worker.clock for worker in manifest.workers.values()), default=0)
    for name, each in (await last_workers(store)).items():
        with left_out():
            past = read(each.key, each.value, id=int, base=int)
            names.setdefault(past["id"], name)
            have.setdefault(past["id"], past["base"])
    floors: dict[int, int] = {}
    for worker in sorted(found.whole.keys() | roster.keys()):
        if worker < ERASER:
            told = found.committed.get(worker, 0)
            floors[worker] = told if worker in roster else max(told, found.whole[worker])
            have.setdefault(worker, min(lowest, floors[worker]))
    known = {worker: clock or found.whole.get(worker, 0) for worker, clock in floors.items()}
    workers = [
        Missing(names.get(worker, f"id {worker}"), worker, have[worker], to)
        for worker, to in known.items()
        if worker in roster or to > have[worker]
    ]
    return tuple((worker, clock) for worker, clock in floors.items() if clock), tuple(workers)


# --- what is done -----------------------------------------------------------------------------------------------------


class RecoveryDriver:
    """Has servers bring back the ranges that the view assigns to them. rows: brought back so far."""

    def __init__(self, store: Store, recovery: RangeRecovery, serial: int, credentials: Credentials | None) -> None:
        self._store = store
        self._recovery = recovery
        self._serial = serial
        self._credentials = credentials
        self._rows: dict[str, int] = {}

    @property
    def rows(self) -> int:
        return sum(self._rows.values())

    async def run(self) -> View:
        """Drives the recovery; returns the view in which all ranges have replicas again. Raises CheckpointError,
        ClusterUnreachable."""
        loop = asyncio.get_running_loop()
        heard_s = loop.time()
        filling: dict[Member, ServerInfo] = {}
        recovery = self._recovery
        tables = [(old, new, spec) for old, new, spec in recovery.tables.values()]
        request = Request(
            act=Request.GO, serial=self._serial, url=recovery.url, cut=recovery.cut, whole=True, anew=True,
            old=[old for old, _, _ in tables], new=[new for _, new, _ in tables],
            specs=[spec for _, _, spec in tables],
            workers=[worker for worker, _ in recovery.floors], clocks=[clock for _, clock in recovery.floors],
        )  # fmt: skip
        while True:
            view = await read_view(self._store)
            over = not (view.heads < 0).any()
            joiners = sorted({*view.joining[view.heads < 0].tolist()} - {-1})
            filling |= {view.servers[i].member: view.servers[i] for i in joiners}
            for server in filling.values() if over else [view.servers[i] for i in joiners]:
                try:
                    answer = await ask_restore(server.admin, ASK_S, request, self._credentials)
                except ClusterUnreachable as error:
                    if not over and loop.time() - heard_s > 4 * ASK_S:
                        raise ClusterUnreachable(f"ranges cannot be brought back: {error}") from error
                    continue
                heard_s = loop.time()
                if answer.failed and not over:
                    raise CheckpointError(f"server {server.name} cannot bring ranges back: {answer.failed}")
                self._rows[f"{server.name}-{server.incarnation}"] = answer.rows
            if over:
                return view
            await asyncio.sleep(_PAUSE_S)

    async def end(self) -> None:
        """Tells all servers that the recovery is over; those that do not answer are left alone."""
        view = await read_view(self._store)
        request = Request(act=Request.END, serial=self._serial)
        await asyncio.gather(
            *(ask_restore(server.admin, ASK_S, request, self._credentials) for server in view.servers),
            return_exceptions=True,
        )


def record(recovery: RangeRecovery, ranges: NDArray[np.int64], epoch: int, rows: int) -> dict[str, Any]:
    """The document about a loss, as it lies under `losses/<epoch>`."""
    return {
        "epoch": epoch,
        "time": time.time(),
        "url": recovery.url,
        "cut": recovery.cut,
        "cut_time": recovery.time,
        "ranges": ranges.tolist(),
        "rows": rows,
        "tables": sorted(recovery.tables),
        "lacking": sorted(name for name, (old, _, _) in recovery.tables.items() if not old),
        "workers": [asdict(one) for one in recovery.workers],
    }


# --- a person's command -----------------------------------------------------------------------------------------------

Tell = Callable[[str], None]


def restore_ranges(
    url: str, source: str, ranges: Collection[int] | None, *, cut: int | None = None, accept_loss: bool = False,
    tell: Tell = lambda text: None, timeout_s: float = 30.0,
) -> dict[str, Any]:  # fmt: skip
    """Recovers ranges of the cluster at `url` from a checkpoint; returns the document about the loss, as under
    `losses/`.

    ranges: None for all that lost every replica. source: "" for where the newest checkpoint went; cut: None for the
    newest. accept_loss: also ranges that a server may have which is only away. Returns when workers have the ranges.
    Raises ConfigError for ranges that are not lost, and what `prepare` raises; ClusterUnreachable if the leader does
    not do it within `timeout_s`."""
    return background.run(_restore_ranges(url, source, ranges, cut, accept_loss, tell, timeout_s))


async def _restore_ranges(
    url: str, source: str, ranges: Collection[int] | None, cut: int | None, accept_loss: bool, tell: Tell,
    timeout_s: float,
) -> dict[str, Any]:  # fmt: skip
    async with opened(url, timeout_s) as store:
        return await bring_back(
            store, source, ranges, cut=cut, accept_loss=accept_loss, credentials=credentials_of(url), tell=tell,
            timeout_s=timeout_s,
        )  # fmt: skip


async def bring_back(
    store: Store, source: str, ranges: Collection[int] | None, *, cut: int | None = None, accept_loss: bool = False,
    credentials: Credentials | None = None, tell: Tell = lambda text: None, timeout_s: float = 30.0,
) -> dict[str, Any]:  # fmt: skip
    """`restore_ranges` of the cluster whose store this is."""
    if (entry := await store.get(RANGE_RECOVERY)) is not None:
        recovery = RangeRecovery.from_json(entry.value)
        tell(f"{len(recovery.ranges)} ranges are being brought back already")
    else:
        chosen, given_up = await _chosen(store, ranges, accept_loss)
        recovery = await prepare(store, chosen, source, cut, given_up, credentials)
        if await store.compare_and_set(RANGE_RECOVERY, recovery.to_json(), expect=0) is None:
            raise ConfigError("somebody else has begun to bring ranges back just now")
    return await _wait(store, recovery, tell, timeout_s)


async def _chosen(
    store: Store, ranges: Collection[int] | None, accept_loss: bool
) -> tuple[list[int], set[tuple[str, int]]]:
    """The ranges to recover, and the members that are given up with them."""
    view = await read_view(store, ConfigError)
    loss = find_loss(view, await read_servers(store))
    lost, waiting = set(loss.lost.tolist()), set(loss.waiting.tolist())
    if ranges is None:
        chosen = lost | waiting if accept_loss else lost
    else:
        chosen = set(ranges)
    if fine := sorted(chosen - lost - waiting):
        raise ConfigError(
            f"range {fine[0]} of {view.ranges} "
            + ("has a replica: nothing of it is lost" if fine[0] < view.ranges else "does not exist")
        )
    if (away := chosen & waiting or (not chosen and waiting)) and not accept_loss:
        who = ", ".join(member.name for member in loss.away)
        raise ConfigError(
            f"ranges {spans(loss.waiting)} wait for {who}, which may have them: bring it back, and nothing is lost. "
            f"--accept-loss gives up what it has of {len(away)} of them"
        )
    if not chosen:
        raise ConfigError("no range is lost: nothing is to be brought back")
    return sorted(chosen), {(m.name, m.incarnation) for m in loss.away} if accept_loss else set()


async def _wait(store: Store, recovery: RangeRecovery, tell: Tell, timeout_s: float) -> dict[str, Any]:
    """Waits until the leader has recovered the ranges; returns the document about the loss."""
    loop = asyncio.get_running_loop()
    moved_s, before = loop.time(), ""
    while True:
        view, entry = await read_view(store), await store.get(RANGE_RECOVERY)
        coming = int((view.heads < 0).sum())
        epochs = view.recovery_epoch[list(recovery.ranges)]
        if entry is None:
            loss = await store.get(loss_key(int(epochs.max())))
            if loss is None:
                raise ClusterUnreachable("the ranges came back as they were, or somebody has ended this")
            found: dict[str, Any] = json.loads(loss.value)
            return found
        error = RangeRecovery.from_json(entry.value).error
        if error:
            raise CheckpointError(f"{error}; the leader goes on trying")
        now = f"{coming} ranges come back" if coming else "waits for the leader"
        if now != before:
            tell(now)
            moved_s, before = loop.time(), now
        if loop.time() - moved_s > timeout_s:
            if not coming:
                await store.delete(RANGE_RECOVERY, expect=entry.revision)
                raise ClusterUnreachable(
                    f"the leader does not give these ranges up: somebody who has them may live, or there is no leader; "
                    f"see `elasticps status` ({view.reason})"
                )
            raise ClusterUnreachable(f"{coming} ranges have not come back within {timeout_s:g} s; the leader goes on")
        await asyncio.sleep(_PAUSE_S)


def with_error(recovery: RangeRecovery, error: Error | None) -> RangeRecovery:
    """The same recovery with the error that holds it up, or without one."""
    return replace(recovery, error="" if error is None else str(error))
