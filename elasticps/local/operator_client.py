"""What an operator reads from a cluster's etcd and writes there: the view, drains, tables, the first configuration."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from coordinator import membership
from coordinator.connect import open_store
from coordinator.core import keys
from coordinator.core.dry_run import dry_run
from coordinator.core.planner import Members
from coordinator.core.records import noted, read
from coordinator.core.view import ClusterConfig, ServerInfo, View
from elasticps.admin import fetch_status
from elasticps.errors import ClusterUnreachable, ConfigError, Error, Timeout
from elasticps.security import credentials_of
from elasticps.system import background
from elasticps.system.coordination import read_servers, read_state, tables_among

if TYPE_CHECKING:
    from elasticps.security.credentials import Credentials

LOOK_S = 0.05
_ASK_S = 1.0  # between looks into etcd at what no view tells

_T = TypeVar("_T")


@dataclass(frozen=True)
class Progress:
    """How far a change has come. left: copies of ranges still to be made; reason: the newest view's."""

    left: int
    reason: str


Tell = Callable[[Progress], None]


class OperatorClient:
    """Follows the view of the cluster at `url`, and asks for drains. Calls block. They raise ConfigError for an
    unusable URL, StoreUnavailable or ClusterUnreachable where etcd does not answer within `timeout_s`."""

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

    def __enter__(self) -> OperatorClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stops following the view."""
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

    # --- reading ----------------------------------------------------------------------------------------------------

    @property
    def view(self) -> View:
        """The newest view. Error where none was formed yet."""
        view = self._follower.view
        if view is None:
            raise Error(f"cluster {self._store.cluster!r} has no view yet: no server has served")
        return view

    def on_view(self, callback: Callable[[View], None]) -> None:
        """Calls `callback` with the present view and each newer one, in a thread of its own."""
        background.run(self._subscribe(callback))

    async def _subscribe(self, callback: Callable[[View], None]) -> None:
        self._follower.subscribe(callback)

    def registered(self) -> tuple[ServerInfo, ...]:
        """The registered servers: those whose leases have not ended."""
        return self._run(read_servers(self._store))

    def draining(self) -> frozenset[str]:
        """Names of the registered servers that were asked to drain."""
        return frozenset(member.name for member in self.members().draining)

    def leaving(self) -> frozenset[str]:
        """Names of the draining servers whose processes are about to end: their drains cannot be taken back."""
        return frozenset(member.name for member in self.members().leaving)

    def members(self) -> Members:
        """The registered servers, as the planner sees them."""
        state = self._run(read_state(self._store))
        here = {server.member for server in state.registered}
        return Members(state.cluster, state.registered, state.draining & here, leaving=state.leaving & here)

    def config(self) -> ClusterConfig:
        """The configuration with which the cluster was created."""
        entry = self._run(self._store.get(keys.CONFIG))
        if entry is None:
            raise ConfigError(f"cluster {self._store.cluster!r} does not exist")
        return keys.config_of(entry)

    def tables(self) -> tuple[dict[int, dict[str, Any]], dict[str, str]]:
        """The application and the spec of each table, as plain values, by the table's id (lr_set: a rate that was set
        for all workers); and what is wrong with entries that cannot be read, by key."""
        state, found, unreadable = self._run(read_state(self._store)), {}, dict[str, str]()
        for table in tables_among(state.tables.values(), unreadable=unreadable):
            with noted(keys.TABLES + table.name, unreadable):
                spec = read("its spec", table.spec.encode(), name=str, dim=int, dtype=str, optimizer=dict, shape=object)
                found[table.id] = {"app": table.name.partition("/")[0], **spec, "lr_set": None}
        for rate in state.rates.values():
            if rate.table in found:
                found[rate.table]["lr_set"] = rate.lr
        return found, unreadable

    def statuses(self) -> dict[str, dict[str, Any]]:
        """The status of each registered server that answers, by name."""
        return background.run(_statuses(self.registered(), self._timeout_s, self.credentials))

    # --- drains -----------------------------------------------------------------------------------------------------

    def request_drain(self, name: str) -> ServerInfo:
        """Asks the leader to move everything off a server. UnknownServer if none of that name is registered."""
        return self._run(membership.request_drain(self._store, name))

    def cancel_drain(self, name: str) -> bool:
        """Takes a drain back; False if there was none, or it is done."""
        return self._run(membership.cancel_drain(self._store, name))

    def wait_drained(self, server: ServerInfo, timeout_s: float, tell: Tell = lambda progress: None) -> View:
        """Waits for a view without this incarnation of a server, and returns it. Timeout says what is left and why."""
        began = checked = time.monotonic()
        while holds(self.view, server) is not None:
            now, left = time.monotonic(), holds(self.view, server) or 0
            tell(Progress(left, self.view.reason))
            if now - began > timeout_s:
                raise Timeout(
                    f"{server.name} has {left} ranges left after {timeout_s:g} s: {self.view.reason}. The drain goes "
                    f"on; to take it back: elasticps drain {server.name} --cancel"
                )
            if now - checked > _ASK_S:
                if server.name not in self.draining() and holds(self.view, server) is not None:
                    raise Error(f"the drain of {server.name} was taken back with {left} ranges left")
                checked = now
            time.sleep(LOOK_S)
        tell(Progress(0, self.view.reason))
        return self.view

    def settled(self) -> bool:
        """Whether nothing moves and nothing will: every server is in the view but those that have drained, no range is
        being filled, and the planner has no other view to write."""
        view = self.view
        if (view.joining >= 0).any():
            return False
        members = self.members()
        listed = {s.member for s in view.servers}
        if listed != {s.member for s in members.servers} - members.draining:
            return False
        return dry_run(view, members, self.config()).views == 0


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
    requests = (fetch_status(server.admin, timeout_s, credentials) for server in servers)
    answers = await asyncio.gather(*requests, return_exceptions=True)
    return {s.name: answer for s, answer in zip(servers, answers, strict=True) if not isinstance(answer, BaseException)}


async def create_cluster(url: str, config: ClusterConfig, deadline: float) -> None:
    """Writes the configuration of a new cluster; waits for etcd until `deadline`, in monotonic seconds."""
    store = await open_store(url, timeout_s=deadline - time.monotonic())
    try:
        await membership.create_cluster(store, config)
    finally:
        await store.close()


async def wait_for_servers(url: str, names: list[str], replicas: int, deadline: float) -> None:
    """Waits for a view with all these servers, and as many replicas of each range as they allow. Raises Error."""
    last = min(replicas, len(names)) - 1

    def complete(view: View) -> bool:
        return all(view.index(name) >= 0 for name in names) and bool((view.chains[:, last] >= 0).all())

    store = await open_store(url, timeout_s=deadline - time.monotonic())
    try:
        follower = membership.ViewFollower(store)
        await follower.start()
        try:
            await follower.wait_for(complete, timeout_s=deadline - time.monotonic())
        except TimeoutError:
            raise Error(f"no view with the servers {', '.join(names)} was formed in time") from None
        finally:
            await follower.close()
    finally:
        await store.close()
