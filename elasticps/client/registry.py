"""The client's control plane: it talks to the coordination store, in the process's control loop.

It finds the cluster, keeps the worker registered under its lease, and keeps the registry of tables. The data path
never waits for it.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from coordinator.connect import open_store
from coordinator.core.errors import CoordinationError, Fenced, ForkedProcess, NotPermitted, Unreadable
from coordinator.core.keys import (
    CHECKPOINT_REQUESTS,
    LAST_WORKER,
    ON_LOSS,
    RESTORING,
    ROSTER,
    SIGNED_OFF,
    TABLES,
    config_of,
    record_key,
    roster_of,
    table_key,
    view_of,
    worker_key,
    worker_of,
)
from coordinator.core.names import check_name, check_worker
from coordinator.core.store import Entry, Store
from coordinator.core.view import View, WorkerInfo
from coordinator.membership import new_number, newest_view
from coordinator.sessions import WorkerSession, register_worker
from coordinator.trouble import find_trouble
from elasticps.client.core.join import PastRun
from elasticps.client.lifecycle import ChangePolicies
from elasticps.client.rates import SetRate, SetRates
from elasticps.client.registrations import (
    Registrar,
    Registration,
    TableToRegister,
    fields_of,
    in_portions,
    registration_of,
    registry_value,
)
from elasticps.client.runtime import Runtime
from elasticps.errors import CheckpointError, Closed, ClusterUnreachable, ConfigError, Timeout
from elasticps.model.spec import TableSpec
from elasticps.security import credentials_of
from elasticps.security.identity import Role
from elasticps.system.coordination import entries_of

if TYPE_CHECKING:
    from elasticps.security.credentials import Credentials

log = logging.getLogger(__name__)

TROUBLE_S = 3.0  # for a look at why nobody lets a worker in

T = TypeVar("T")
POLL_S, POLL_MOST_S = 0.05, 0.5
ASK_VIEW_TIMEOUT_S = 4.0  # a second for each of three endpoints, and one more


class Registry:
    """Synchronous face of a coordination store. Every call has a deadline and raises `elasticps.errors`. `url` is how
    errors name the store; `credentials` are for the servers too."""

    several = False  # of which one is asked as long as it answers, as relays are
    absent: Any = None  # servers say which tables were dropped

    def __init__(
        self, store: Store, runtime: Runtime, url: str, credentials: Credentials | None = None, *, follows: bool = False
    ) -> None:
        """follows: what other workers set while this one is there; else what there is when it is looked up."""
        self._follows = follows
        self._rates: SetRates | None = None
        self.runtime = runtime
        self.credentials = credentials
        self.authenticated = credentials is not None  # everybody proves who they are: a server is not who leads
        self._url = url
        self._store = store
        self._registrar = Registrar(store)
        self._worker: WorkerSession | None = None
        self._view: View | None = None  # as read last

    @classmethod
    def open(cls, url: str, timeout_s: float, runtime: Runtime) -> Registry:
        """Connects to the store that `url` names. `timeout_s` bounds that, and each later call of the store: one that
        stands still for less is waited for."""
        credentials = credentials_of(url)
        try:
            opening = open_store(url, timeout_s=timeout_s, call_timeout_s=timeout_s)
            return cls(_run(opening, runtime, timeout_s + 1.0, url), runtime, url, credentials, follows=True)
        except ValueError as error:
            raise ConfigError(str(error)) from None

    @property
    def cluster(self) -> str:
        return self._store.cluster

    def call(self, coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Runs a coroutine in the control loop and waits for it."""
        return _run(coroutine, self.runtime, timeout_s, self._url)

    def close(self) -> None:
        """Gives the worker's registration back."""
        try:
            if self._rates is not None:
                self.call(self._rates.close(), 5.0)
            if self._worker is not None:
                self.call(self._worker.close(), 5.0)
            self.call(self._store.close(), 5.0)
        except (Timeout, ClusterUnreachable):  # the lease will run out by itself
            log.info("worker %s could not sign off", self._worker.info.name if self._worker else "?")

    # --- membership ---------------------------------------------------------------------------------------------

    def register(
        self, name: str, app: str, on_lost: Callable[[str], None], timeout_s: float, cluster: str
    ) -> WorkerInfo:
        """Takes the name under a lease, in the cluster of that identity; an older incarnation of it is fenced."""
        try:
            check_name("worker", name)
            if self.credentials is not None:
                self.credentials.require(Role.WORKER, name, app)
            unique = name if app == "default" else f"{app}/{name}"
            registering = register_worker(self._store, name=unique, app=app, on_lost=on_lost, cluster=cluster)
            self._worker = self.call(registering, timeout_s)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        return self._worker.info

    def past(self, timeout_s: float) -> PastRun | None:
        """Who took part last under our name, if anybody has."""
        entry = self.call(self._store.get(self._past_key), timeout_s)
        revision = 0 if entry is None else entry.revision
        if entry is None:  # an earlier version's, which had no application in its key, and stays as it is
            entry = self.call(self._store.get(LAST_WORKER + self._info.name), timeout_s)
        if entry is None:
            return None
        fields = fields_of(entry, id=int, base=int, trained=int, steps=int)
        return PastRun(fields["id"], fields["base"], fields["trained"], fields["steps"], revision)

    def keep(self, past: PastRun, timeout_s: float) -> int | None:
        """Writes it, if the key still has its revision (0: does not exist); returns the new one, or None."""
        value = json.dumps({key: number for key, number in past._asdict().items() if key != "revision"}).encode()
        revision = self.call(self._keep(past, value), timeout_s)
        if revision is not None and self._worker is not None:
            self._worker.belongings[self._past_key] = value
            self._worker.took_part = True
        return revision

    async def _keep(self, past: PastRun, value: bytes) -> int | None:
        worker, expect = self._worker, past.revision
        while (revision := await self._store.compare_and_set(self._past_key, value, expect=expect)) is None:
            entry = await self._store.get(self._past_key)
            ours = worker is not None and worker.took_part and past.id == worker.info.id
            if worker is None or not ours or await worker.newest() not in (0, past.id):
                return None
            # Ours all the same: a write got no answer; or the store was made anew, and has it elsewhere or not yet.
            expect = 0 if entry is None else entry.revision
        return revision

    @property
    def _info(self) -> WorkerInfo:
        assert self._worker is not None
        return self._worker.info

    @property
    def _past_key(self) -> str:
        return record_key(self._info.name)

    def registered(self) -> int:
        """The lease under which this worker is registered, 0 if it has run out as far as is known here. Another lease:
        it had run out meanwhile."""
        assert self._worker is not None
        return self._worker.lease if self.runtime.monotonic() < self._worker.deadline else 0

    def first_view(self, timeout_s: float) -> View:
        """The view; waits until the cluster has formed one in which every range has a server, and until it has come
        back from a checkpoint if that is going on."""
        return self.call(self._first_view(timeout_s), timeout_s + 5.0)

    async def _first_view(self, timeout_s: float) -> View:
        deadline = self.runtime.monotonic() + timeout_s
        while True:
            entry, restoring = await self._store.get("view"), await self._store.get(RESTORING)
            if entry is not None and restoring is None:
                try:
                    self._view = view_of(entry)
                    return self._view
                except Unreadable:  # a leader puts the last good one back
                    if self.runtime.monotonic() > deadline:
                        raise
            if self.runtime.monotonic() > deadline and restoring is not None:
                raise ClusterUnreachable(_how_far(self._store.cluster, restoring, timeout_s))
            if self.runtime.monotonic() > deadline:
                config = await self._store.get("config")
                needed = f"{config_of(config).min_servers} servers" if config else "a coordinator to create it"
                servers = [e.key.partition("/")[2] for e in (await self._store.list("servers/")).entries]
                raise ClusterUnreachable(
                    f"cluster {self._store.cluster!r} has not formed within {timeout_s:.1f} s: it waits for "
                    f"{needed}, registered servers: {', '.join(servers) or 'none'}; is its name right, and does a "
                    "coordinator run?"
                )
            await asyncio.sleep(POLL_S)

    def trouble(self) -> str:
        """What keeps the cluster from taking this worker in, as the store tells it; "" if nothing is known."""
        try:
            return "; ".join(self.call(find_trouble(self._store), TROUBLE_S))
        except (ClusterUnreachable, Timeout):
            return ""

    def ask_view(self, on_view: Callable[[View | None], None]) -> None:
        """Reads the view in a thread of its own and hands it over, or None if the store does not answer."""

        def read() -> None:
            try:
                # The store's own limit, too: each of its endpoints has a part of it, and one that hangs is left.
                reading = newest_view(self._store, self._view, ASK_VIEW_TIMEOUT_S)
                view = self._view = self.call(reading, ASK_VIEW_TIMEOUT_S + 1.0)
            except Exception as error:  # whatever it is, whoever wants the view asks again
                log.debug("the view could not be read from the coordination store: %s", error)
                view = None
            on_view(view)

        self.runtime.spawn("elasticps-view", read)

    def read(self, ask: Callable[[Store], Coroutine[Any, Any, T]], timeout_s: float) -> T:
        """Whatever `ask` reads from the store."""
        return self.call(ask(self._store), timeout_s)

    def put(self, key: str, value: bytes, timeout_s: float, *, ours: bool = False) -> None:
        """Writes a key. ours: it is put back into a store that was made anew."""
        self.call(self._store.put(key, value), timeout_s)
        if ours and self._worker is not None:
            self._worker.belongings[key] = value

    # --- checkpoints --------------------------------------------------------------------------------------------

    def want_checkpoint(self, full: bool, timeout_s: float) -> str:
        """Asks the leader for a checkpoint; where the answer will be."""
        key = f"{CHECKPOINT_REQUESTS}{self._info.app}/{self.call(new_number(self._store), timeout_s)}"
        self.call(self._store.put(key, json.dumps({"full": full, "by": self._name}).encode()), timeout_s)
        return key

    def checkpoint_made(self, key: str, timeout_s: float) -> int:
        """The number of the checkpoint that was asked for, 0 as long as there is no answer. CheckpointError."""
        entry = self.call(self._store.get(key), timeout_s)
        if entry is None:
            raise CheckpointError("nobody knows of this request for a checkpoint any more")
        fields = fields_of(entry)
        cut: int = fields_of(entry, cut=int)["cut"] if "cut" in fields else 0
        if "error" in fields or "cut" in fields:
            self.call(self._store.delete(key), timeout_s)
        if "error" in fields:
            raise CheckpointError(str(fields["error"]))
        return cut

    # --- the registry of tables ---------------------------------------------------------------------------------

    def open_tables(
        self, app: str, requests: Sequence[TableToRegister], worker: int, timeout_s: float
    ) -> list[Registration]:
        """Registers tables of different names, or finds them, maybe as tables that are being dropped, or that have
        another spec."""
        keys = {table_key(app, table.spec.name): table for table in requests}
        found = self.call(self._open_tables(table_key(app, ""), keys, worker), timeout_s)
        if self._worker is not None:
            unlike = {key for key, table in found.items() if table.dropping or table.spec.difference(keys[key].spec)}
            self._worker.belongings |= {k: registry_value(table) for k, table in found.items() if k not in unlike}
        return [found[key] for key in keys]

    async def _open_tables(
        self, prefix: str, requests: Mapping[str, TableToRegister], worker: int
    ) -> dict[str, Registration]:
        if made := await self._registrar.register_at_once(requests, worker, self._name):
            return made
        if self._worker is not None:
            await self._worker.our_cluster()
        return await self._registrar.register(prefix, requests, worker, self._name)

    def find(self, app: str, name: str, timeout_s: float) -> Registration | None:
        """A table of an application, None if it has none of that name."""
        entry = self.call(self._store.get(table_key(app, name)), timeout_s)
        return None if entry is None else registration_of(entry)

    def tables(self, app: str, timeout_s: float) -> dict[str, Registration]:
        """All tables of an application, by name, without what is none. SpecError for one that cannot be read here."""
        found = {}
        for entry in self.call(self._store.list(table_key(app, "")), timeout_s).entries:
            try:
                found[entry.key.rpartition("/")[2]] = registration_of(entry)
            except ConfigError as error:
                log.warning("%s", error)
        return found

    def applications(self, timeout_s: float) -> set[str]:
        """The applications that have tables. ClusterUnreachable where the certificate may see one of them only."""
        entries = self.call(self._store.list(TABLES), timeout_s).entries
        return {entry.key.removeprefix(TABLES).partition("/")[0] for entry in entries}

    def policies(self, app: str, name: str, number: int, timeout_s: float) -> TableSpec | None:
        """The spec of a table by its name and id, with the policies that are registered; None if it is no more."""
        found = self.find(app, name, timeout_s)
        return None if found is None or found.id != number or found.dropping else found.spec

    def set_policies(
        self, app: str, name: str, number: int, change: ChangePolicies, timeout_s: float
    ) -> TableSpec | None:
        """Registers other policies of a table; returns its spec with these, None if there is no such table any more.
        SpecError from `change`, before anything is written."""
        key = table_key(app, name)
        found = self.call(self._set_policies(key, number, change), timeout_s)
        if found is not None and self._worker is not None and key in self._worker.belongings:
            self._worker.belongings[key] = registry_value(found)
        return None if found is None else found.spec

    async def _set_policies(self, key: str, number: int, change: ChangePolicies) -> Registration | None:
        while True:
            entry = await self._store.get(key)
            found = None if entry is None else registration_of(entry)
            if found is None or found.id != number or found.dropping:
                return None
            changed = replace(found, spec=change(found.spec))
            revision = await self._store.compare_and_set(key, registry_value(changed), expect=found.revision)
            if revision is not None:
                return replace(changed, revision=revision)

    def begin_drop(self, app: str, table: Registration, timeout_s: float) -> Registration | None:
        """Marks a table as one that is about to go; None if there is no such table, or another one of its name."""
        key = table_key(app, table.spec.name)
        if self._worker is not None:
            self._worker.belongings.pop(key, None)
            self._worker.belongings.pop(f"{ON_LOSS}{app}/{table.spec.name}", None)
        return self.call(self._begin_drop(key, table.id), timeout_s)

    async def _begin_drop(self, key: str, number: int) -> Registration | None:
        while True:
            entry = await self._store.get(key)
            found = None if entry is None else registration_of(entry)
            if found is None or found.id != number:
                return None
            if found.dropping:
                return found
            marked = replace(found, dropping=True)
            revision = await self._store.compare_and_set(key, registry_value(marked), expect=found.revision)
            if revision is not None:
                return replace(marked, revision=revision)

    def end_drop(self, app: str, table: Registration, timeout_s: float) -> None:
        """Forgets the name of a table that is marked, unless somebody else has."""
        key = table_key(app, table.spec.name)
        if self._rates is not None and self.rate_of(table.spec.name, table.id) is not None:
            self.call(self._rates.forget(table.spec.name), timeout_s)
        self.call(self._store.delete(key, expect=table.revision), timeout_s)

    def follow_rates(self, app: str, heard: Callable[[str], None], timeout_s: float) -> None:
        """From now on `heard(name)` is called, in the control loop, when a table's rate was set for all workers."""
        assert self._worker is not None
        self._rates = SetRates(self._store, app, heard, self._worker.belongings)
        if self._follows:
            self.call(self._rates.follow(), timeout_s)

    def rate_of(self, name: str, table: int) -> SetRate | None:
        """What was set last for the table of that name and id."""
        return None if self._rates is None else self._rates.of(name, table)

    def set_rate(self, name: str, table: int, lr: float | None, timeout_s: float) -> None:
        """Sets it for all workers; None: nothing any more."""
        assert self._rates is not None
        self.call(self._rates.set(name, table, lr), timeout_s)

    def mark_ready(self, app: str, tables: Sequence[Registration], timeout_s: float) -> None:
        """Their initial values are on the servers. Losing the race means that somebody else said so."""
        self._mark(app, [replace(table, ready=True) for table in tables], timeout_s)

    def mark_created(self, app: str, tables: Sequence[Registration], epoch: int, timeout_s: float) -> None:
        """All heads of the view of that epoch have made them: whoever opens them need not ask all heads again."""
        self._mark(app, [replace(table, created=epoch) for table in tables], timeout_s)

    def _mark(self, app: str, tables: Sequence[Registration], timeout_s: float) -> None:
        marked = {table_key(app, table.spec.name): table for table in tables}
        self.call(self._write_marks(marked), timeout_s)
        if self._worker is not None:
            self._worker.belongings |= {key: registry_value(table) for key, table in marked.items()}

    async def _write_marks(self, marked: Mapping[str, Registration]) -> None:
        for several in in_portions(marked):
            if await self._store.compare_and_set_all(several) is None:
                for key, (value, revision) in several.items():
                    await self._store.compare_and_set(key, value, expect=revision)

    def wait_created(
        self, app: str, tables: Sequence[Registration], patience_s: float, timeout_s: float
    ) -> list[Registration]:
        """Waits until their creators say that all heads have made them, or are gone; not longer than `patience_s`.
        Returns those that are registered then, as they are."""
        keys = {table_key(app, table.spec.name): table.id for table in tables}
        return self.call(self._wait_created(table_key(app, ""), keys, patience_s), patience_s + timeout_s)

    async def _wait_created(self, prefix: str, ids: Mapping[str, int], patience_s: float) -> list[Registration]:
        deadline, pause_s = self.runtime.monotonic() + patience_s, POLL_S
        while True:
            entries = await entries_of(self._store, list(ids), prefix)
            found = [table for entry in entries if (table := registration_of(entry)).id == ids[entry.key]]
            waited_for = {(table.creator, table.by) for table in found if not (table.created or table.dropping)}
            alive = [by for by in waited_for if await self._is_alive(*by)]
            if not alive or self.runtime.monotonic() >= deadline:
                return found
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, POLL_MOST_S)

    def wait_ready(self, app: str, tables: Sequence[Registration], timeout_s: float) -> list[Registration]:
        """Waits until the creators of dense tensors have filled them; returns those whose creator is gone before that.
        Raises Timeout when none of them was filled for so long."""
        keys, longest_s = {table_key(app, table.spec.name): table for table in tables}, timeout_s * len(tables) + 5.0
        return [keys[key] for key in self.call(self._wait_ready(table_key(app, ""), keys, timeout_s), longest_s)]

    async def _wait_ready(self, prefix: str, tables: Mapping[str, Registration], timeout_s: float) -> list[str]:
        left, given_up = dict(tables), list[str]()
        deadline, pause_s = self.runtime.monotonic() + timeout_s, POLL_S
        while True:
            entries = await entries_of(self._store, list(left), prefix)
            found = {entry.key: registration_of(entry) for entry in entries}
            waited_for = {(left[key].creator, one.by) for key, one in found.items() if not one.ready}
            alive = {by: await self._is_alive(*by) for by in waited_for}
            before = len(left)
            for key, table in list(left.items()):
                one = found.get(key)
                if one is None or (not one.ready and not alive[table.creator, one.by]):
                    given_up.append(key)
                elif not one.ready:
                    continue
                del left[key]
            if not left:
                return given_up
            if len(left) < before:
                deadline, pause_s = self.runtime.monotonic() + timeout_s, POLL_S
            if self.runtime.monotonic() > deadline:
                key, table = next(iter(left.items()))
                raise Timeout(f"{table.spec.name!r}: its creator, worker {table.creator}, has not filled it within "
                              f"{timeout_s:.1f} s")  # fmt: skip
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, POLL_MOST_S)

    async def _is_alive(self, worker: int, name: str) -> bool:
        """Whether a worker is registered, or listed: then it may come back."""
        try:
            check_worker(name)
        except ValueError:
            return False
        entry = await self._store.get(worker_key(name))
        if entry is not None:
            with suppress(ValueError):  # what is no worker is not that one
                return entry.value != SIGNED_OFF and worker_of(entry.key, entry.value).id == worker
            return False
        roster = await self._store.get(ROSTER)
        return roster is not None and worker in {one.id for one in roster_of(roster).workers}

    @property
    def _name(self) -> str:
        return "" if self._worker is None else self._worker.info.name


def _how_far(cluster: str, restoring: Entry, timeout_s: float) -> str:
    fields = fields_of(restoring, cut=int, url=str, done=float, error=str)
    source = f"checkpoint {fields['cut']} of {fields['url']}"
    text = f"cluster {cluster!r} is being restored from {source}: {fields['done']:.0%}"
    return f"{text} is there after {timeout_s:.1f} s" + (
        f"; it is held up: {fields['error']}" if fields["error"] else ""
    )


def _run(coroutine: Coroutine[Any, Any, T], runtime: Runtime, timeout_s: float, url: str) -> T:
    try:
        return runtime.run(coroutine, timeout_s)
    except TimeoutError:
        raise Timeout(f"the coordination store at {url} did not answer within {timeout_s:.1f} s") from None
    except Fenced as error:
        raise Closed(f"this worker was started again elsewhere: {error}") from error
    except ForkedProcess as error:
        raise ConfigError(str(error)) from None
    except NotPermitted as error:
        raise ClusterUnreachable(
            f"{error}. The certificate is one for other keys, or etcd does not know its application yet: "
            "`elasticps cluster protect --app APP` has etcd know it"
        ) from error
    except CoordinationError as error:
        raise ClusterUnreachable(str(error)) from error
