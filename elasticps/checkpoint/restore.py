"""Brings a cluster, or some tables of one, back from a checkpoint.

Servers read what they head, and log it (`elasticps.server.roles.restoring`). This asks them to, again after failures,
until every range has said that all its replicas have it. While a whole cluster comes back the key `restoring` is in
etcd, and workers wait at `connect`. Tables are registered when their rows are there; so nobody ever sees a part of one.

One drives at a time: who holds the key `restore-driver`, under a lease; the number of that write is the one by which
servers refuse what an older one still says, and what a newer one has ended.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from coordinator.core import fields
from coordinator.core.errors import CoordinationError, Damaged, LeaseLost, StoreUnavailable
from coordinator.core.keys import (
    CONFIG,
    LAST_WORKER,
    ON_LOSS,
    RATES,
    RESTORE_FILLS,
    RESTORING,
    TABLES,
    VIEW,
    WORKERS,
    config_of,
    number_of,
    record_key,
    shown,
    view_of,
)
from coordinator.core.names import worker_name
from coordinator.core.store import Store
from coordinator.core.view import ServerInfo, View
from coordinator.membership import new_number
from elasticps.admin import admin_pb2
from elasticps.admin.client import ask_restore
from elasticps.checkpoint import catalog
from elasticps.checkpoint.contents import Contents, to_bits
from elasticps.checkpoint.manifest import Manifest
from elasticps.checkpoint.storage import Storage
from elasticps.errors import CheckpointError, ClusterUnreachable, ConfigError
from elasticps.security import credentials_of
from elasticps.system import background
from elasticps.system.coordination import opened
from elasticps.system.progress import Progress, reporting

if TYPE_CHECKING:
    from elasticps.security.credentials import Credentials

log = fields.logger(__name__)

DRIVER = "restore-driver"
RESTORED = "restored"  # what this cluster was made from
LEASE_S = 10.0
STUCK_S = 120.0  # without any row or range
_ASK_S = 5.0
_PAUSE_S = 0.1

Request = admin_pb2.RestoreRequest
Tell = Callable[[int, int], None]


@dataclass(frozen=True)
class RestorePlan:
    """What is brought back, as it stands under `restoring`. tables: (id in the checkpoint, id here) by
    "application/name"; whole: clocks, rounds and shards too; rows: that its files have."""

    url: str
    cut: int
    sum: str
    tables: Mapping[str, tuple[int, int]]
    whole: bool
    rows: int

    def to_json(self, done: float = 0.0, error: str = "") -> bytes:
        """done: the part of it that is there, for those who wait."""
        return json.dumps(asdict(self) | {"done": round(done, 3), "error": error}).encode()

    @classmethod
    def from_json(cls, data: bytes) -> RestorePlan:
        """The inverse; Damaged if it makes no sense."""
        try:
            return msgspec.json.decode(data, type=cls)
        except (ValueError, RecursionError, msgspec.MsgspecError) as error:
            raise Damaged(
                f"the key {RESTORING} (or {RESTORED}) in etcd holds {shown(data)}, which makes no sense ({error}): "
                "delete it; a restore that was under way is begun again with `elasticps restore URL`"
            ) from None


@dataclass(frozen=True)
class RestoreReport:
    """What came back: tables by "application/name", and workers with the clocks that they go on above."""

    cut: int
    rows: int
    tables: tuple[str, ...]
    workers: Mapping[str, int]


def restore_cluster(
    url: str,
    source: str,
    *,
    cut: int | None = None,
    tables: Collection[str] = (),
    progress: Progress = False,
    timeout_s: float = 30.0,
) -> RestoreReport:
    """`restore` of the checkpoint at `source` into the cluster at `url`, whose store may take `timeout_s` to answer.
    progress: True shows a bar, a function gets (rows done, rows)."""
    with reporting(progress, "restore", "rows") as report:
        return background.run(_restore_url(url, source, cut, tables, report.update, timeout_s))


async def _restore_url(
    url: str, source: str, cut: int | None, tables: Collection[str], tell: Tell, timeout_s: float
) -> RestoreReport:
    credentials = credentials_of(url)
    async with opened(url, timeout_s) as store:
        return await restore(store, source, cut=cut, tables=tables, credentials=credentials, tell=tell)


async def begin_with(store: Store, source: str) -> None:
    """Before a cluster is made: it is to begin with the newest checkpoint at `source`, and nobody may come before."""
    storage = Storage(source)
    manifest = (await asyncio.to_thread(catalog.chain, storage))[-1]
    plan = RestorePlan(storage.url, manifest.cut, manifest.cluster, {}, whole=True, rows=0)
    await store.compare_and_set(RESTORING, plan.to_json(), expect=0)


async def keep_restoring(store: Store, credentials: Credentials | None = None) -> None:
    """What a coordinator does: goes on with the restore that has begun, whoever has died meanwhile, until it is done.
    Workers that wait are told what holds it up."""
    reported = ""
    while (entry := await store.get(RESTORING)) is not None:
        try:
            plan = RestorePlan.from_json(entry.value)
        except Damaged as error:  # whoever may delete it does; this coordinator may lead meanwhile
            if str(error) != reported:
                log.error("a restore cannot go on", reason=error)
            reported = str(error)
            await asyncio.sleep(_PAUSE_S)
            continue
        try:
            report = await restore(store, plan.url, cut=plan.cut, credentials=credentials, patient=True)
            log.info("restored", url=plan.url, cut=report.cut, tables=len(report.tables), rows=report.rows)
        except (CheckpointError, ClusterUnreachable) as error:
            log.warning("cannot restore", url=plan.url, cut=plan.cut, error=error)
            await store.compare_and_set(RESTORING, plan.to_json(error=str(error)), expect=entry.revision)
            await asyncio.sleep(LEASE_S / 4)
        except (ConfigError, CoordinationError) as error:  # another coordinator is at it, or etcd is away
            log.info("waits with restoring", error=error)
            await asyncio.sleep(LEASE_S / 4)


async def restore(
    store: Store,
    url: str,
    *,
    cut: int | None = None,
    tables: Collection[str] = (),
    credentials: Credentials | None = None,
    tell: Tell = lambda rows, of: None,
    patient: bool = False,
) -> RestoreReport:
    """Brings back the checkpoint of a cut (the newest, if none is named) from `url`: all of it into a cluster that has
    no tables and no workers; or only some tables, by name or "application/name", into one that has none of these
    names. What was begun by somebody who is gone is gone on with. tell(n, m) hears that n of m rows are there.

    patient: what fails is tried again for ever, as a storage may come back; else nothing is left of it. Raises
    CheckpointError for what cannot be read or does not fit, ConfigError for tables that cannot be had,
    ClusterUnreachable when servers do not get on with it.
    """
    storage = Storage(url)
    contents = await asyncio.to_thread(opened_at, storage, cut)
    async with driving(store) as attempt:
        driver = _Restore(store, contents, attempt, credentials, tell)
        return await driver.run(tables, patient)


def opened_at(storage: Storage, cut: int | None) -> Contents:
    """A checkpoint all of whose files are there, as long as they were written, with their headers."""
    contents = Contents(storage, catalog.chain(storage, cut))
    for manifest in contents.chain:
        if lacks := catalog.lacking(storage, manifest):
            raise CheckpointError(f"checkpoint {manifest.cut} cannot be restored: {lacks}")
    for id_, _ in contents.manifest.tables.values():
        contents.layers(id_)
    return contents


class Attempt(NamedTuple):
    """Of who restores. serial: of this try, above those of all before it."""

    serial: int
    lease: int


@asynccontextmanager
async def driving(store: Store) -> AsyncIterator[Attempt]:
    """As the only one."""
    lease = await store.grant(LEASE_S)
    renewal = asyncio.create_task(_renew(store, lease))
    try:
        while True:
            config = await store.get(CONFIG)
            revision = await store.compare_and_set(DRIVER, b"", expect=0, lease=lease)
            if revision is None:
                raise ConfigError(
                    f"somebody restores cluster {store.cluster!r} already; if they died, try again in {LEASE_S:g} s"
                )
            if await store.get(CONFIG) == config:
                break
            await store.delete(DRIVER, expect=revision)
        yield Attempt(number_of(config, revision), lease)
    finally:
        renewal.cancel()
        with suppress(StoreUnavailable):
            await store.revoke(lease)


async def _renew(store: Store, lease: int) -> None:
    with suppress(LeaseLost):  # then somebody else goes on, and servers refuse us
        while True:
            await asyncio.sleep(LEASE_S / 4)
            with suppress(StoreUnavailable):
                await store.keep_alive(lease)


class _Restore:
    def __init__(
        self, store: Store, contents: Contents, attempt: Attempt, credentials: Credentials | None, tell: Tell
    ) -> None:
        self._store = store
        self._contents = contents
        self._manifest = contents.manifest
        self._serial, self._lease = attempt
        self._credentials = credentials
        self._tell = tell

    async def run(self, names: Collection[str], patient: bool) -> RestoreReport:
        plan = await self._begin(names)
        while True:
            try:
                async with self._unmoved():
                    rows = await self._fill(plan)
                await self._end(())
                break
            except CheckpointError as error:
                if not patient:
                    await self._undo(plan)
                    raise
                if plan.whole:
                    await self._store.put(RESTORING, plan.to_json(error=str(error)))
                await asyncio.sleep(LEASE_S / 4)
            except BaseException:
                if not patient:
                    await self._undo(plan)
                raise
        await self._register(plan)
        workers = self._manifest.workers if plan.whole else {}
        return RestoreReport(
            plan.cut, rows, tuple(plan.tables), {name: worker.clock for name, worker in workers.items()}
        )

    # --- what is to be done -------------------------------------------------------------------------------------------

    async def _begin(self, names: Collection[str]) -> RestorePlan:
        entry = await self._store.get(RESTORING)
        if entry is not None:
            begun = RestorePlan.from_json(entry.value)
            if names or (begun.url, begun.cut) != (self._contents.storage.url, self._manifest.cut):
                raise ConfigError(
                    f"cluster {self._store.cluster!r} is being restored from checkpoint {begun.cut} of {begun.url}: "
                    "finish that first, with the same command"
                )
            if begun.tables or not self._manifest.tables:
                return begun
        chosen = self._chosen(names)
        await self._check_free(chosen, bool(names))
        view = await self._view()
        if why := _unsuited(self._manifest, view.ranges):
            raise CheckpointError(f"checkpoint {self._manifest.cut} of {self._contents.storage.url}: {why}")
        if not names:
            await self._raise_base()
            await self._store.put(RESTORING, self._plan({}, whole=True).to_json())
        try:
            ids = [id_ for id_, _ in chosen.values()]
            taken = {id_ for answer in await self._ask_all(Request.LOOK, new=ids) for id_ in answer.taken}
            tables = {
                name: (id_, await new_number(self._store) if names or id_ in taken else id_)
                for name, (id_, _) in chosen.items()
            }
        except BaseException:
            if not names and entry is None:
                await self._store.delete(RESTORING)
            raise
        plan = self._plan(tables, whole=not names)
        if plan.whole:
            await self._store.put(RESTORING, plan.to_json())
        return plan

    def _plan(self, tables: Mapping[str, tuple[int, int]], *, whole: bool) -> RestorePlan:
        rows = sum(self._contents.rows(old) for old, _ in tables.values())
        return RestorePlan(self._contents.storage.url, self._manifest.cut, self._manifest.cluster, tables, whole, rows)

    def _chosen(self, names: Collection[str]) -> dict[str, tuple[int, Any]]:
        tables = self._manifest.tables
        if not names:
            return dict(tables)
        full = [name if "/" in name else f"default/{name}" for name in names]
        if missing := [name for name in full if name not in tables]:
            has = ", ".join(sorted(tables)) or "none"
            raise ConfigError(f"checkpoint {self._manifest.cut} has no table {missing[0]!r}; it has {has}")
        return {name: tables[name] for name in full}

    async def _check_free(self, chosen: Collection[str], some: bool) -> None:
        there = {entry.key.removeprefix(TABLES) for entry in (await self._store.list(TABLES)).entries}
        if clash := sorted(there & set(chosen) if some else there):
            raise ConfigError(
                f"cluster {self._store.cluster!r} has a table {clash[0]!r}: drop it first (elasticps tables drop)"
                + ("" if some else ", or name the tables that are to be restored (--tables)")
            )
        if some:
            return
        if workers := [
            worker_name(entry.key.removeprefix(WORKERS)) for entry in (await self._store.list(WORKERS)).entries
        ]:
            raise ConfigError(f"worker {workers[0]!r} is connected: a whole cluster is restored before workers come")

    async def _raise_base(self) -> None:
        """New ids are above all that the checkpoint speaks of."""
        while True:
            entry = await self._store.get(CONFIG)
            if entry is None:
                raise ClusterUnreachable(f"there is no cluster {self._store.cluster!r}: is a coordinator running?")
            config = config_of(entry)
            if config.base >= self._manifest.newest_id:
                return
            raised = replace(config, base=config.base + self._manifest.newest_id)
            if await self._store.compare_and_set(CONFIG, raised.to_json(), expect=entry.revision) is not None:
                return

    @asynccontextmanager
    async def _unmoved(self) -> AsyncIterator[None]:
        """Meanwhile the coordinator does not even out what servers have, as long as this driver lives."""
        await self._store.put(RESTORE_FILLS, b"", lease=self._lease)
        try:
            yield
        finally:
            with suppress(StoreUnavailable):  # else it goes with the lease
                await self._store.delete(RESTORE_FILLS)

    # --- servers ------------------------------------------------------------------------------------------------------

    async def _fill(self, plan: RestorePlan) -> int:
        """Returns when every range has all; how many rows those are."""
        loop = asyncio.get_running_loop()
        view = await self._view()
        done: set[int] = set()
        rows: dict[str, int] = {}
        moved_s, before, reported = loop.time(), (0, 0), -1.0
        old, new = [old for old, _ in plan.tables.values()], [new for _, new in plan.tables.values()]
        while len(done) < view.ranges:
            view = await self._view()
            heads = [view.servers[i] for i in sorted({*view.heads.tolist()}) if i >= 0]
            request = {
                "url": plan.url, "cut": plan.cut, "old": old, "new": new, "whole": plan.whole,
                "done": to_bits(done, view.ranges),
            }  # fmt: skip
            answers = await asyncio.gather(*(self._ask(server, Request.GO, **request) for server in heads))
            for server, answer in zip(heads, answers, strict=True):
                if isinstance(answer, ClusterUnreachable):
                    continue
                if answer.failed:
                    raise CheckpointError(f"server {server.name} cannot restore: {answer.failed}")
                done.update(answer.ranges)
                rows[f"{server.name}-{server.incarnation}"] = answer.rows
            there = min(sum(rows.values()), plan.rows)
            self._tell(there, plan.rows)
            part = (there + len(done)) / (plan.rows + view.ranges)
            if plan.whole and part >= reported + 0.01:
                await self._store.put(RESTORING, plan.to_json(part))
                reported = part
            if (len(done), there) != before:
                moved_s, before = loop.time(), (len(done), there)
            elif loop.time() - moved_s > STUCK_S:
                silent = [str(answer) for answer in answers if isinstance(answer, ClusterUnreachable)]
                raise ClusterUnreachable(
                    f"nothing was restored for {STUCK_S:g} s, {len(done)} of {view.ranges} ranges are: "
                    + (silent[0] if silent else "see `elasticps status`")
                )
            await asyncio.sleep(_PAUSE_S)
        self._tell(plan.rows, plan.rows)
        return sum(rows.values())

    async def _end(self, dropped: Collection[int]) -> None:
        """No server does anything for it from now on."""
        while True:
            answers = await self._ask_all(Request.END, new=list(dropped))
            if all(answer.complete for answer in answers):
                return
            await asyncio.sleep(_PAUSE_S)

    async def _undo(self, plan: RestorePlan) -> None:
        """Whoever goes on with it, should this die, takes other tables: servers make none again that was dropped."""
        if plan.whole:
            await self._store.put(RESTORING, replace(plan, tables={}).to_json())
        async with asyncio.timeout(_ASK_S * 2):
            await self._end([new for _, new in plan.tables.values()])
        if plan.whole:
            await self._store.delete(RESTORING)

    async def _ask_all(self, act: Request.Act, **fields: Any) -> list[admin_pb2.RestoreResponse]:
        """Asks every server of the view, until each has answered that still is in it."""
        while True:
            view = await self._view()
            answers = await asyncio.gather(*(self._ask(server, act, **fields) for server in view.servers))
            found = [answer for answer in answers if not isinstance(answer, ClusterUnreachable)]
            if len(found) == len(answers):
                return found
            await asyncio.sleep(_PAUSE_S)

    async def _ask(
        self, server: ServerInfo, act: Request.Act, **fields: Any
    ) -> admin_pb2.RestoreResponse | ClusterUnreachable:
        request = Request(act=act, serial=self._serial, **fields)
        try:
            return await ask_restore(server.admin, _ASK_S, request, self._credentials)
        except ClusterUnreachable as error:
            return error

    async def _view(self) -> View:
        while True:
            entry = await self._store.get(VIEW)
            if entry is not None:
                return view_of(entry)
            await asyncio.sleep(_PAUSE_S)

    # --- etcd ---------------------------------------------------------------------------------------------------------

    async def _register(self, plan: RestorePlan) -> None:
        """Tables have names, workers their past, and the cluster is open."""
        made: dict[str, int] = {}
        for name, (old, new) in plan.tables.items():
            spec = self._manifest.spec(old).to_json()
            document = {"id": new, "spec": spec, "creator": 0, "by": "", "ready": True}
            revision = await self._store.compare_and_set(TABLES + name, json.dumps(document).encode(), expect=0)
            if revision is not None:
                made[TABLES + name] = revision
            elif not plan.whole:
                for key, known in made.items():
                    # An entry that goes without this mark was lost, and the leader would put it back.
                    going = json.dumps({**document, "dropping": True}).encode()
                    marked = await self._store.compare_and_set(key, going, expect=known)
                    if marked is not None:
                        await self._store.delete(key, expect=marked)
                await self._undo(plan)
                raise ConfigError(f"somebody has made a table {name!r} meanwhile: nothing was restored")
            for prefix in (RATES, ON_LOSS):
                setting = self._manifest.settings.get(prefix + name)
                if setting is not None and setting["table"] == old:
                    await self._store.put(prefix + name, json.dumps({**setting, "table": new}).encode())
        if not plan.whole:
            return
        for entry in (await self._store.list(LAST_WORKER)).entries:
            if worker_name(entry.key.removeprefix(LAST_WORKER)) not in self._manifest.workers:
                await self._store.delete(entry.key)
        for name, worker in self._manifest.workers.items():
            past = {"id": worker.id, "base": worker.base, "trained": worker.trained, "steps": worker.steps}
            await self._store.put(record_key(name), json.dumps(past).encode())
        await self._store.put(RESTORED, plan.to_json(1.0))
        await self._store.delete(RESTORING)


def _unsuited(manifest: Manifest, ranges: int) -> str:
    """Why a checkpoint cannot go into a cluster with so many ranges, "" if it can."""
    width = max(1, manifest.ranges // ranges)
    for id_, progress in manifest.left_out.items():
        if any(len({*progress[at : at + width]}) > 1 for at in range(0, manifest.ranges, width)):
            return (
                f"worker id {id_} was lost as the cut was taken, with a step in some of the {manifest.ranges} ranges: "
                f"restore it into {manifest.ranges} ranges or more"
            )
    return ""
