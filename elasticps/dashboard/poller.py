"""What asks: it follows the store, asks each server every second, and feeds a model. One, whatever number looks on.

Connections to servers are kept. That one breaks is the first sign of a death, seen at no cost; after the view that
follows, the servers concerned are asked as often as can be for two seconds, to tell when they went on.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing, suppress
from typing import Any

import grpc

from coordinator.connect import open_store
from coordinator.core import fields
from coordinator.core.errors import CoordinationError
from coordinator.core.keys import CONFIG
from coordinator.core.store import Change, Delete, Put, Reset, Store
from coordinator.core.url import parse
from elasticps.admin import admin_pb2
from elasticps.dashboard.fanout import Fanout
from elasticps.dashboard.model import Model
from elasticps.dashboard.past import read_past
from elasticps.dashboard.peer import Peer
from elasticps.errors import CheckpointError, ConfigError, Error
from elasticps.security import credentials_of

log = fields.logger(__name__)

POLL_S = 1.0
TIMEOUT_S = 3.0
URGENT_S = 0.03  # between two questions to who is about to go on after a loss
WORKERS_A_SECOND = 100  # with more of them servers are asked more rarely where each is
TABLES_S = 10.0
CATALOG_S = 15.0
RETRY_S = 0.5
ASKED_AT_ONCE = 32

_FIELDS = tuple(field.name for field in admin_pb2.StatusResponse.DESCRIPTOR.fields)
_ACTIVE = tuple(field.name for field in admin_pb2.ActivityResponse.DESCRIPTOR.fields)
_USE = admin_pb2.WorkerUse.DESCRIPTOR.fields
_HOT_TABLE = ("name", "sampled", "keys", "counts")
_TABLE = ("id", "rows_headed", "rows", "bytes")


class Poller:
    """Feeds `model`, and tells viewers its news. checkpoints, prometheus: URLs of them, "" if unknown."""

    def __init__(self, url: str, model: Model, fanout: Fanout, checkpoints: str = "", prometheus: str = "") -> None:
        self._url = url
        self._model = model
        self._fanout = fanout
        self._checkpoints = checkpoints
        self._prometheus = prometheus
        self._credentials = credentials_of(url)
        self._peers: dict[tuple[str, int], Peer] = {}
        self._limit = asyncio.Semaphore(ASKED_AT_ONCE)
        self._hurry = asyncio.Event()
        self.store: Store | None = None

    async def run(self) -> None:
        """Until cancelled; no outage ends it."""
        works = [self._follow(), self._poll(), self._watch_closely(), self._look_at_tables()]
        if self._checkpoints:
            works.append(self._look_at_checkpoints(self._checkpoints))
        if self._prometheus:
            works.append(self._look_back(self._prometheus))
        try:
            async with asyncio.TaskGroup() as group:
                for work in works:
                    group.create_task(work)
        finally:
            for peer in self._peers.values():
                await peer.close()
            if self.store is not None:
                await self.store.close()

    def _tell(self) -> None:
        self._fanout.publish(self._model.take_news())

    # --- the store --------------------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        while True:
            try:
                self.store = self.store or await open_store(self._url, timeout_s=TIMEOUT_S, call_timeout_s=TIMEOUT_S)
                listing = await self.store.list("")
                self._note(Reset(listing))
                async with (
                    aclosing(self.store.watch("", after=listing.revision)) as changes,
                    asyncio.TaskGroup() as group,
                ):
                    probe = group.create_task(self._probe(self.store))
                    async for change in changes:
                        self._note(change)
                    probe.cancel()
            except CoordinationError as error:
                self._model.store_fails(time.time(), str(error))
                self._tell()
            await asyncio.sleep(RETRY_S)

    async def _probe(self, store: Store) -> None:
        """The watch outlives outages of the store, and says nothing of them."""
        while True:
            try:
                await store.get(CONFIG)
                self._model.store_answers(time.time())
            except CoordinationError as error:
                self._model.store_fails(time.time(), str(error))
            self._tell()
            await asyncio.sleep(POLL_S)

    def _note(self, change: Change) -> None:
        now = time.time()
        if isinstance(change, Reset):
            self._model.reset(now, ((entry.key, entry.value) for entry in change.listing.entries))
        elif isinstance(change, Put):
            self._model.put(now, change.entry.key, change.entry.value)
        elif isinstance(change, Delete):
            self._model.delete(now, change.key)
        if self._model.urgent(now):
            self._hurry.set()
        self._tell()

    # --- the servers ------------------------------------------------------------------------------------------------

    async def _poll(self) -> None:
        """Every second, at the same time for all, so that their rates are of one second."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        ticks = 0
        while True:
            await self._keep_peers()
            every = 1 + self._model.workers // WORKERS_A_SECOND
            asked = [self._ask(peer) for peer in self._peers.values()]
            if ticks % every == 0:
                asked += [self._ask_activity(peer) for peer in self._peers.values() if not peer.silent]
            ticks += 1
            await asyncio.wait({asyncio.create_task(work) for work in asked} or {loop.create_future()}, timeout=POLL_S)
            self._model.tick(time.time())
            self._tell()
            due = max(due + POLL_S, loop.time() - POLL_S)
            await asyncio.sleep(max(0.0, due - loop.time()))

    async def _keep_peers(self) -> None:
        """A connection to each incarnation of a server that there is."""
        wanted = {(n, s.info.incarnation): s.info.admin for n, s in self._model.fleet.servers.items() if s.info.admin}
        for key in [key for key, peer in self._peers.items() if key not in wanted or peer.outdated]:
            await self._peers.pop(key).close()
        for key in wanted.keys() - self._peers.keys():
            self._peers[key] = Peer(*key, wanted[key], self._credentials, self._broken)

    def _broken(self, peer: Peer) -> None:
        self._model.silent(time.time(), peer.name, peer.incarnation, f"the connection to {peer.admin} broke")
        self._tell()

    async def _watch_closely(self) -> None:
        while True:
            await self._hurry.wait()
            self._hurry.clear()
            while names := self._model.urgent(time.time()):
                await asyncio.gather(*(self._ask(p) for p in list(self._peers.values()) if p.name in names))
                self._tell()
                await asyncio.sleep(URGENT_S)

    async def _ask(self, peer: Peer) -> None:
        if peer.asked:  # still waiting: one question at a time
            return
        peer.asked = True
        try:
            async with self._limit:
                answer = await peer.ask("Status", admin_pb2.StatusRequest(), TIMEOUT_S)
            found = {name: getattr(answer, name) for name in _FIELDS}
            self._model.status(time.time(), peer.name, peer.incarnation, found)
            peer.silent = False
        except grpc.aio.AioRpcError as error:
            peer.silent = True
            text = error.details() or error.code().name.lower()
            self._model.silent(time.time(), peer.name, peer.incarnation, f"{peer.admin}: {text}")
        except grpc.aio.UsageError:
            pass  # closed meanwhile
        finally:
            peer.asked = False

    async def _ask_activity(self, peer: Peer) -> None:
        with suppress(grpc.aio.AioRpcError, grpc.aio.UsageError):  # `_ask` hears of it; an older server has none
            async with self._limit:
                answer = await peer.ask("Activity", admin_pb2.ActivityRequest(), TIMEOUT_S)
            self._model.activity(time.time(), peer.name, {name: _plain(getattr(answer, name)) for name in _ACTIVE})

    async def _look_at_tables(self) -> None:
        while True:
            peers = [peer for peer in self._peers.values() if not peer.silent]
            answers = await asyncio.gather(*(self._ask_tables(peer) for peer in peers))
            held = {peer.name: answer for peer, answer in zip(peers, answers, strict=True)}
            self._model.table_statuses({name: answer for name, answer in held.items() if answer is not None})
            self._tell()
            await asyncio.sleep(TABLES_S if held else POLL_S)

    async def _ask_tables(self, peer: Peer) -> list[dict[str, Any]] | None:
        try:
            async with self._limit:
                answer = await peer.ask("Tables", admin_pb2.TablesRequest(), TIMEOUT_S)
        except (grpc.aio.AioRpcError, grpc.aio.UsageError):
            return None
        return [{name: getattr(table, name) for name in _TABLE} for table in answer.tables]

    async def ask_hot(self, seconds: float) -> dict[str, dict[str, Any] | None]:
        """What workers ask each server that answers for most in the next seconds (HotResponse); None: it is silent."""
        peers = [peer for peer in self._peers.values() if not peer.silent]
        answers = await asyncio.gather(*(self._ask_hot(peer, seconds) for peer in peers))
        return {peer.name: answer for peer, answer in zip(peers, answers, strict=True)}

    async def _ask_hot(self, peer: Peer, seconds: float) -> dict[str, Any] | None:
        try:
            answer = await peer.ask("Hot", admin_pb2.HotRequest(seconds=seconds), seconds + TIMEOUT_S)
        except (grpc.aio.AioRpcError, grpc.aio.UsageError):
            return None
        tables = [{name: _plain(getattr(table, name)) for name in _HOT_TABLE} for table in answer.tables]
        ranges, counts = list(answer.ranges), list(answer.range_counts)
        return {"sampled": answer.sampled, "ranges": ranges, "range_counts": counts, "tables": tables}

    async def _look_back(self, prometheus: str) -> None:
        try:
            self._model.remember(await asyncio.to_thread(read_past, prometheus, self._model.name, time.time()))
        except Error as error:
            log.warning("the last hour is not known", reason=error)
        self._fanout.renew()

    # --- checkpoints ------------------------------------------------------------------------------------------------

    async def _look_at_checkpoints(self, url: str) -> None:
        from elasticps.dashboard.checkpoints import Catalog  # brings in obstore

        catalog = Catalog(url)
        while True:
            try:
                self._model.catalog(await asyncio.to_thread(catalog.look))
            except (CheckpointError, OSError) as error:
                self._model.catalog({"url": url, "error": str(error), "checkpoints": []})
            self._tell()
            await asyncio.sleep(CATALOG_S)


def _plain(value: Any) -> Any:
    if isinstance(value, (int, float, str)):
        return value
    return [each if isinstance(each, (int, float)) else {f.name: getattr(each, f.name) for f in _USE} for each in value]


def check_url(url: str) -> str:
    """The name of the cluster that a URL names. ConfigError for one that cannot be used."""
    try:
        return parse(url).cluster
    except ValueError as error:
        raise ConfigError(str(error)) from None
