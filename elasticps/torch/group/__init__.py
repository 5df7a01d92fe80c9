"""Processes on one machine that are one worker: they sum their gradients here, and one push leaves the machine.

distributed.init_process_group("gloo")            # in a script that torchrun starts
group = LocalGroup()
with group.connect(url, worker="machine0") as ps:     # in the place of eps.connect, at every rank
    model = nn.Sequential(EmbeddingBag(ps, "words", 32, optimizer=…), nn.Linear(32, 1))
    optimizer = Optimizer(ps, model, optimizer=…)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from elasticps.client import Client, connect
from elasticps.errors import ConfigError
from elasticps.torch.group.client import GroupClient, GroupStep
from elasticps.torch.group.links import NOTHING
from elasticps.torch.group.rendezvous import meet
from elasticps.torch.group.shards import GroupShards
from elasticps.torch.group.tables import GroupTable, GroupTensor

__all__ = ["GroupClient", "GroupShards", "GroupStep", "GroupTable", "GroupTensor", "LocalGroup"]


class LocalGroup:
    """The ranks of `process_group` (default: all) that are on this machine. Ranks of other machines are a group of
    their own, which is another worker.

    mean: push the mean of the ranks' gradients, as DistributedDataParallel does, not their sum. timeout: seconds that
    ranks wait for each other. Every rank makes it. Raises `ConfigError` without a process group, `GroupLost` if ranks
    cannot reach each other.

    rank, size: of this process in the group; machine: the number of the group among those of the process group.
    """

    def __init__(self, process_group: Any = None, *, mean: bool = False, timeout: float = 1800.0) -> None:
        if not 0 < timeout < 1e6:
            raise ConfigError(f"timeout must be between 0 and 1,000,000 seconds, got {timeout}")
        self._links, self.machine = meet(process_group, timeout)
        self._mean, self._used = mean, False
        self.rank, self.size = self._links.rank, self._links.size

    def __repr__(self) -> str:
        return f"<LocalGroup, rank {self.rank} of {self.size} on machine {self.machine}>"

    def connect(self, url: str | None = None, *, worker: str = "", **options: Any) -> GroupClient:
        """Joins a cluster as one worker, named `worker`: arguments and errors as for `elasticps.connect`. Every rank
        calls it, rank 0 connects. Once."""
        return self.with_client(partial(connect, url, worker=worker, **options))

    def with_client(self, make: Callable[[], Client]) -> GroupClient:
        """Joins a cluster with a client that rank 0 makes: `make` is called there. Every rank calls this. Once."""
        if self._used:
            raise ConfigError("a LocalGroup connects once: make another one for another client")
        self._used = True
        number, _ = self._links.ask("connect")
        with self._links.leading(number):
            client = make() if self.rank == 0 else None
            self._links.answer(number, NOTHING)
        return GroupClient(self._links, client, self._mean)

    def close(self) -> None:
        """Leaves the group; closing the client does this, too."""
        self._links.close()
