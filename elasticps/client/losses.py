"""What a worker is told of ranges of which nobody was left, and that came back from a checkpoint."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from coordinator.core.keys import known_key
from coordinator.core.view import WorkerInfo
from coordinator.membership import losses_of
from elasticps.client.registry import Registry
from elasticps.client.runtime import Runtime
from elasticps.errors import DataLost, Error

log = logging.getLogger(__name__)

ATTEMPTS = 3
TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Loss:
    """Ranges that began anew.

    epoch    of the view in which they did; cut, url: the checkpoint that they came back from
    ranges   their numbers; rows: that were brought back in them
    tables   all that have rows there, by "application/name"; lacking: those that the checkpoint has nothing of
    missing  by worker, the first and the last of its steps that are missing in them, and nowhere else
    """

    epoch: int
    cut: int
    url: str
    ranges: tuple[int, ...]
    rows: int
    tables: tuple[str, ...]
    lacking: tuple[str, ...]
    missing: Mapping[str, tuple[int, int]]

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Loss:
        """As the store has it."""
        missing = {one["name"]: (one["have"] + 1, one["to"]) for one in record["workers"] if one["to"] > one["have"]}
        return cls(
            record["epoch"], record["cut"], record["url"], tuple(record["ranges"]), record["rows"],
            tuple(record["tables"]), tuple(record["lacking"]), missing,
        )  # fmt: skip

    def __str__(self) -> str:
        steps = ", ".join(f"steps {first} to {last} of worker {name}" for name, (first, last) in self.missing.items())
        return (
            f"{len(self.ranges)} ranges were lost and came back from checkpoint {self.cut}: "
            f"{steps or 'no step'} {'are' if steps else 'is'} missing in them"
        )


class Losses:
    """What one worker knows. told: whether it raises what it hears of; all of it is under the dispatcher's lock but
    what asks the store."""

    def __init__(self, registry: Registry, runtime: Runtime, worker: WorkerInfo, *, raises: bool) -> None:
        self.unreported: list[int] = []  # epochs in which ranges began anew, of which nobody was told
        self._registry = registry
        self._runtime = runtime
        self._worker = worker
        self._raises = raises

    def began(self, epochs: list[int], committed: int) -> None:
        """Ranges have begun anew; all steps up to `committed` were, before."""
        if self._raises:
            self.unreported += epochs
        self._runtime.spawn("elasticps-losses", lambda: self._tell(epochs, committed))

    def _tell(self, epochs: list[int], committed: int) -> None:
        value = json.dumps({"committed": committed}).encode()
        for epoch in epochs:
            for _ in range(ATTEMPTS):
                try:
                    self._registry.put(known_key(epoch, self._worker.id, self._worker.name), value, TIMEOUT_S)
                    break
                except Error as error:
                    log.warning("cannot say what is missing since epoch %d: %s", epoch, error)

    def all(self, timeout_s: float) -> list[Loss]:
        """All that is told of this cluster."""
        return [Loss.of(record) for record in self._registry.read(losses_of, timeout_s)]

    def check(self, timeout_s: float) -> None:
        """Raises DataLost for the first loss that nobody was told of, when it is known."""
        for loss in self.all(timeout_s):
            if loss.epoch in self.unreported:
                self.unreported.remove(loss.epoch)
                raise DataLost(str(loss), loss)
