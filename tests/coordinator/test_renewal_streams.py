"""Leases are renewed on streams that stay open, and no answer is taken for that of another renewal."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from grpc.aio import EOF  # type: ignore[attr-defined]  # grpc-stubs lacks EOF

from coordinator.etcd_channel import Member

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
