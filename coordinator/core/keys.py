"""The keys of a cluster in the store, and how to read the value under each. Pure.

A client with the right to write to etcd may have written anything. So a value that makes no sense raises ValueError, or
`Unreadable` under the three keys that a cluster cannot do without: the config, the view and the roster.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from coordinator.core.errors import Unreadable
from coordinator.core.names import app_of_worker, check_name, worker_name, worker_path
from coordinator.core.records import check, read
from coordinator.core.store import Entry, Store
from coordinator.core.view import ClusterConfig, Roster, ServerInfo, View, WorkerInfo
from replication.chain import Member

ELECTION = "election"  # held by the leader, under a lease; its create revision is the term
CONFIG, VIEW, ROSTER = "config", "view", "roster"
CHANGES = "changes/"  # how the newest views and rosters differ from those before, see `differences`
SERVERS, WORKERS = "servers/", "workers/"
INCARNATIONS = "incarnations/"  # by server: the newest incarnation that was given out
LAST_WORKER = "last-worker/"
"""By application and name, JSON with the `id` of the worker that took part last: no older one may come back."""
NUMBERS = "numbers"  # written to get a number: the revision of the write
SIGNED_OFF = b"signed off"
"""What a worker writes under its key when it leaves: it does not come back, whatever becomes of the lease."""

DRAINS = "drains/"
LEAVES = "leaves"  # true in a request to drain: the server's process has been asked to end
RESTORING = "restoring"  # while a whole cluster comes back from a checkpoint: workers wait
RESTORE_FILLS = "restore-fills"  # while servers bring rows back from a checkpoint, under a lease
RANGE_RECOVERY = "begin-anew"  # ranges that no server has any more, and the checkpoint that brings them back
CHECKPOINT_REQUESTS = "checkpoints/wanted/"  # <application>/<number>; the leader writes its answer in the same place
NEWEST_CHECKPOINT = "checkpoints/newest"  # its number and time; number 0: the time of the first request
FAILOVER = "failover"  # the newest failover, see `Failover`

TABLES = "tables/"
RATES = "rates/"  # learning rates set for all workers: <application>/<table>
ON_LOSS = "on-loss/"  # what becomes of a table where every replica of a range is gone: <application>/<table>
WAIT, RESTORE = "wait", "restore"  # the values below ON_LOSS
LOSSES = "losses/"  # what a range recovery could not bring back, by its epoch
KNOWN = "losses-known/"  # <application>/<epoch>/<worker id>: up to which clock the worker knew its steps committed
HELD_UP = "losses-held-up"  # why lost ranges do not come back

SHOWN_BYTES = 40

_Value = TypeVar("_Value")


def worker_key(name: str) -> str:
    """The key under which a worker registers."""
    return WORKERS + worker_path(name)


def record_key(name: str) -> str:
    """The key of the record of the worker that took part last under a name."""
    return LAST_WORKER + worker_path(name)


def table_key(app: str, name: str) -> str:
    """The key under which a table of an application is registered."""
    return f"{TABLES}{app}/{name}"


def loss_key(epoch: int) -> str:
    """The key of the record of what a range recovery lost."""
    return f"{LOSSES}{epoch:012d}"


def known_key(epoch: int, worker: int, name: str) -> str:
    """The key under which the worker with this id and name adds to that record what it knows of its own steps."""
    return f"{KNOWN}{app_of_worker(name)}/{epoch:012d}/{worker}"


# -- the cluster: config, view, roster ----------------------------------------------------------------------------


def config_of(entry: Entry) -> ClusterConfig:
    """Reads the value of `config`. Raises Unreadable if it makes no sense."""
    return _readable(entry, ClusterConfig.from_json)


def view_of(entry: Entry) -> View:
    """Reads the value of `view`. Raises Unreadable if it makes no sense."""
    return _readable(entry, View.decode)


def roster_of(entry: Entry) -> Roster:
    """Reads the value of `roster`. Raises Unreadable if it makes no sense."""
    return _readable(entry, Roster.decode)


def _readable(entry: Entry, decode: Callable[[bytes], _Value]) -> _Value:
    try:
        return decode(entry.value)
    except ValueError as error:
        raise Unreadable(
            f"the key {entry.key} in etcd holds {shown(entry.value)}, which makes no sense ({error}). The coordinator "
            "that leads puts the last good value back, if it knows it; else `elasticps cluster adopt` does"
        ) from None


def shown(value: bytes) -> str:
    """Returns the beginning of a value that makes no sense, for people."""
    return repr(value[:SHOWN_BYTES]) + (f" ({len(value)} bytes)" if len(value) > SHOWN_BYTES else "")


def number_of(config: Entry | None, revision: int) -> int:
    """Returns the number for the revision of a write that happened under this config: above those of all writes before,
    also in stores from which this one has adopted the cluster."""
    if config is None:
        return revision
    return config_of(config).base + revision - config.create_revision


def identity_of(store: Store, config: Entry | None) -> str:
    """Returns the identity of the cluster that a store holds, "" if it holds none. config: the entry under that key."""
    return "" if config is None else config_of(config).identity(store.cluster)


def other_cluster(ours: str, found: str) -> str:
    """Returns the error text for a store that holds another cluster than ours, or none."""
    there = f"holds cluster {found}" if found else "holds no cluster"
    return f"the store {there}, not {ours}: its data were lost, or it was made anew; see `elasticps cluster --help`"


# -- members ------------------------------------------------------------------------------------------------------


def server_of(key: str, value: bytes) -> ServerInfo:
    """Reads a registration below `servers/`. Raises ValueError if it makes no sense."""
    server = ServerInfo.from_json(value)
    if server.name != key.removeprefix(SERVERS):
        raise ValueError(f"{key} names a server {server.name!r:.200}")
    return server


def worker_of(key: str, value: bytes) -> WorkerInfo:
    """Reads a registration below `workers/`. Raises ValueError if it makes no sense, or if the worker claims another
    application than the one that may write there."""
    worker = WorkerInfo.from_json(value)
    path = key.removeprefix(WORKERS)
    if worker.name != worker_name(path):
        raise ValueError(f"{key} names a worker {worker.name!r:.200}")
    if worker.app != app_of_worker(worker.name):
        raise ValueError(f"{key} names a worker of application {worker.app!r:.200}")
    return worker


def last_worker(value: bytes) -> int:
    """Reads the id in a record below `last-worker/`. Raises ValueError if there is none."""
    number: int = read("a record of a worker", value, id=int)["id"]
    return number


# -- requests -----------------------------------------------------------------------------------------------------


def drained(key: str, value: bytes) -> Member:
    """Reads the member that a request below `drains/` names. Raises ValueError if it makes no sense."""
    name = check_name("server", key.removeprefix(DRAINS))
    number: int = read("a request to drain", value, incarnation=int)["incarnation"]
    if not number:
        raise ValueError("no server has incarnation 0")
    return Member(name, number)


def leaves(value: bytes) -> bool:
    """Whether a request to drain says that the server's process is about to end. Raises ValueError if it makes no
    sense."""
    return read("a request to drain", value).get(LEAVES) is True


class RangeRecovery(NamedTuple):
    """A request to recover ranges that no server has any more.

    ranges    the ranges to restore from a checkpoint
    given_up  members that cannot come back, as a person says
    """

    ranges: frozenset[int] = frozenset()
    given_up: frozenset[Member] = frozenset()


def range_recovery_of(value: bytes) -> RangeRecovery:
    """Reads the value of RANGE_RECOVERY. Raises ValueError if it makes no sense."""
    record = read(RANGE_RECOVERY, value, ranges=list, given_up=list)
    try:
        given_up = frozenset(Member(str(name), int(incarnation)) for name, incarnation in record["given_up"])
        return RangeRecovery(frozenset(map(int, record["ranges"])), given_up)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"{RANGE_RECOVERY} makes no sense: {error}") from None


# -- tables -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TableEntry:
    """A table in the store. name: "application/name"; spec: as JSON; restored: it came from a checkpoint."""

    name: str
    id: int
    spec: str
    restored: bool = False


def table_of(key: str, value: bytes, *, dropping: bool = False) -> TableEntry | None:
    """Reads a table's entry. Returns None for a table that is being dropped, unless `dropping` asks for those as well.
    Raises ValueError if it makes no sense."""
    document = read(key, value)
    if document.get("dropping") and not dropping:
        return None
    check(key, document, id=int, spec=str)
    return TableEntry(key.removeprefix(TABLES), document["id"], document["spec"], not document.get("creator"))


# -- what happened ------------------------------------------------------------------------------------------------


def merge_losses(entries: Mapping[str, bytes]) -> list[dict[str, Any]]:
    """Reads the records below LOSSES, oldest first, each with what workers have added below KNOWN. Raises ValueError if
    one makes no sense.

    The leader notes which ranges were recovered, and which steps of each worker are missing there, as far as servers
    know. A worker that lives knows its own missing steps exactly, so its note replaces the leader's.
    """
    found = []
    for key in sorted(key for key in entries if key.startswith(LOSSES)):
        loss = read(key, entries[key], epoch=int, workers=list)
        for worker in loss["workers"]:
            if not isinstance(worker, dict):
                raise ValueError(f"{key} has a worker that is no JSON object")
            check(key, worker, id=int, name=str, have=int, to=int)
            own = known_key(loss["epoch"], worker["id"], worker["name"])
            with suppress(ValueError):  # the leader's word stays
                worker["to"] = read(own, entries.get(own, b""), committed=int)["committed"]
        found.append(loss)
    return found


class Failover(NamedTuple):
    """The newest failover, for people.

    epoch              of the view without the lost servers
    detected, written  Unix time, by the leader's clock
    """

    epoch: int
    detected: float
    written: float

    def to_json(self) -> bytes:
        """The value of FAILOVER."""
        return json.dumps(self._asdict()).encode()

    @classmethod
    def from_json(cls, value: bytes) -> Failover:
        """The inverse of `to_json`. Raises ValueError for anything else."""
        record = read(FAILOVER, value, epoch=int, detected=float, written=float)
        found = cls(record["epoch"], record["detected"], record["written"])
        if not 0 <= found.written - found.detected < 3600:
            raise ValueError(f"a failover was found at {found.detected}, and written at {found.written}")
        return found
