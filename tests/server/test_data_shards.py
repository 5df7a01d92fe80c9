"""TAKE over real sockets: the next head of the group range knows the assigned and used shards."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.core.view import Roster, View, WorkerInfo
from elasticps.kernels.hashing import group_range
from elasticps.wire.frames import HEADER_BYTES, Header, Kind, json_body, json_frame
from tests.server.conftest import RANGES, Group, Run, Worker, until

KEYS = list(range(50))
TAKE: dict[str, Any] = {"name": "train", "samples": 20, "size": 2, "epochs": 1, "seed": None, "want": 3, "done": [],
                        "back": []}  # fmt: skip


async def take(worker: Worker, view: View, committed: int = 0, **more: Any) -> tuple[Header, dict[str, Any]]:
    frame = json_frame(Kind.CLAIM_SHARDS, TAKE | more)
    header, body = await worker.ask(Header(Kind.CLAIM_SHARDS, epoch=view.epoch, clock=committed), frame[HEADER_BYTES:])
    return header, json_body(body)


async def two_servers(group: Group) -> View:
    for name in ("s0", "s1"):
        await group.start(name)
    view = group.make_view(lambda r: ["s0", "s1"])
    group.adopt(view)
    return view


def test_the_next_head_knows_the_assigned_and_used_shards(run: Run) -> None:
    async def test(group: Group) -> None:
        view = await two_servers(group)
        worker = await group.connect("s0")
        _, answer = await take(worker, view)
        assert answer == {"set": 1 << 16 | group_range("default", RANGES), "done": 0, "total": 10,
                          "held": [[i, 0, 0, 0] for i in range(3)]}  # fmt: skip
        assert (await take(worker, view))[1] == answer  # asked twice: the same
        for clock, shard in ((1, 0), (2, 1)):
            more = {"bound": shard + 1, "wait_ms": answer["set"]}
            header, _ = await worker.push(view, "s0", clock, KEYS, 1.0, **more)
            assert header.kind == Kind.OK
        second = await group.connect("s1", create=False)
        group.stop("s0")
        view = group.make_view(lambda r: ["s1"])
        group.adopt(view)
        await until(lambda: second.views)
        _, answer = await take(second, view, committed=1)
        assert (answer["held"], answer["done"]) == ([[i, 0, 0, 0] for i in (2, 3, 4)], 1)
        group.servers["s1"].follow(Roster(2, (WorkerInfo(9, "other", 1, "default"),), "c"))
        header, answer = await take(second, view)
        assert (header.kind, answer["code"]) == (Kind.ERROR, "unlisted")  # what it held goes to others now

    run(test)


def test_a_mark_of_another_application_is_left_out(run: Run) -> None:
    async def test(group: Group) -> None:
        view = await two_servers(group)
        worker = await group.connect("s0")
        _, answer = await take(worker, view)
        foreign = answer["set"] ^ (1 << 17)
        header, _ = await worker.push(view, "s0", 1, KEYS, 1.0, bound=1, wait_ms=foreign)
        assert header.kind == Kind.OK
        assert [held[0] for held in (await take(worker, view, committed=1))[1]["held"]] == [0, 1, 2]

    run(test)


@pytest.mark.parametrize(
    "wrong",
    [{"want": -1}, {"want": 9999}, {"want": True}, {"name": 7}, {"name": "x" * 201}, {"samples": 0}, {"size": "2"},
     {"seed": 1.5}, {"done": 3}, {"back": ["a"]}, {"epochs": 1 << 40}, {"done": list(range(2000))}],
    ids=str,
)  # fmt: skip
def test_an_impossible_take_ends_the_connection(run: Run, wrong: dict[str, Any]) -> None:
    async def test(group: Group) -> None:
        view = await two_servers(group)
        worker = await group.connect("s0")
        frame = json_frame(Kind.CLAIM_SHARDS, TAKE | wrong)
        worker.ask(Header(Kind.CLAIM_SHARDS, epoch=view.epoch), frame[HEADER_BYTES:])
        await until(worker.task.done)
        worker.task.exception()
        other = await group.connect("s0")
        assert (await take(other, view))[1]["done"] == 0

    run(test)
