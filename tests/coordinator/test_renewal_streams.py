"""Leases are renewed on streams that stay open, and no answer is taken for that of another renewal."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from grpc.aio import EOF  # type: ignore[attr-defined]  # grpc-stubs lacks EOF

from coordinator.core.keys import worker_key
from coordinator.core.view import WorkerInfo
from coordinator.etcd_channel import Member
from coordinator.membership import LEASE_S
from coordinator.memory import MemoryStore
from coordinator.sessions import WorkerSession

SOON_S, NEVER = 0.01, object()


class Stream:
    """A stream with these answers, of which `NEVER` does not come."""

    def __init__(self, answers: Sequence[object]) -> None:
        self.answers = list(answers)
        self.cancelled = False

    async def write(self, request: object) -> None:
        if not self.answers:
            raise asyncio.InvalidStateError("the stream is over")

    async def read(self) -> object:
        answer = self.answers.pop(0)
        if answer is NEVER:
            await asyncio.Event().wait()
        return answer

    def cancel(self) -> None:
        self.cancelled = True


class Leases:
    """A stub that opens these streams, one after the other."""

    def __init__(self, *answers: Sequence[object]) -> None:
        self.left = [Stream(each) for each in answers]
        self.opened: list[Stream] = []

    def LeaseKeepAlive(self) -> Stream:
        self.opened.append(self.left.pop(0))
        return self.opened[-1]


def member(leases: Leases) -> Member:
    nothing: Any = None
    return Member("h:1", nothing, nothing, leases, nothing)


async def test_a_stream_is_used_again_and_a_new_one_in_place_of_a_broken_one() -> None:
    leases = Leases([1, 2, EOF], [3, 4])
    renewing = member(leases)
    assert [await renewing.keep_alive("r", 60) for _ in range(4)] == [1, 2, 3, 4]
    assert [stream.cancelled for stream in leases.opened] == [True, False]


async def test_a_stream_that_gave_no_answer_in_time_is_closed_and_not_used_again() -> None:
    leases = Leases([1, NEVER, "late"], [2])
    renewing = member(leases)
    assert await renewing.keep_alive("r", 60) == 1
    with pytest.raises(asyncio.InvalidStateError, match="no answer in time"):
        await renewing.keep_alive("r", SOON_S)
    assert leases.opened[0].cancelled
    assert await renewing.keep_alive("r", 60) == 2


async def test_a_new_stream_that_breaks_is_an_error() -> None:
    renewing = member(Leases([EOF]))
    with pytest.raises(asyncio.InvalidStateError, match="closed the stream"):
        await renewing.keep_alive("r", 60)
    assert not renewing.renewing


@pytest.mark.parametrize("out", [False, True])
def test_a_renewal_that_fails_leaves_time_for_two_more(monkeypatch: pytest.MonkeyPatch, out: bool) -> None:
    """Each may wait for a second for an endpoint that does not answer."""
    waits, timeout = list[float](), asyncio.timeout

    def at_once(seconds: float) -> asyncio.Timeout:
        waits.append(seconds)
        return timeout(0)

    async def scenario() -> None:
        info = WorkerInfo(1, "w", 1, "default")
        session = WorkerSession(MemoryStore("test"), worker_key("w"), info, LEASE_S, lambda why: None)
        monkeypatch.setattr("coordinator.sessions.asyncio.timeout", at_once)
        await session._pause(out)

    asyncio.run(scenario())
    (waited,) = waits
    assert waited <= 0.2 if out else 1.5 < waited <= LEASE_S - 2 * (1.0 + 0.2)
