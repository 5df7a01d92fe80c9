"""A worker under no bound whose application has others that wait for its clock."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from elasticps.client.connections import Participation
from elasticps.client.core.session import Frame, PushSession
from elasticps.wire.frames import unpack_header
from elasticps.wire.joining import JoinHeader
from replication.chain import Member, Ranges
from replication.effects import Status
from tests.replication.views import form

P = 8
A, B = Member("a", 1), Member("b", 1)
NONE = np.empty(0, np.int64)


class Content:
    """A part that has rows of one head."""

    nbytes = 100

    def __init__(self, head: Member) -> None:
        self.head = head

    def heads(self, epoch: int) -> list[Member]:
        return [self.head]

    def touches(self, ranges: Ranges) -> bool:
        return True


def test_it_ticks_all_ranges_from_then_on_and_joins_above_what_is_committed() -> None:
    joined: list[int | None] = []

    def send(member: Member, buffers: list[bytes]) -> None:
        if member == A:
            joined.append(JoinHeader.of(unpack_header(buffers[0])).base)

    session = PushSession(1, P, 4)
    session.adopt(form([A, B], P, 2))
    for member in (A, B):
        session.connected(member)
    participation = Participation(cast(Any, SimpleNamespace(peers=[A, B], send=send)), session)
    participation.join(0)
    home = session._heads.of(session._home)
    assert home is not None
    first, second = (session.push(Content(home.member)) for _ in range(2))
    assert [len(first), len(second)] == [1, 1], "sparse steps"

    def commit(frames: list[Any]) -> None:
        for frame in frames:
            assert isinstance(frame, Frame)
            session.reply(frame.frame, Status.COMMITTED, 1, None, NONE)
        participation.committed()

    commit(first)
    participation.tick_everywhere()
    assert joined == [0, 1], "step 1 is committed, so no range lacks it"
    third = session.push(Content(home.member))
    assert len(third) == 2
    commit(second)
    assert joined == [0, 1, 2], "the last sparse step is committed"
    commit(third)
    participation.tick_everywhere()
    assert joined == [0, 1, 2], "all ranges hear of later steps"


def test_one_that_pauses_is_counted_by_nobody_and_says_nothing() -> None:
    session = PushSession(1, P, 4)
    sent: list[Any] = []
    participation = Participation(
        cast(Any, SimpleNamespace(peers=[A], send=lambda *frame: sent.append(frame))), session
    )
    participation.tick_everywhere()
    assert session.everywhere
    assert not sent
