"""Makes a checkpoint: a consistent cut, written by servers while training goes on, published when it is all there."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence, Set
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from coordinator.core import fields
from coordinator.core.errors import StoreUnavailable
from coordinator.core.keys import NEWEST_CHECKPOINT, ON_LOSS, RATES, RESTORING
from coordinator.core.names import app_of_worker
from coordinator.core.records import left_out, read
from coordinator.core.store import Store
from coordinator.core.view import ServerInfo
from coordinator.membership import last_workers
from elasticps.admin.cuts import CutClient
from elasticps.admin.interface import CutWritten, WrittenFile
from elasticps.checkpoint import catalog
from elasticps.checkpoint.contents import Contents
from elasticps.checkpoint.cuts import HOLD_S, ConsistentCut, CutServer, CutTaker, GivenUp
from elasticps.checkpoint.manifest import FileEntry, Manifest, WorkerEntry, check_table
from elasticps.checkpoint.storage import Storage
from elasticps.errors import CheckpointError, Error
from elasticps.model.spec import TableSpec
from elasticps.security import credentials_of
from elasticps.system import background
from elasticps.system.coordination import opened, read_tables, read_view
from elasticps.system.progress import Progress, reporting
from replication.chain import Member
from replication.progress import touched_clock

if TYPE_CHECKING:
    from elasticps.security.credentials import Credentials

log = fields.logger(__name__)

MOST_INCREMENTS = 16
ATTEMPTS = 3
_WAIT_S = 0.5  # a server answers when it has written all, or after so long
_PAUSE_S = 0.05  # between questions to one that does not
_ANSWER_S = 5.0
_SILENT_S = 5.0  # a server that writes, is in the view and does not answer for so long


class WritingServer(CutServer, Protocol):
    """A server that also writes its ranges of a cut to files."""

    async def written(self, cut: int, wait_s: float) -> CutWritten:
        """Begins to write, if it has not begun; returns its progress when it is done, or after `wait_s`."""


Connect = Callable[[ServerInfo], WritingServer]
Tell = Callable[[int], None]
"""Is called with the number of ranges written since the last call."""


def checkpoint_cluster(
    url: str, place: str, *, full: bool = False, hold_s: float = HOLD_S, timeout_s: float = 30.0,
    tell: Tell = lambda more: None, progress: Progress = False,
) -> Manifest:  # fmt: skip
    """Makes a checkpoint of the cluster at `url`, at `place`. progress: True shows a bar, a function gets (ranges
    written, None). Raises ConfigError, ClusterUnreachable, CheckpointError."""

    def heard(ranges: int) -> None:
        tell(ranges)
        report.advance(ranges)

    with reporting(progress, "checkpoint", "ranges") as report:
        return background.run(_of_url(url, place, full, hold_s, timeout_s, heard))


async def _of_url(url: str, place: str, full: bool, hold_s: float, timeout_s: float, tell: Tell) -> Manifest:
    credentials = credentials_of(url)
    async with opened(url, timeout_s) as store, by_grpc(credentials) as connect:
        return await checkpoint(store, place, connect, full=full, hold_s=hold_s, tell=tell)


@asynccontextmanager
async def by_grpc(credentials: Credentials | None) -> AsyncIterator[Connect]:
    """Connects to servers by gRPC; closes all connections at the end."""
    clients: dict[str, CutClient] = {}

    def connect(server: ServerInfo) -> CutClient:
        if server.admin not in clients:
            clients[server.admin] = CutClient(server.admin, _ANSWER_S, credentials)
        return clients[server.admin]

    try:
        yield connect
    finally:
        for client in clients.values():
            await client.close()


async def checkpoint(
    store: Store, url: str, connect: Connect, *, full: bool = False, hold_s: float = HOLD_S,
    tell: Tell = lambda more: None, if_changed: bool = False,
) -> Manifest:  # fmt: skip
    """Makes a checkpoint at `url` of the cluster whose store this is. Raises CheckpointError.

    It is an increment on the newest one there, if that is this cluster's and the chain does not become too long; else,
    or with `full`, it has all rows. if_changed: where nothing has changed, none is made, and the newest is returned."""
    if await store.get(RESTORING) is not None:
        raise CheckpointError(f"cluster {store.cluster!r} is being restored: a part of it is no checkpoint")
    storage = Storage(url)
    attempts = ATTEMPTS
    while True:
        attempts -= 1
        try:
            return await _attempt(store, storage, connect, full, hold_s, tell, if_changed)
        except GivenUp:
            if not attempts:
                raise


async def _attempt(
    store: Store, storage: Storage, connect: Connect, full: bool, hold_s: float, tell: Tell, if_changed: bool
) -> Manifest:  # fmt: skip
    cluster = (await read_view(store, CheckpointError)).cluster
    restored = await _restored(store)
    since, floor, foreign = await asyncio.to_thread(_before, storage, cluster, full, restored)
    cut = await CutTaker(store, connect, hold_s).take(storage.url, since, floor=floor, foreign=foreign)
    files = await _written(store, cut, connect, tell)
    torn = await _restored(store) - restored  # rows of theirs came as the cut passed, perhaps
    manifest = await _manifest(store, cut, [file for file in files if file.table not in torn])
    if lacks := await asyncio.to_thread(catalog.lacking, storage, manifest):
        raise GivenUp(f"checkpoint {cut.number}: {lacks}: somebody has deleted or replaced what servers have written")
    if cut.since:
        try:
            await asyncio.to_thread(catalog.chain, storage, cut.since)
        except CheckpointError as error:
            raise GivenUp(f"checkpoint {cut.number}: what it adds to is gone: {error}") from error
    if if_changed and (same := await asyncio.to_thread(_unchanged, storage, manifest)) is not None:
        await asyncio.to_thread(storage.delete, [f"{manifest.folder}/{file.path}" for file in files])
        await asyncio.to_thread(storage.drop_empty, manifest.folder)
        with suppress(StoreUnavailable):
            await store.put(NEWEST_CHECKPOINT, newest(same.cut, manifest.time, storage.url))
        return same
    try:
        Manifest.decode(manifest.encode(), f"the manifest of checkpoint {cut.number}")
        await asyncio.to_thread(catalog.check_segment, storage, manifest)
    except CheckpointError as error:
        raise GivenUp(f"checkpoint {cut.number} cannot be read back: {error}") from error
    if not await asyncio.to_thread(catalog.publish, storage, manifest):
        await asyncio.to_thread(storage.delete, [f"{manifest.folder}/{file.path}" for file in manifest.files])
        raise GivenUp(f"{storage.url} has a checkpoint {cut.number} that somebody else has made meanwhile")
    try:
        await asyncio.to_thread(catalog.read_back, storage, manifest)
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint {cut.number} was written, but cannot be read back: {error}") from error
    with suppress(StoreUnavailable):  # it is made all the same
        await store.put(NEWEST_CHECKPOINT, newest(manifest.cut, manifest.time, storage.url))
    try:
        await asyncio.to_thread(catalog.clean, storage, cluster=cluster, below=cut.number)
    except CheckpointError as error:  # as much as has been left stays, and the next one tries again
        log.warning("cannot delete what given-up checkpoints have left", url=storage.url, error=error)
    return manifest


def _unchanged(storage: Storage, manifest: Manifest) -> Manifest | None:
    """The checkpoint before, if this one adds nothing to it: no row, step, deletion, sweep, table or setting. Else
    None."""
    if not manifest.since or manifest.rows or _swept(storage, manifest):
        return None
    before = catalog.read(storage, manifest.since)
    same = replace(manifest, cut=before.cut, since=before.since, time=before.time, files=before.files)
    return before if same.encode() == before.encode() else None


def _swept(storage: Storage, manifest: Manifest) -> bool:
    """Whether an increment has sweeps: they come without a step of anybody."""
    contents, growing = Contents(storage, [manifest]), [id_ for id_, spec in manifest.tables.values() if spec.usage]
    return any(sweeps for id_ in growing for layer in contents.layers(id_) for sweeps in layer.sweeps.values())


async def _restored(store: Store) -> set[int]:
    """Ids of tables that were restored from a checkpoint: their rows were there before they were registered."""
    return {table.id for table in await read_tables(store) if table.restored}


def _before(storage: Storage, cluster: str, full: bool, restored: set[int]) -> tuple[int, int, set[int]]:
    """(the cut that the next checkpoint adds to, 0 for none; the highest number that is used there; higher ones that
    other things have). restored: tables that came from a checkpoint: they may have had rows as one was taken that does
    not have them."""
    floor, foreign = catalog.used_numbers(storage)
    if full or not floor:
        return 0, floor, foreign
    try:
        chain = catalog.chain(storage)
    except CheckpointError:  # what is there cannot be built on
        return 0, floor, foreign
    has = {id_ for id_, _ in chain[-1].tables.values()}
    fits = chain[-1].cluster == cluster and len(chain) <= MOST_INCREMENTS and restored <= has
    return chain[-1].cut if fits else 0, floor, foreign


async def _written(store: Store, cut: ConsistentCut, connect: Connect, tell: Tell) -> list[WrittenFile]:
    """Waits until servers have written their ranges. Each question also makes a server begin, and go on."""
    writers = [_Writer(cut, server, connect(server)) for server in cut.view.servers if server.member in cut.states]
    reported = 0
    while True:
        listed = {server.member for server in (await read_view(store, CheckpointError)).servers}
        unfinished = [writer for writer in writers if writer.done < writer.ranges]
        answered = await asyncio.gather(*(writer.ask(listed) for writer in unfinished))
        done = sum(writer.done for writer in writers)
        tell(done - reported)
        reported = done
        if all(writer.done == writer.ranges for writer in writers):
            return [file for writer in writers for file in writer.files]
        if not all(answered):
            await asyncio.sleep(_PAUSE_S)


class _Writer:
    """The progress of one server: how many ranges it has to write, and how many are done."""

    def __init__(self, cut: ConsistentCut, info: ServerInfo, server: WritingServer) -> None:
        self.ranges = sum(len(one.ranges) for one in cut.states[info.member].taken)
        self.done = 0
        self.files: Sequence[WrittenFile] = ()
        self._cut = cut.number
        self._info = info
        self._server = server
        self._heard_s = asyncio.get_running_loop().time()

    async def ask(self, listed: Set[Member]) -> bool:
        """Asks the server for its progress; returns whether it answered. Raises GivenUp if it cannot finish. listed:
        the servers in the view."""
        if self._info.member not in listed:
            raise self._given_up("is gone")
        now = asyncio.get_running_loop().time()
        try:
            answer = await self._server.written(self._cut, _WAIT_S)
        except Error as error:
            if now - self._heard_s > _SILENT_S:
                raise self._given_up(f"is silent: {error}") from error
            return False
        self._heard_s = now
        if answer.incarnation != self._info.incarnation or answer.ranges != self.ranges:
            raise self._given_up("has lost ranges that it was to write")
        if answer.writing is None or answer.writing.failed:
            why = "it knows nothing of it" if answer.writing is None else answer.writing.failed
            raise self._given_up(f"has given up: {why}")
        self.done, self.files = answer.writing.ranges_done, answer.writing.files
        return True

    def _given_up(self, why: str) -> GivenUp:
        return GivenUp(f"checkpoint {self._cut}: server {self._info.name}, which writes {self.ranges} ranges, {why}")


def newest(cut: int, time_s: float, url: str = "") -> bytes:
    """The document under NEWEST_CHECKPOINT."""
    return json.dumps({"cut": cut, "time": time_s, "url": url}).encode()


async def _manifest(store: Store, cut: ConsistentCut, files: list[WrittenFile]) -> Manifest:
    verdict, ranges = cut.verdict, range(cut.view.ranges)
    apps = {worker.id: worker.app for worker in cut.roster}
    workers: dict[str, WorkerEntry] = {}
    for name, entry in (await last_workers(store)).items():
        with left_out():
            past = read(entry.key, entry.value, id=int, base=int, trained=int, steps=int)
            id_ = past["id"]
            if id_ in verdict.clocks or id_ in verdict.left_out:
                out = verdict.left_out.get(id_, {})
                clock = verdict.clocks.get(id_, max(map(touched_clock, out.values()), default=0))
                app = app_of_worker(name)
                if apps.get(id_, app) != app:
                    raise ValueError(f"{entry.key} has id {id_}, of a worker of application {apps[id_]}")
                workers[name] = WorkerEntry(id_, app, clock, past["base"], past["trained"], past["steps"]).checked()
    named = {worker.id for worker in workers.values()}
    homes: list[Any] = [home for state in cut.states.values() for _, home in sorted(state.homes.items())]
    closed = {app: max(rounds.values()) for app, rounds in verdict.rounds_torn.items()} | dict(verdict.rounds)
    tables = await _tables(store, {table for table, covered in _covered(files).items() if covered == set(ranges)})
    ids = {id_ for id_, _ in tables.values()}
    return Manifest(
        cluster=cut.view.cluster,
        cut=cut.number,
        since=cut.since,
        ranges=cut.view.ranges,
        time=time.time(),
        tables=tables,
        settings=await _settings(store),
        files=tuple(
            FileEntry(f.path, f.table, f.bytes, f.header, f.rows, f.blake2b, f.ranges) for f in files if f.table in ids
        ),
        workers=workers,
        former={id_: clock for id_, clock in verdict.clocks.items() if id_ not in named},
        left_out={id_: tuple(progress[r] for r in ranges) for id_, progress in verdict.left_out.items()},
        records=tuple(
            (id_, one.clock, one.committed, tuple(one.ranges.tolist())) for id_, one in sorted(verdict.records)
        ),
        closed=closed,
        groups=tuple(group for home in homes for group in home["groups"]),
        shards=tuple(one for home in homes for one in home["shards"]),
    )


def _covered(files: Iterable[WrittenFile]) -> dict[int, set[int]]:
    """The ranges that were written of each table: not all of one that was made as the cut passed, and had no rows."""
    found: dict[int, set[int]] = {}
    for file in files:
        found.setdefault(file.table, set()).update(file.ranges)
    return found


async def _tables(store: Store, written: Set[int]) -> dict[str, tuple[int, TableSpec]]:
    """The written tables that are registered and not being dropped. Raises SpecError for an optimizer that is missing
    here."""
    found = {}
    for table in await read_tables(store):
        if table.id in written:
            spec = TableSpec.from_json(table.spec)
            with left_out():
                check_table(table.name, spec)
                found[table.name] = table.id, spec
    return found


async def _settings(store: Store) -> dict[str, dict[str, Any]]:
    """What was set for tables. None of it is nested: what can just be read may be too deep to be written."""
    found = {}
    for entry in [entry for prefix in (RATES, ON_LOSS) for entry in (await store.list(prefix)).entries]:
        with left_out():
            setting = read(entry.key, entry.value, table=int)
            found[entry.key] = {key: value for key, value in setting.items() if not isinstance(value, (dict, list))}
    return found
