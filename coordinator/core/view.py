"""The view: an immutable snapshot of the owners of all ranges, and its codec. Pure.

Only the leader writes views, each with an epoch one above the last. A view says for every range of the key space which
servers hold it, head first, and since which epoch they have done so. The roster of workers has a version of its own, so
that a worker that joins bounces no frame.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property, lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coordinator.core.decoding import inflate, read_fields, read_json, read_rows
from coordinator.core.names import check_address, check_identity, check_name, check_worker
from replication.chain import Chains, CopyState, Member

PROTOCOL = 4  # version of the frames between workers, servers and coordinators; docs/reference/compatibility.md
RANGES_MAX = 1 << 16
REPLICAS_MAX = 16
SERVERS_MAX = 4096
WORKERS_MAX = 1 << 16
REASON_MAX = 1000
WEIGHT_MAX = 64.0
DIGEST_BYTES = 16

_MAGIC = b"EPSV\x04"
_FIXED = struct.Struct("<QIII")  # epoch, ranges, replicas, bytes of the JSON that follows
_ROSTER_MAGIC = b"EPSR\x01"


@dataclass(frozen=True)
class ServerInfo:
    """One incarnation of a server.

    `address` is "host:port" of the data plane, `admin` of its gRPC service ("" = none), `zone` names what fails
    together ("" = unknown), `weight` is its share of the ranges relative to the others. ValueError if unusable.
    """

    name: str
    incarnation: int
    address: str
    admin: str = ""
    zone: str = ""
    weight: float = 1.0

    def __post_init__(self) -> None:
        check_name("server", self.name)
        _check_count("incarnation", self.incarnation, 1, 1 << 62)
        check_address("server address", self.address)
        if self.admin:
            check_address("admin address", self.admin)
        if self.zone:
            check_name("zone", self.zone)
        _check_weight(self.weight)

    @cached_property
    def member(self) -> Member:
        """The server as replication names it."""
        return Member(self.name, self.incarnation)

    def to_json(self) -> bytes:
        """The value under `servers/<name>`."""
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, data: bytes) -> ServerInfo:
        """The inverse of `to_json`; ValueError on anything else."""
        return cls(**read_fields("server", data, cls))


@dataclass(frozen=True, eq=False)
class View:
    """The owners of all ranges in one epoch. Checked when made; arrays are read-only; equal by value.

    cluster  its identity: the name, and what distinguishes it from others of that name
    chains   int32 [ranges, replicas]: indices into `servers`, head first; -1 = no replica there, only after the last
    joining  int32 [ranges]: index of the replica being filled, -1 = none
    since    int64 [ranges]: the epoch in which the range's chain or joining replica last changed
    reason   why the leader wrote this view, for people
    leaving  int32 [ranges]: index of the replica whose place the joining one takes when it is level, -1 = none or not
             decided. An intention, which the next view may change. By default none leaves.
    copy_state  int32 [ranges]: the `CopyState` of the joining replica. A full replica that fell silent has a complete
             copy. Acknowledgements wait for it until the replica that is left is confirmed; from then on it is late,
             until its server is heard again and it gets what it lacks. By default NONE.
    recovery_epoch  int64 [ranges]: the epoch in which the content of a range was given up, because no server has it any
             more, to be recovered from a checkpoint; 0 = never. Until a server has restored it, it has no replica.
    empty    (name, incarnation) of servers that have registered again, as that newer incarnation, without their data.
             The incarnation listed here has ended, and keeps its place because no other server has its data.
    """

    cluster: str
    epoch: int
    ranges: int
    replicas: int
    servers: tuple[ServerInfo, ...]
    chains: NDArray[np.int32]
    joining: NDArray[np.int32]
    since: NDArray[np.int64]
    reason: str
    leaving: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    copy_state: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    recovery_epoch: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    empty: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        check_identity(self.cluster)
        _check_count("epoch", self.epoch, 1, 1 << 62)
        check_ranges(self.ranges)
        _check_count("replicas", self.replicas, 1, REPLICAS_MAX)
        if len(self.servers) > SERVERS_MAX:
            raise ValueError(f"a view lists at most {SERVERS_MAX} servers, got {len(self.servers)}")
        _check_reason(self.reason)
        object.__setattr__(self, "servers", tuple(self.servers))
        if len(self._by_name) != len(self.servers):
            raise ValueError("a view lists each server name once")
        for name, incarnation in self.empty:
            check_name("server", name)
            _check_count("incarnation", incarnation, 1, 1 << 62)
            if (i := self.index(name)) < 0 or incarnation <= self.servers[i].incarnation:
                raise ValueError(f"a view says that {name} came back as {incarnation}, which it lists as no older one")
        if len(dict(self.empty)) != len(self.empty):
            raise ValueError("a view says twice that a server came back")
        object.__setattr__(self, "chains", _frozen("chains", self.chains, np.int32, (self.ranges, self.replicas)))
        object.__setattr__(self, "joining", _frozen("joining", self.joining, np.int32, (self.ranges,)))
        object.__setattr__(self, "since", _frozen("since", self.since, np.int64, (self.ranges,)))
        leaving = self.leaving if self.leaving.size else np.full(self.ranges, -1, np.int32)
        object.__setattr__(self, "leaving", _frozen("leaving", leaving, np.int32, (self.ranges,)))
        state = self.copy_state if self.copy_state.size else np.zeros(self.ranges, np.int32)
        object.__setattr__(self, "copy_state", _frozen("copy_state", state, np.int32, (self.ranges,)))
        recovered = self.recovery_epoch if self.recovery_epoch.size else np.zeros(self.ranges, np.int64)
        object.__setattr__(self, "recovery_epoch", _frozen("recovery_epoch", recovered, np.int64, (self.ranges,)))
        self._check_arrays()

    def _check_arrays(self) -> None:
        everyone = np.column_stack((self.chains, self.joining))
        low, high = min(everyone.min(), self.leaving.min()), max(everyone.max(), self.leaving.max())
        if low < -1 or high >= len(self.servers):
            raise ValueError(f"a view of {len(self.servers)} servers has an index outside -1..{len(self.servers) - 1}")
        ordered = np.sort(everyone, axis=1)
        if bool(((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any()):
            raise ValueError("a view has a server twice in one range")
        if bool(((self.chains[:, 1:] >= 0) & (self.chains[:, :-1] < 0)).any()):
            raise ValueError("a view has a chain with a gap before its last replica")
        alone = (self.chains >= 0).sum(axis=1) == 1
        if self.recovery_epoch.min() < 0 or bool((self.recovery_epoch > self.since).any()):
            raise ValueError(f"a view of epoch {self.epoch} has a range that began anew, but is older than that")
        if bool((self.copy_state == CopyState.RECOVERING)[(self.chains[:, 0] >= 0) | (self.joining < 0)].any()):
            raise ValueError("a view has a range brought back that has replicas, or by nobody")
        if (
            self.copy_state.min() < min(CopyState)
            or self.copy_state.max() > max(CopyState)
            or bool((self.copy_state > 0)[~alone | (self.joining < 0)].any())
        ):
            raise ValueError("a view keeps a copy where nobody joins, or behind other than one replica")
        if self.since.min() < 1 or self.since.max() > self.epoch:
            raise ValueError(f"a view of epoch {self.epoch} has a range changed outside epochs 1..{self.epoch}")

    @cached_property
    def by_member(self) -> Mapping[Member, ServerInfo]:
        """The servers, by what replication calls them."""
        return {server.member: server for server in self.servers}

    @cached_property
    def _by_name(self) -> dict[str, int]:
        return {server.name: i for i, server in enumerate(self.servers)}

    @cached_property
    def heads(self) -> NDArray[np.int32]:
        """int32 [ranges]: index of each range's head in `servers`, -1 where the range has no replica."""
        return _read_only(np.ascontiguousarray(self.chains[:, 0]))

    @cached_property
    def tails(self) -> NDArray[np.int32]:
        """int32 [ranges]: index of each range's tail (the head where it is alone), -1 where there is no replica."""
        last = np.maximum((self.chains >= 0).sum(axis=1) - 1, 0)
        return _read_only(np.take_along_axis(self.chains, last[:, None], axis=1)[:, 0].astype(np.int32))

    @cached_property
    def as_chains(self) -> Chains:
        """The view's chains, as replication sees them; members have the indices of `servers`."""
        members = tuple(server.member for server in self.servers)
        return Chains(self.epoch, members, self.chains, self.joining, self.since, self.copy_state, self.recovery_epoch)

    def index(self, name: str) -> int:
        """The index in `servers` of the server called `name`, -1 if it is not listed."""
        return self._by_name.get(name, -1)

    def __repr__(self) -> str:
        servers = ", ".join(f"{server.name}@{server.incarnation}" for server in self.servers)
        full = (self.chains >= 0).sum(axis=1)
        return (
            f"<View {self.epoch} of cluster {self.cluster!r}: {self.ranges} ranges of {self.replicas} replicas"
            f" ({full.min()} to {full.max()} are full), {(self.joining >= 0).sum()} joining;"
            f" servers {servers or 'none'}>"
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, View):
            return NotImplemented
        return self is other or (self.epoch == other.epoch and self.digest == other.digest)

    def __hash__(self) -> int:
        return hash((self.cluster, self.epoch))

    def encode(self) -> bytes:
        """The view as bytes: magic and version, then zlib of the fixed fields, JSON for the servers, the arrays.

        Made once; a view that was decoded gives the bytes that it came from.
        """
        return self._encoded

    @cached_property
    def digest(self) -> bytes:
        """DIGEST_BYTES that only equal views share."""
        return blake2b(self._body(), digest_size=DIGEST_BYTES).digest()

    @cached_property
    def _encoded(self) -> bytes:
        return _MAGIC + zlib.compress(self._body(), 1)

    def _body(self) -> bytes:
        servers = [row_of_server(server) for server in self.servers]
        more = [self.empty] if self.empty else []
        meta = json.dumps([self.cluster, self.reason, servers, *more], separators=(",", ":")).encode()
        return b"".join(
            (
                _FIXED.pack(self.epoch, self.ranges, self.replicas, len(meta)),
                meta,
                self.chains.astype("<i4").tobytes(),
                self.joining.astype("<i4").tobytes(),
                self.leaving.astype("<i4").tobytes(),
                self.copy_state.astype("<i4").tobytes(),
                self.since.astype("<i8").tobytes(),
                self.recovery_epoch.astype("<i8").tobytes(),
            )
        )

    @classmethod
    def decode(cls, data: bytes) -> View:
        """The inverse of `encode`. ValueError says what is wrong with bytes that are no valid view."""
        return _view(bytes(data))


@dataclass(frozen=True)
class WorkerInfo:
    """One incarnation of a worker. `id` is unique to the incarnation and never used again; `app` is its table space.

    `name` is unique in the cluster: `<app>/<name>` for workers of other applications than the default one.
    """

    id: int
    name: str
    incarnation: int
    app: str

    def __post_init__(self) -> None:
        _check_count("worker id", self.id, 1, 1 << 31)
        check_worker(self.name)
        _check_count("incarnation", self.incarnation, 1, 1 << 62)
        check_name("app", self.app)

    def to_json(self) -> bytes:
        """The value under `workers/<name>`."""
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @cached_property
    def fingerprint(self) -> int:
        """A number of DIGEST_BYTES that only equal workers share."""
        return int.from_bytes(blake2b(self.to_json(), digest_size=DIGEST_BYTES).digest(), "little")

    @classmethod
    def from_json(cls, data: bytes) -> WorkerInfo:
        """The inverse of `to_json`; ValueError on anything else."""
        return cls(**read_fields("worker", data, cls))


class RosterChange(NamedTuple):
    """The workers that a newer roster lists and the one before did not, and the reverse."""

    came: tuple[WorkerInfo, ...]
    left: tuple[WorkerInfo, ...]


@dataclass(frozen=True, eq=False)
class Roster:
    """The workers that live now, ordered by id. version: grows by one whenever the leader writes the roster; cluster:
    the cluster's identity, as in views."""

    version: int
    workers: tuple[WorkerInfo, ...]
    cluster: str = ""

    def __post_init__(self) -> None:
        _check_count("roster version", self.version, 1, 1 << 62)
        if len(self.workers) > WORKERS_MAX:
            raise ValueError(f"a roster lists at most {WORKERS_MAX} workers, got {len(self.workers)}")
        ids = [worker.id for worker in self.workers]
        if ids != sorted(set(ids)) or len({worker.name for worker in self.workers}) != len(ids):
            raise ValueError("a roster lists each worker id and name once, in the order of ids")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Roster):
            return NotImplemented
        mine, its = ((each.version, each.cluster, each.workers) for each in (self, other))
        return self is other or mine == its

    def __hash__(self) -> int:
        return hash((self.cluster, self.version))

    @cached_property
    def by_id(self) -> Mapping[int, WorkerInfo]:
        """The workers by id."""
        return {worker.id: worker for worker in self.workers}

    @cached_property
    def ids(self) -> frozenset[int]:
        """The workers' ids."""
        return frozenset(self.by_id)

    @cached_property
    def newest(self) -> Mapping[tuple[str, str], int]:
        """The same ids by application and name."""
        return {(worker.app, worker.name): worker.id for worker in self.workers}

    def change_from(self, before: Roster | None) -> RosterChange:
        """How it differs from an older roster: worked out already where it was made from that one by a difference."""
        known = self.__dict__.get("change")
        if known is not None and before is not None and known[:2] == (before.version, before.fingerprint):
            return RosterChange(*known[2:])
        old, new = {} if before is None else before.by_id, self.by_id
        came, left = sorted(new.keys() - old.keys()), sorted(old.keys() - new.keys())
        return RosterChange(tuple(map(new.__getitem__, came)), tuple(map(old.__getitem__, left)))

    @cached_property
    def fingerprint(self) -> int:
        """The sum of its workers' fingerprints, modulo 2 ** (8 * DIGEST_BYTES): a difference changes it in the time
        that the difference takes, not the roster."""
        return sum(worker.fingerprint for worker in self.workers) % (1 << 8 * DIGEST_BYTES)

    def encode(self) -> bytes:
        """The roster as bytes: magic and version, then zlib of JSON."""
        workers = [[w.id, w.name, w.incarnation, w.app] for w in self.workers]
        document = {"version": self.version, "workers": workers, "cluster": self.cluster}
        return _ROSTER_MAGIC + zlib.compress(json.dumps(document, separators=(",", ":")).encode(), 1)

    @classmethod
    def decode(cls, data: bytes) -> Roster:
        """The inverse of `encode`. ValueError says what is wrong."""
        found = read_fields("roster", inflate("roster", _ROSTER_MAGIC, data), cls)
        rows = read_rows("roster", found["workers"], 4)
        return cls(found["version"], tuple(WorkerInfo(*row) for row in rows), found.get("cluster", ""))


@dataclass(frozen=True)
class ClusterConfig:
    """The properties of a cluster that are fixed when it is created.

    ranges       P, a power of two of at least 2
    replicas     R, servers per range
    min_servers  servers that must be registered before the first view
    protocol     version of the frames that its servers, workers and coordinators send each other
    id           drawn when the cluster was made: another cluster of the same name has another one
    base         numbers given out under this config are above it
    """

    ranges: int = 256
    replicas: int = 2
    min_servers: int = 1
    protocol: int = PROTOCOL
    id: str = field(default="", kw_only=True)
    base: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        check_ranges(self.ranges)
        _check_count("replicas", self.replicas, 1, REPLICAS_MAX)
        _check_count("min_servers", self.min_servers, 1, SERVERS_MAX)
        _check_count("protocol", self.protocol, 1, 1 << 15)
        if self.id:
            check_name("cluster id", self.id)
        _check_count("base", self.base, 0, 1 << 31)

    def identity(self, name: str) -> str:
        """Returns the identity of the cluster with this name, which its views, rosters and hellos bear."""
        return f"{name}@{self.id}" if self.id else name

    def check_protocol(self, name: str) -> None:
        """Raises ValueError if the cluster with this name speaks another version of the protocol than this code."""
        if self.protocol != PROTOCOL:
            raise ValueError(
                f"cluster {name!r} speaks version {self.protocol} of the protocol, and this elasticps "
                f"version {PROTOCOL}: install here what the cluster runs; to upgrade it, end training, make a "
                "checkpoint, and restore that into a new cluster"
            )

    def to_json(self) -> bytes:
        """The value under `config`."""
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, data: bytes) -> ClusterConfig:
        """The inverse of `to_json`; ValueError on anything else."""
        return cls(**read_fields("cluster config", data, cls))


def row_of_server(server: ServerInfo) -> list[Any]:
    """A server as views list it."""
    return [server.name, server.incarnation, server.address, server.admin, server.zone, server.weight]


@lru_cache(maxsize=2 * SERVERS_MAX, typed=True)
def server_of_row(*row: Any) -> ServerInfo:
    """The inverse of `row_of_server`; ValueError or TypeError. One view after the other lists mostly the same servers,
    and to check one costs more than to read it."""
    return ServerInfo(*row)


def check_ranges(ranges: int) -> None:
    """Raises ValueError unless `ranges` is a power of two from 2 to RANGES_MAX."""
    _check_count("the number of ranges", ranges, 2, RANGES_MAX)
    if ranges & (ranges - 1):
        raise ValueError(f"the number of ranges must be a power of two, got {ranges}")


def _check_count(what: str, value: Any, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{what} must be a whole number from {low} to {high}, got {value!r}")


def _check_weight(weight: Any) -> None:
    if type(weight) not in (int, float) or not 0 < weight <= WEIGHT_MAX:
        raise ValueError(f"a server's weight must be above 0 and at most {WEIGHT_MAX:g}, got {weight!r}")


def _check_reason(reason: Any) -> None:
    if not isinstance(reason, str) or len(reason) > REASON_MAX:
        raise ValueError(f"a view's reason is a text of at most {REASON_MAX} characters")


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    array.flags.writeable = False
    return array


def _frozen(what: str, array: Any, dtype: type[np.generic], shape: tuple[int, ...]) -> NDArray[Any]:
    """Returns a private, read-only copy, so that nobody changes a view through the array it was made from."""
    source = np.asarray(array)
    if source.shape != shape or source.dtype.kind != "i":
        raise ValueError(f"{what} must be integers of shape {shape}, got {source.dtype} of shape {source.shape}")
    return _read_only(np.array(source, dtype=dtype))


def _meta(data: bytes) -> tuple[str, str, tuple[ServerInfo, ...], tuple[tuple[str, int], ...]]:
    meta = read_json("view", data)
    if not isinstance(meta, list) or len(meta) not in (3, 4):
        raise ValueError("not a view: expected cluster, reason and servers")
    rows, empty = read_rows("view", meta[2], 6), read_rows("view", meta[3] if len(meta) > 3 else [], 2)
    try:
        return (
            meta[0],
            meta[1],
            tuple(server_of_row(*row) for row in rows),
            tuple((name, number) for name, number in empty),
        )
    except TypeError as error:  # a list or an object in place of a name
        raise ValueError(f"not a view: {error}") from None


@lru_cache(maxsize=4)
def _view(data: bytes) -> View:
    """The same view comes from the leader, from the store and from peers: it is read once."""
    body = inflate("view", _MAGIC, data)
    if len(body) < _FIXED.size:
        raise ValueError(f"not a view: only {len(body)} bytes")
    epoch, ranges, replicas, meta_size = _FIXED.unpack_from(body)
    check_ranges(ranges)
    _check_count("replicas", replicas, 1, REPLICAS_MAX)
    arrays_at = _FIXED.size + meta_size
    if len(body) != arrays_at + ranges * (4 * replicas + 4 + 4 + 4 + 8 + 8):
        raise ValueError(f"a view of {ranges} ranges and {replicas} replicas has {len(body)} bytes: wrong length")
    cluster, reason, servers, empty = _meta(body[_FIXED.size : arrays_at])
    chains = np.frombuffer(body, "<i4", ranges * replicas, arrays_at)
    joining, leaving, state = np.frombuffer(body, "<i4", 3 * ranges, arrays_at + chains.nbytes).reshape(3, ranges)
    since, recovered = np.frombuffer(body, "<i8", 2 * ranges, arrays_at + chains.nbytes + 12 * ranges).reshape(
        2, ranges
    )
    chains = chains.reshape(ranges, replicas)
    view = View(
        cluster, epoch, ranges, replicas, servers, chains, joining, since, reason, leaving, state, recovered, empty
    )  # fmt: skip
    view.__dict__["_encoded"] = data
    return view
