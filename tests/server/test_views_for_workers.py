"""Of which views a server tells its workers though they do not ask."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from tests.server.conftest import Group, Run


def test_workers_hear_of_ranges_that_come_and_go_and_of_those_that_came_back_from_a_checkpoint(run: Run) -> None:
    """A worker is connected to who heads its home range now, and has to learn who does next."""

    async def test(group: Group) -> None:
        servers = {name: await group.start(name) for name in "abc"}

        asked = {name: server.serving.concerns_workers for name, server in servers.items()}
        for server in servers.values():
            server.serving.concerns_workers = lambda: False  # type: ignore[method-assign]

        def told(of: Callable[[int], list[str]], recovered: bool = False) -> list[str]:
            view = group.make_view(of)
            if recovered:
                epochs = np.where(np.arange(view.ranges) == 0, view.epoch, 0)
                view = replace(view, recovery_epoch=epochs, since=np.maximum(view.since, epochs))
            group.adopt(view)
            return [name for name, question in asked.items() if question()]

        assert told(lambda r: ["a", "b"]) == ["a", "b"]
        assert told(lambda r: ["a", "b"]) == []
        assert told(lambda r: ["a" if r else "c", "b"]) == ["a", "c"]  # one has lost a range, one has got it
        assert told(lambda r: ["a" if r else "c", "b"], recovered=True) == ["a", "b", "c"]
        assert told(lambda r: ["a" if r else "c"]) == ["a", "b", "c"]

    run(test)
