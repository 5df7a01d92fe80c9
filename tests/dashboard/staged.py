"""A dashboard of a cluster that exists in a model only: pages in a browser, without processes behind them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from coordinator.memory import MemoryStore
from elasticps.dashboard.fanout import Fanout
from elasticps.dashboard.serve import Dashboard
from elasticps.system import background
from tests.dashboard.scene import Scene


class Stage:
    """In place of a poller: time passes in the scene as it does here. hot: what servers say when they are asked."""

    def __init__(self, scene: Scene, fanout: Fanout) -> None:
        self.scene = scene
        self.store = MemoryStore(scene.model.name)
        self.hot: dict[str, dict[str, Any] | None] = {}
        self.still = False  # nothing is told
        self._fanout = fanout

    async def run(self) -> None:
        """A second after the other, until cancelled."""
        scene = self.scene
        while True:
            if not self.still:
                scene.now = time.time()
                scene.answer()
                scene.model.tick(scene.now)
                self.tell()
            await asyncio.sleep(1.0)

    def tell(self) -> None:
        """Viewers get what is new."""
        self._fanout.publish(self.scene.model.take_updates())

    async def ask_hot(self, seconds: float) -> dict[str, dict[str, Any] | None]:
        """Asks for hot keys as a poller does."""
        return self.hot


class Staged(Dashboard):
    """Shows a scene."""

    def __init__(self, scene: Scene, *, port: int = 0, token: str = "") -> None:
        super().__init__(f"etcd://127.0.0.1:1/{scene.model.name}", port=port, token=token)
        self._model = scene.model
        self.stage = Stage(scene, self._fanout)
        self._poller = self.stage  # type: ignore[assignment]

    def do(self, *acts: Callable[[Scene], object]) -> None:
        """Performs events one after the other; viewers get each."""

        async def done() -> None:
            for act in acts:
                self.stage.scene.now = time.time()
                act(self.stage.scene)
                self.stage.tell()

        background.run(done())
