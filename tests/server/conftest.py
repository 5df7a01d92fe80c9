"""Servers in one event loop, over real sockets, under views made by hand; and a worker that speaks raw frames."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

import numpy as np
import pytest
import uvloop

from coordinator.core.differences import ViewDifference
from coordinator.core.view import Roster, ServerInfo, View, WorkerInfo
from elasticps.client.core.routing import Routes, plan_push
from elasticps.kernels.hashing import group_range, table_salt
from elasticps.model.optimizers import Accumulate
from elasticps.model.spec import TableSpec
from elasticps.server.core.headroom import NO_LIMIT, ServerMemory
from elasticps.server.options import LOG_BUDGET_BYTES, ServerOptions
from elasticps.server.server import Server
from elasticps.wire.frames import (
    ALL_RANGES,
    HEADER_BYTES,
    LAST,
    REFUSED,
    Header,
    Kind,
    block_head,
    grads_padding,
    json_body,
    json_frame,
    unpack_header,
)
from elasticps.wire.headers import GetViewHeader, PushHeader
from elasticps.wire.refusals import decode_refused
from elasticps.wire.rounds import round_body, round_close
from replication.progress import before_part

RANGES = 16
TABLE, DIM = 7, 3
SPEC = TableSpec("t", DIM, Accumulate())
WORKER = 5


Answer = asyncio.Future[tuple[Header, bytes]]


def plain(body: bytes) -> bytes:
    """Refused rows as JSON: why the first were refused, and as `rows` the keys of all by table."""
    refused = decode_refused(np.frombuffer(body, np.uint8), RANGES)
    rows: dict[int, list[int]] = {}
    for _, _, each in refused:
        for table, keys in each.keys.items():
            rows.setdefault(table, []).extend(keys.tolist())
    return json.dumps(refused[0][1] | {"rows": rows}).encode()


class Worker:
    """A connection to one server. refused: why the connection ended; unsolicited: frames that answer no request."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, id_: int = WORKER) -> None:
        self.id = id_
        self.reader, self.writer = reader, writer
        self.requests = 0
        self.answers: dict[int, asyncio.Future[tuple[Header, bytes]]] = {}
        self.views: list[View] = []
        self.known: dict[int, View] = {}  # these, and those under which it has written
        self.unsolicited: list[Header] = []
        self.refused = ""
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            await self._take_answers()
        except Exception as error:  # nothing that was asked will be answered
            for answer in self.answers.values():
                answer.set_exception(error)
                answer.exception()  # retrieved, should nobody ask
            raise

    async def _take_answers(self) -> None:
        while True:
            header = unpack_header(await self.reader.readexactly(HEADER_BYTES))
            body = await self.reader.readexactly(header.body)
            if header.kind == Kind.NEWER_VIEW:
                self.writer.write(GetViewHeader(max(self.known, default=0)).header().pack())
            elif header.kind in (Kind.VIEW, Kind.VIEW_DIFFERENCE):
                self.views.append(self._view(header, body[: header.items]))
                self.known[self.views[-1].epoch] = self.views[-1]
            elif header.kind == Kind.ERROR and not header.request:
                self.refused = json_body(body)["message"]
            elif header.request in self.answers:
                if header.kind == Kind.ERROR and header.flags & REFUSED:
                    body = plain(body)
                self.answers.pop(header.request).set_result((header, body))
            elif not header.request:
                self.unsolicited.append(header)

    def _view(self, header: Header, data: bytes) -> View:
        if header.kind == Kind.VIEW:
            return View.decode(data)
        difference = ViewDifference.decode(data)
        view = difference.apply(self.known[difference.base])
        assert view is not None
        return view

    def ask(self, header: Header, *body: bytes) -> Answer:
        self.requests += 1
        content = b"".join(body)
        self.writer.write(header._replace(request=self.requests, body=len(content)).pack() + content)
        answer: asyncio.Future[tuple[Header, bytes]] = asyncio.get_running_loop().create_future()
        self.answers[self.requests] = answer
        return answer

    def push(self, view: View, server: str, clock: int, keys: Sequence[int], value: float, **more: int) -> Answer:
        """Pushes `value` for those of `keys` that a server heads."""
        body = self._block(view, server, keys, value)
        header = PushHeader(0, view.epoch, clock, before_part(clock, 0), 1).header(0)
        return self.ask(header._replace(**more), body)

    def init(self, view: View, server: str, keys: Sequence[int], value: float) -> Answer:
        """Gives those of `keys` that a server heads, and that have no row yet, an initial value."""
        return self.ask(
            Header(Kind.INIT, ALL_RANGES, epoch=view.epoch, items=1), self._block(view, server, keys, value)
        )

    def _block(self, view: View, server: str, keys: Sequence[int], value: float) -> bytes:
        self.known[view.epoch] = view
        routes = Routes(view)
        share = next(s for s in routes.shares if view.servers[s.server].name == server)
        array = np.array(keys, np.int64)
        plan = plan_push(array, table_salt(TABLE), routes)
        mine = array[plan.order[plan.offsets[share.start] : plan.offsets[share.stop]]]
        grads = np.full((len(mine), DIM), value, np.float32)
        body = block_head(TABLE, len(mine), DIM, np.empty(0, np.float32)) + mine.tobytes() + grads.tobytes()
        return body + b"\0" * grads_padding(len(mine), DIM)

    async def close(self) -> None:
        self.task.cancel()
        self.writer.close()


def tell_time(server: Server, median_s: float, leader_s: float | None = None) -> None:
    """A leader tells a server the time by its own clock and by the median of all."""
    beat = GetViewHeader(0, 1, int(median_s if leader_s is None else leader_s), int(median_s))
    server.leaders.beat(cast(Any, None), beat.header(), np.empty(0, np.uint8))


class Group:
    """Some servers. Views go to all that run; `stop` cuts one off as a crash would."""

    def __init__(self) -> None:
        self.servers: dict[str, Server] = {}
        self.infos: dict[str, ServerInfo] = {}
        self.listeners: dict[str, Any] = {}
        self.workers: list[Worker] = []
        self.view: View | None = None
        self.roster = Roster(1, (WorkerInfo(WORKER, "w", 1, "default"),), "c")

    def enrol(self, count: int) -> list[int]:
        """Adds workers to the roster of servers started from now on; returns their ids."""
        ids = list(range(WORKER + 1, WORKER + 1 + count))
        infos = (WorkerInfo(id_, f"w{id_}", 1, "default") for id_ in ids)
        self.roster = Roster(1, (*self.roster.workers, *infos), "c")
        return ids

    async def start(
        self, name: str, incarnation: int = 1, log_budget_bytes: int = LOG_BUDGET_BYTES, memory: ServerMemory = NO_LIMIT
    ) -> Server:
        loop = asyncio.get_running_loop()
        sock = socket.create_server(("127.0.0.1", 0))
        port = sock.getsockname()[1]
        self.infos[name] = ServerInfo(name, incarnation, f"127.0.0.1:{port}")
        server = self.servers[name] = Server(
            self.infos[name], "c", RANGES, loop, ServerOptions(log_budget_bytes=log_budget_bytes, memory=memory)
        )
        server.follow(self.roster)
        self.listeners[name] = await server.streams.create_server(server.connection, sock=sock)
        return server

    def stop(self, name: str) -> Server:
        self.listeners.pop(name).close()
        server = self.servers.pop(name)
        server.close()
        return server

    def make_view(self, chain_of: Callable[[int], Sequence[str]], joining: Callable[[int], str] = lambda r: "") -> View:
        """The next view: chain and joining server of each range by name; `since` follows from the last one."""
        names = sorted(self.infos)
        chains = np.full((RANGES, 3), -1, np.int32)
        joins = np.full(RANGES, -1, np.int32)
        epoch = 1 if self.view is None else self.view.epoch + 1
        since = np.full(RANGES, epoch, np.int64)
        for r in range(RANGES):
            chain = [names.index(name) for name in chain_of(r)]
            chains[r, : len(chain)] = chain
            joins[r] = names.index(joining(r)) if joining(r) else -1
            if self.view is not None:
                old = self.view
                same = [old.servers[i].name for i in old.chains[r] if i >= 0] == list(chain_of(r))
                joined = old.servers[old.joining[r]].name if old.joining[r] >= 0 else ""
                if same and joined == joining(r):
                    since[r] = old.since[r]
        infos = tuple(self.infos[name] for name in names)
        self.view = View("c", epoch, RANGES, 3, infos, chains, joins, since, "by hand")
        return self.view

    def adopt(self, view: View) -> None:
        for server in list(self.servers.values()):
            tell_time(server, time.time())
            server.adopt(view)

    async def connect(
        self,
        name: str,
        *,
        create: bool = True,
        base: int = 0,
        worker: int = WORKER,
        worker_name: str = "",
        app: str = "default",
    ) -> Worker:
        host, _, port = self.infos[name].address.rpartition(":")
        spoken = Worker(*await asyncio.open_connection(host, int(port)), worker)
        self.workers.append(spoken)
        known = {info.id: info.name for info in self.roster.workers}
        hello = {"cluster": "c", "worker": worker, "name": worker_name or known.get(worker, "w"), "app": app}
        spoken.writer.write(json_frame(Kind.HELLO, hello))
        await spoken.ask(Header(Kind.JOIN, LAST, clock=base))
        if create:
            assert self.view is not None
            body = json_frame(Kind.CREATE, {"id": TABLE, "spec": SPEC.to_json()})[HEADER_BYTES:]
            header, answer = await asyncio.wait_for(spoken.ask(Header(Kind.CREATE, epoch=self.view.epoch), body), 10)
            assert header.kind == Kind.OK, json_body(answer)
        return spoken

    async def connect_head(self, name: str, app: str = "default") -> Worker:
        """Connects as the head of an application's group range, which has synchronous rounds closed."""
        host, _, port = self.infos[name].address.rpartition(":")
        spoken = Worker(*await asyncio.open_connection(host, int(port)), 0)
        self.workers.append(spoken)
        assert self.view is not None
        to = self.infos[name].member
        head = self.view.servers[self.view.heads[group_range(app, self.view.ranges)]].member
        hello = {"cluster": "c", "rounds": list(head), "to": list(to)}
        spoken.writer.write(json_frame(Kind.HELLO, hello, epoch=self.view.epoch))
        return spoken

    async def close_round(self, clock: int, workers: Sequence[int], app: str = "default") -> None:
        """Has all servers close a round of these workers."""
        assert self.view is not None
        name, answers = app.encode(), []
        for server in self.servers:
            head = await self.connect_head(server, app)
            frame, body = round_close(1, self.view.epoch, name, clock, 0, round_body(name, (), workers))
            answers.append(head.ask(unpack_header(frame), bytes(body)))
        for header, _ in [await asyncio.wait_for(answer, 10) for answer in answers]:
            assert header.kind == Kind.ROUND_CLOSED

    async def close(self) -> None:
        for worker in self.workers:
            await worker.close()
        for name in list(self.servers):
            self.stop(name)
        await asyncio.sleep(0)


async def until(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    """Waits for a condition."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "the condition did not come true"
        await asyncio.sleep(0.002)


Run = Callable[[Callable[[Group], Awaitable[None]]], None]


@pytest.fixture
def run() -> Run:
    """Runs a coroutine function with a group of servers."""

    def runner(test: Callable[[Group], Awaitable[None]]) -> None:
        async def main() -> None:
            group = Group()
            try:
                await test(group)
            finally:
                await group.close()

        uvloop.run(main())

    return runner
