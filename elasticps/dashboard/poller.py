"""The poller: follows the store, asks each server every second, and feeds a model. One serves any number of viewers.

Connections to servers are kept. That one breaks is the first sign of a death, seen at no cost; after the view that
follows, the servers concerned are asked as often as can be for two seconds, to tell when they went on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any

import grpc

from coordinator.connect import open_store
from coordinator.core import fields
from coordinator.core.errors import CoordinationError
from coordinator.core.keys import CONFIG
from coordinator.core.store import Change, Reset, Store
from coordinator.core.url import parse
from coordinator.grpc_limits import task_cancelled
from elasticps.admin import admin_pb2, admin_pb2_grpc
from elasticps.admin.client import generation_of, open_channel
from elasticps.dashboard.core.model import Model
from elasticps.dashboard.fanout import Fanout
from elasticps.dashboard.prometheus import read_past
from elasticps.errors import CheckpointError, ConfigError, Error, KernelsMissing
from elasticps.security import credentials_of

if TYPE_CHECKING:
    from elasticps.security.credentials import Credentials

log = fields.logger(__name__)

POLL_S = 1.0
TIMEOUT_S = 3.0
URGENT_S = 0.03  # between two questions to who is about to go on after a loss
WORKERS_A_SECOND = 100  # with more of them servers are asked more rarely where each is
TABLES_S = 10.0
CATALOG_S = 15.0
RETRY_S = 0.5
REQUESTS_AT_ONCE = 32

_FIELDS = tuple(field.name for field in admin_pb2.StatusResponse.DESCRIPTOR.fields)
_ACTIVE = tuple(field.name for field in admin_pb2.ActivityResponse.DESCRIPTOR.fields)
_USE = admin_pb2.WorkerUse.DESCRIPTOR.fields
_HOT_TABLE = ("name", "sampled", "keys", "counts")
_TABLE = ("id", "rows_headed", "rows", "bytes", "candidates")


class ServerConnection:
    """A lasting connection to one incarnation of a server. waiting: a request has no answer yet; silent: the last
    request got none."""

    def __init__(
        self,
        name: str,
        incarnation: int,
        admin: str,
        credentials: Credentials | None,
        broken: Callable[[ServerConnection], None],
    ) -> None:
        self.name, self.incarnation, self.admin = name, incarnation, admin
        self.waiting = False
        self.silent = True
        self._credentials = credentials
        self._generation = generation_of(credentials)
        self._channel = open_channel(admin, credentials)
        self._stub = admin_pb2_grpc.AdminStub(self._channel)
        self._watch = asyncio.create_task(self._watching(broken), name=f"connection to {name}")

    @property
    def outdated(self) -> bool:
        """Whether newer certificates are there, so that it has to be made again."""
        return generation_of(self._credentials) != self._generation

    async def ask(self, method: str, request: Any, timeout_s: float) -> Any:
        """The server's answer; grpc.aio.AioRpcError if it gives none, grpc.aio.UsageError if closed meanwhile."""
        try:
            return await getattr(self._stub, method)(request, timeout=timeout_s)
        except asyncio.CancelledError:
            if task_cancelled():
                raise
            raise grpc.aio.UsageError(f"the connection to {self.admin} was closed") from None

    async def _watching(self, broken: Callable[[ServerConnection], None]) -> None:
        state = self._channel.get_state(try_to_connect=True)
        while True:
            await self._channel.wait_for_state_change(state)
            before, state = state, self._channel.get_state(try_to_connect=True)
            if before is grpc.ChannelConnectivity.READY and not self.silent:
                broken(self)

    async def close(self) -> None:
        """Closes the connection."""
        self._watch.cancel()
        await asyncio.gather(self._watch, return_exceptions=True)
        await self._channel.close(None)


class ClusterPoller:
    """Feeds `model`, and publishes its updates to viewers. checkpoints, prometheus: URLs of them, "" if unknown."""

    def __init__(self, url: str, model: Model, fanout: Fanout, checkpoints: str = "", prometheus: str = "") -> None:
        self._url = url
        self._model = model
        self._fanout = fanout
        self._checkpoints = checkpoints
        self._prometheus = prometheus
        self._credentials = credentials_of(url)
        self._peers: dict[tuple[str, int], ServerConnection] = {}
        self._limit = asyncio.Semaphore(REQUESTS_AT_ONCE)
        self._hurry = asyncio.Event()
        self.store: Store | None = None

    async def run(self) -> None:
        """Polls until cancelled; no outage ends it."""
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
        self._fanout.publish(self._model.take_updates())

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
        """Finds outages of the store, which its watch outlives in silence."""
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
        self._model.follow(now, change)
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
            requests = [self._ask(peer) for peer in self._peers.values()]
            if ticks % every == 0:
                requests += [self._ask_activity(peer) for peer in self._peers.values() if not peer.silent]
            ticks += 1
            await asyncio.wait(
                {asyncio.create_task(work) for work in requests} or {loop.create_future()}, timeout=POLL_S
            )
            self._model.tick(time.time())
            self._tell()
            due = max(due + POLL_S, loop.time() - POLL_S)
            await asyncio.sleep(max(0.0, due - loop.time()))

    async def _keep_peers(self) -> None:
        """Holds a connection to each known incarnation of a server, and to no other."""
        listed = {(n, s.info.incarnation): s.info.admin for n, s in self._model.fleet.servers.items() if s.info.admin}
        for key in [key for key, peer in self._peers.items() if key not in listed or peer.outdated]:
            await self._peers.pop(key).close()
        for key in listed.keys() - self._peers.keys():
            self._peers[key] = ServerConnection(*key, listed[key], self._credentials, self._broken)

    def _broken(self, peer: ServerConnection) -> None:
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

    async def _ask(self, peer: ServerConnection) -> None:
        if peer.waiting:  # still waiting: one question at a time
            return
        peer.waiting = True
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
            peer.waiting = False

    async def _ask_activity(self, peer: ServerConnection) -> None:
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

    async def _ask_tables(self, peer: ServerConnection) -> list[dict[str, Any]] | None:
        try:
            async with self._limit:
                answer = await peer.ask("Tables", admin_pb2.TablesRequest(), TIMEOUT_S)
        except (grpc.aio.AioRpcError, grpc.aio.UsageError):
            return None
        return [
            {name: getattr(table, name) for name in _TABLE} | {"evicted": dict(table.evicted)}
            for table in answer.tables
        ]

    async def ask_hot(self, seconds: float) -> dict[str, dict[str, Any] | None]:
        """What workers ask each server that answers for most in the next seconds (HotResponse); None: it is silent."""
        peers = [peer for peer in self._peers.values() if not peer.silent]
        answers = await asyncio.gather(*(self._ask_hot(peer, seconds) for peer in peers))
        return {peer.name: answer for peer, answer in zip(peers, answers, strict=True)}

    async def _ask_hot(self, peer: ServerConnection, seconds: float) -> dict[str, Any] | None:
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
        try:
            from elasticps.dashboard.checkpoints import CheckpointListing  # brings in obstore
        except KernelsMissing as error:
            self._model.catalog({"url": url, "error": str(error), "checkpoints": []})
            self._tell()
            return
        catalog = CheckpointListing(url)
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
