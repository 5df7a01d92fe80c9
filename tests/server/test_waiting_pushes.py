"""Pushes that wait for room in the log, and what has changed by the time they are let in."""

from __future__ import annotations

import json
import os
from unittest.mock import patch

from elasticps.wire.frames import HEADER_BYTES, REFUSED, Header, Kind, unpack_header
from replication.progress import PART_BITS
from tests.server.conftest import TABLE, WORKER, plain
from tests.server.test_worker_frames_at_followers import Frame, create, drop, push
from tests.server.wires import Pipe, Wires

OTHER = WORKER + 1


def answer(back: Pipe) -> tuple[Header, bytes]:
    """Header and body of the last frame that a server wrote to a worker."""
    stream = bytes(back.written)
    while True:
        header = unpack_header(stream[:HEADER_BYTES])
        body, stream = stream[HEADER_BYTES:][: header.body], stream[HEADER_BYTES + header.body :]
        if not stream:
            return header, body


def test_rows_of_a_push_that_waited_while_their_table_was_dropped_are_refused() -> None:
    """Logged behind the drop, they came to followers that had forgotten the table."""
    wires = Wires(1, compiled=True)
    head, tail = (wires.start(name, [WORKER, OTHER]) for name in ("s0", "s1"))
    wires.adopt(lambda r: ["s0", "s1"])
    wires.link("s0", "s1")
    to, back = zip(*(wires.connect("s0", worker) for worker in (WORKER, OTHER)), strict=True)
    wires.settle()

    def ask(who: int, number: int, frame: Frame) -> None:
        header, body = frame
        header = header._replace(request=number, epoch=head.serving.epoch, body=len(body))
        if header.kind != Kind.PUSH:  # which says there what it follows
            header = header._replace(worker=WORKER + who)
        to[who].write(header.pack() + body)
        wires.settle()

    ask(0, 2, create(TABLE))
    ask(0, 3, push(1, rows=1))
    head.executor.limit_log(0)
    ask(1, 2, drop(TABLE))
    ask(0, 4, push(2, rows=1))
    assert head.replica.admission.parked == 2
    with patch.object(os, "_exit") as ended:
        head.executor.limit_log(1 << 20)
        wires.settle()
    ended.assert_not_called()
    assert answer(back[1])[0].kind == Kind.OK
    header, body = answer(back[0])
    assert (header.request, header.kind, header.flags & REFUSED) == (4, Kind.ERROR, REFUSED)
    refusal = json.loads(plain(body))
    assert (refusal["code"], refusal["rows"]) == ("unknown-table", {str(TABLE): [0]})
    for server in (head, tail):
        assert TABLE not in server.store.tables
        assert (server.replica.acked == server.replica.seq).all()
        assert (server.replica.clocks.read(WORKER) >> PART_BITS == 2).all()
