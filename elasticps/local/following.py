"""A cluster's newest view and what stands beside it in etcd, for whoever asks for a change and waits for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from coordinator import membership
from coordinator.connect import open_store
from coordinator.core import keys
from coordinator.core.dry_run import forecast
from coordinator.core.keys import RATES
from coordinator.core.planner import Members
from coordinator.core.records import read
from coordinator.core.view import ClusterConfig, ServerInfo, View
from elasticps import background
from elasticps.admin import fetch_status
from elasticps.coordination import read_servers, read_tables
from elasticps.errors import ClusterUnreachable, ConfigError, Error, Timeout
from elasticps.security import credentials_of

if TYPE_CHECKING:
    from elasticps.security.credentials import Credentials

LOOK_S = 0.05
_ASK_S = 1.0  # between looks into etcd at what no view tells

_T = TypeVar("_T")


@dataclass(frozen=True)
class Progress:
    """Copies of ranges that are not yet where they are to be, and what the newest view says."""

    left: int
    reason: str


Tell = Callable[[Progress], None]


class Following:
    """The view of the cluster at `url`, from one `with` to its end. Calls block; they raise ConfigError for an unusable
    URL, StoreUnavailable or ClusterUnreachable where etcd does not answer within `timeout_s`."""

    def __init__(self, url: str, timeout_s: float = 10.0) -> None:
        self._timeout_s = timeout_s
        self.credentials = credentials_of(url)
        try:
            self._store = background.run(open_store(url, timeout_s=timeout_s))
        except ValueError as error:
            raise ConfigError(str(error)) from None
        self._follower = membership.ViewFollower(self._store)
        try:
            self._run(self._follower.start())
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Following:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stops following."""
        background.run(self._follower.close())
        background.run(self._store.close())

    def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        async def limited() -> _T:
            async with asyncio.timeout(self._timeout_s):
                return await work

        try:
            return background.run(limited())
        except TimeoutError:
            text = f"etcd did not answer within {self._timeout_s:g} s"
            raise ClusterUnreachable(f"cluster {self._store.cluster!r}: {text}") from None

    # --- what there is ----------------------------------------------------------------------------------------------

    @property
    def view(self) -> View:
        """The newest one. Error where none was formed yet."""
        view = self._follower.view
        if view is None:
            raise Error(f"cluster {self._store.cluster!r} has no view yet: no server has served")
        return view

    def on_view(self, callback: Callable[[View], None]) -> None:
        """Called for each newer view, and at once for the present one; in a thread of its own."""
        background.run(self._subscribe(callback))

    async def _subscribe(self, callback: Callable[[View], None]) -> None:
        self._follower.subscribe(callback)

    def registered(self) -> tuple[ServerInfo, ...]:
        """The servers whose leases live."""
        return self._run(read_servers(self._store))

    def draining(self) -> frozenset[str]:
        """Names of the registered servers that were asked to drain."""
        return frozenset(member.name for member in self.members().draining)

    def leaving(self) -> frozenset[str]:
        """Those of them whose processes are about to end: no drain of theirs can be taken back."""
        return frozenset(member.name for member in self.members().leaving)

    def members(self) -> Members:
        """The registered servers, as the planner sees them."""
        servers, drains = self.registered(), self._run(membership.read_drains(self._store))
        asked = frozenset(server.member for server in servers) & drains.keys()
        leaving = frozenset(member for member in asked if drains[member])
        return Members(self._store.cluster, servers, asked, leaving=leaving)

    def config(self) -> ClusterConfig:
        """What the cluster was created with."""
        entry = self._run(self._store.get(keys.CONFIG))
        if entry is None:
            raise ConfigError(f"cluster {self._store.cluster!r} does not exist")
        return keys.config_of(entry)

    def tables(self) -> dict[int, dict[str, Any]]:
        """The application and the spec of each table, as plain values, by the table's id; lr_set: a rate that was set
        for all workers."""
        found = {}
        for table in self._run(read_tables(self._store)):
            with suppress(ValueError):  # workers say so, here and below
                spec = read(table.name, table.spec.encode(), name=str)
                found[table.id] = {"app": table.name.partition("/")[0], **spec, "lr_set": None}
        for entry in self._run(self._store.list(RATES)).entries:
            with suppress(ValueError):
                document = read(entry.key, entry.value, table=int, lr=object)
                if (one := found.get(document["table"])) is not None:
                    one["lr_set"] = document["lr"]
        return found

    def statuses(self) -> dict[str, dict[str, Any]]:
        """What each registered server which answers says of itself, by name."""
        return background.run(_statuses(self.registered(), self._timeout_s, self.credentials))

    # --- what is asked ----------------------------------------------------------------------------------------------

    def request_drain(self, name: str) -> ServerInfo:
        """Asks for everything to be moved off the server. UnknownServer if none of that name is registered."""
        return self._run(membership.request_drain(self._store, name))

    def cancel_drain(self, name: str) -> bool:
        """Takes that back; False if it was not asked for, or is done."""
        return self._run(membership.cancel_drain(self._store, name))

    def wait_drained(self, server: ServerInfo, timeout_s: float, tell: Tell = lambda progress: None) -> View:
        """The first view without this incarnation of a server. Timeout says what is left and why; the drain goes on."""
        began = asked = time.monotonic()
        while holds(self.view, server) is not None:
            now, left = time.monotonic(), holds(self.view, server) or 0
            tell(Progress(left, self.view.reason))
            if now - began > timeout_s:
                raise Timeout(
                    f"{server.name} has {left} ranges left after {timeout_s:g} s: {self.view.reason}. The drain goes "
                    f"on; to take it back: elasticps drain {server.name} --cancel"
                )
            if now - asked > _ASK_S:
                if server.name not in self.draining() and holds(self.view, server) is not None:
                    raise Error(f"the drain of {server.name} was taken back with {left} ranges left")
                asked = now
            time.sleep(LOOK_S)
        tell(Progress(0, self.view.reason))
        return self.view

    def settled(self) -> bool:
        """Whether every registered server is in the view, those that were asked to drain hold nothing, nothing is under
        way, and the planner wants nothing else."""
        view = self.view
        if (view.joining >= 0).any():
            return False
        members = self.members()
        listed = {s.member for s in view.servers}
        if listed != {s.member for s in members.servers} - members.draining:
            return False
        return forecast(view, members, self.config()).views == 0


def holds(view: View, server: ServerInfo) -> int | None:
    """Ranges that this incarnation of a server has or is being given; None if it is not in the view."""
    index = view.index(server.name)
    if index < 0 or view.servers[index].incarnation != server.incarnation:
        return None
    return int(((view.chains == index).any(axis=1) | (view.joining == index)).sum())


def held(view: View | None) -> dict[str, int]:
    """Ranges that each server of a view has, by name; being filled does not count."""
    if view is None:
        return {}
    counts = np.bincount(view.chains[view.chains >= 0], minlength=len(view.servers))
    return {s.name: int(count) for s, count in zip(view.servers, counts, strict=True)}


async def _statuses(
    servers: tuple[ServerInfo, ...], timeout_s: float, credentials: Credentials | None
) -> dict[str, dict[str, Any]]:
    asked = (fetch_status(server.admin, timeout_s, credentials) for server in servers)
    answers = await asyncio.gather(*asked, return_exceptions=True)
    return {s.name: answer for s, answer in zip(servers, answers, strict=True) if not isinstance(answer, BaseException)}
