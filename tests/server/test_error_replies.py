"""Each frame that a server answers with an ERROR is counted once, by kind and code, whichever part refuses it."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import elasticps.server
from elasticps.server.core.error_replies import CONNECTION, ErrorReplies
from elasticps.server.core.requests import RequestTicket
from elasticps.server.server import Server
from elasticps.wire.frames import HEADER_BYTES, Header, Kind, json_body, json_frame, unpack_header
from elasticps.wire.headers import PullHeader
from elasticps.wire.refusals import RefusedRows, why
from replication.effects import ClocksReply, Reply, Status
from replication.refusals import Refused
from tests.server.conftest import TABLE, Answer, Group, Run, until
from tests.server.test_pulls import WIDE, create_wide


def refused(server: Server) -> dict[tuple[str, str], int]:
    """What a server has counted, without what it has not seen."""
    found = {key: count for key, count in server.notifier.errors.counts.items() if count}
    assert server.admin.status()["refused"] == sum(found.values())
    return found


async def code(answer: Answer) -> str:
    header, body = await asyncio.wait_for(answer, 10)
    assert header.kind == Kind.ERROR
    return str(json_body(body)["code"])


def test_pushes_refused_at_admission_or_for_their_rows_are_counted(run: Run) -> None:
    """Those that the replica refuses were answered with an ERROR, and not counted."""

    async def story(group: Group) -> None:
        server = await group.start("a")
        group.adopt(view := group.make_view(lambda r: ["a"]))
        worker = await group.connect("a")
        assert await code(worker.push(view, "a", 3, [1, 2], 1.0)) == "gap"
        assert refused(server) == {("push", "gap"): 1}
        assert await code(worker.ask(Header(Kind.PULL, epoch=view.epoch - 1, table=TABLE))) == "stale-view"
        assert await code(worker.ask(Header(Kind.PULL, epoch=view.epoch, table=99))) == "unknown-table"
        assert refused(server) == {("push", "gap"): 1, ("pull", "stale-view"): 1, ("pull", "unknown-table"): 1}

    run(story)


def test_a_pull_whose_answer_is_cut_off_in_the_middle_is_counted(run: Run) -> None:
    async def story(group: Group) -> None:
        for name in "ab":
            await group.start(name)
        server = group.servers["a"]
        view = group.make_view(lambda r: ["b", "a"])
        group.adopt(view)
        head = await group.connect("b", create=False)
        await create_wide(head, view.epoch)
        worker = await group.connect("a", create=False)
        await until(lambda: WIDE in server.store.live)
        worker.task.cancel()  # nothing is read until the view has changed
        await asyncio.gather(worker.task, return_exceptions=True)
        keys = np.arange(1 << 16, dtype=np.int64)
        ask = PullHeader(77, view.epoch, 0, 0, WIDE, len(keys)).header()._replace(body=keys.nbytes)
        worker.writer.write(ask.pack() + keys.tobytes())
        await until(lambda: any(connection._answers for connection in server.handshake.workers))
        group.adopt(group.make_view(lambda r: ["a", "b"]))
        received = list[int]()
        while Kind.ERROR not in received:
            header = unpack_header(await asyncio.wait_for(worker.reader.readexactly(HEADER_BYTES), 60))
            body = await worker.reader.readexactly(header.body)
            received.append(header.kind)
        assert (header.request, json_body(body)["code"]) == (77, "stale-view")
        assert refused(server) == {("pull", "stale-view"): 1}

    run(story)


def test_a_connection_that_is_rejected_is_counted_as_one(run: Run) -> None:
    async def story(group: Group) -> None:
        server = await group.start("a")
        group.adopt(view := group.make_view(lambda r: ["a"]))
        worker = await group.connect("a")
        with pytest.raises(asyncio.IncompleteReadError):
            await worker.ask(Header(Kind.REDUCE, epoch=view.epoch, table=TABLE))
        assert refused(server) == {(CONNECTION, "malformed"): 1}

    run(story)


class Connection:
    """Counts ERROR frames, as a server's connections do."""

    def __init__(self) -> None:
        self.errors = ErrorReplies()
        self.sent: list[Header] = []

    def send(self, frame: bytes) -> None:
        self.sent.append(unpack_header(frame))

    def tell_view(self) -> None:
        self.send(json_frame(Kind.VIEW, {}))


@pytest.mark.parametrize("status", [status for status in Status if status is not Status.COMMITTED])
def test_each_refusal_by_a_replica_is_counted_by_kind_and_code(status: Status) -> None:
    connection, none = Connection(), np.empty(0, np.int64)
    for kind in (Kind.PUSH, Kind.CREATE):
        ticket = RequestTicket(cast(Any, connection), kind, 5)
        ticket.reply(Reply(ticket, status, 2, none, none))
    ticket = RequestTicket(cast(Any, connection), Kind.GET_CLOCKS, 6)
    ticket.clocks(ClocksReply(ticket, status, 2, none, none, none))
    kinds = Counter(kind for (kind, _), count in connection.errors.counts.items() if count)
    assert kinds == {"push": 1, "create": 1, "get_clocks": 1}
    assert connection.errors.total == sum(header.kind == Kind.ERROR for header in connection.sent) == 3


def test_a_push_without_some_rows_is_counted_under_the_first_reason() -> None:
    connection, none = Connection(), np.empty(0, np.int64)
    ticket = RequestTicket(cast(Any, connection), Kind.PUSH, 5)
    reasons = [why({"code": code, "message": "no"}) for code in ("full", "not-finite")]
    refusals = [Refused(1, reason, RefusedRows({4: np.arange(3)}, 8)) for reason in reasons]
    ticket.reply(Reply(ticket, Status.COMMITTED, 2, none, none, refusals))
    assert connection.errors.counts["push", "full"] == connection.errors.total == 1


def test_no_other_file_of_a_server_makes_an_error_frame() -> None:
    (folder,) = elasticps.server.__path__
    makers = {
        path.name
        for path in Path(folder).rglob("*.py")
        if any(call in path.read_text() for call in ("json_frame(Kind.ERROR", "refused_frame(", "Header(Kind.ERROR"))
    }
    assert makers == {"error_replies.py"}
