"""Servers' reports about the leader."""

from __future__ import annotations

import json

import pytest

from elasticps.monitor import dial_server
from elasticps.server.roles import leaders
from elasticps.wire.frames import HEADER_BYTES
from tests.server.conftest import Group, Run, until


@pytest.mark.parametrize("forgotten_s", [60.0, -1.0])
def test_an_older_term_counts_only_when_the_newer_has_long_been_silent(
    run: Run, monkeypatch: pytest.MonkeyPatch, forgotten_s: float
) -> None:
    """Else nobody would know of the leaders of a store that was made anew until its revisions have come as far."""
    monkeypatch.setattr(leaders, "FORGOTTEN_S", forgotten_s)

    async def test(group: Group) -> None:
        server = await group.start("a")
        group.adopt(group.make_view(lambda r: ["a"]))

        def term() -> int:
            found: int = json.loads(server.leaders.report()[HEADER_BYTES:])["leader"][0]
            return found

        dial = dial_server("leader")
        async with dial(group.infos["a"], "c") as line, dial(group.infos["a"], "c") as other:
            line.beat(900)
            await until(lambda: term() == 900)
            other.beat(7)
            other.beat(8)
            if forgotten_s < 0:
                await until(lambda: term() == 8)
            else:
                line.beat(901)
                await until(lambda: term() == 901)

    run(test)
