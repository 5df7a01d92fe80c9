"""A server reports its whole state when that has changed, and else that it has not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from coordinator.core.health import Report
from elasticps.monitor import _unchanged, dial_server
from elasticps.server.core.report_pacing import WHOLE_S, ReportPacing
from elasticps.wire.frames import HEADER_BYTES, Buffer, FrameError, unpack_header
from elasticps.wire.headers import UnchangedHeader
from tests.server.conftest import Group, Run, until

STATE: dict[str, Any] = {
    "levels": [], "suspects": [], "alone": 0, "spent": [], "stalled": [], "bytes": 100, "memory": [1000, 8000, 9000],
    "leader": [4, True, 0.1], "requests": 7, "seconds": 1.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "at_once", "later"),
    [
        ({}, False, False),
        ({"leader": [5, False, 0.2], "seconds": 2.0}, False, False),
        ({"levels": [[1, 2, "a", 1]]}, True, True),
        ({"suspects": [["a", 1, 0.1]]}, True, True),
        ({"alone": 3}, True, True),
        ({"spent": [[1, 2]]}, True, True),
        ({"stalled": [["a", 1]]}, True, True),
        ({"headed": 3, "counts": [[1, 0, 5, 6]]}, True, True),
        ({"bytes": 200, "requests": 9}, False, True),
        ({"memory": [1044, 8000, 9000]}, False, True),
        ({"memory": [1045, 8000, 9000]}, True, True),
        ({"memory": [1000, 8000, 9001]}, True, True),
    ],
)
def test_what_has_changed_is_reported_at_once_or_in_time(change: dict[str, Any], at_once: bool, later: bool) -> None:
    for delay_s, expected in ((0.1, at_once), (WHOLE_S, later)):
        pacing = ReportPacing()
        assert pacing.says_more(STATE, 10.0)
        assert not pacing.says_more(STATE, 10.0)
        assert pacing.says_more(STATE | change, 10.0 + delay_s) == expected


def test_a_newcomer_among_coordinators_gets_the_whole_and_so_do_all_with_it() -> None:
    pacing = ReportPacing()
    assert pacing.says_more(STATE, 10.0)
    pacing.forget()
    assert pacing.says_more(STATE, 10.0)


def test_nothing_has_changed_only_in_a_report_that_there_was() -> None:
    beat = UnchangedHeader(7, 5, True, 1500, 2_000_250)
    header = unpack_header(beat.header().pack())
    assert UnchangedHeader.of(header) == beat
    report = _unchanged(header, Report(6, nbytes=3))
    assert (report.epoch, report.nbytes, report.seconds, tuple(report.tenure)) == (7, 3, 2000.25, (5, True, 1.5))
    with pytest.raises(FrameError, match="has not reported"):
        _unchanged(header, None)
    for wrong in (header._replace(table=(1 << 32) - 1, part=1 << 15), header._replace(clock=1 << 63)):
        with pytest.raises(FrameError, match="impossible time"):
            _unchanged(wrong, report)


def noted(sent: list[bytes], send: Callable[[Buffer], None]) -> Callable[[Buffer], None]:
    def note(frame: Buffer) -> None:
        sent.append(bytes(frame))
        send(frame)

    return note


def test_a_coordinator_hears_ten_times_a_second_and_reads_the_whole_only_when_it_changes(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(group: Group) -> None:
        server = await group.start("a")
        group.adopt(group.make_view(lambda r: ["a"]))
        heard: list[Report] = []

        async def listen() -> None:
            async with dial_server("leader")(group.infos["a"], "c") as line:
                async for report in line.reports():
                    assert isinstance(report, Report)
                    heard.append(report)

        listening = asyncio.create_task(listen())
        await until(lambda: heard)
        sent: list[bytes] = []
        for connection in server.leaders._connections:
            monkeypatch.setattr(connection, "send", noted(sent, connection.send))
        for alone in (0, 0, 0, 5, 5):
            server.leaders.alone = alone
            server.leaders.tell()
        await until(lambda: len(heard) >= 6)
        assert [len(frame) == HEADER_BYTES for frame in sent] == [False, True, True, False, True]
        assert [report.alone for report in heard[-5:]] == [0, 0, 0, 5, 5]
        assert all(report.epoch == server.serving.epoch for report in heard[-5:])
        listening.cancel()

    run(test)
