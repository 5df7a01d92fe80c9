"""Differences between one view or roster and the next, with which most receivers get by. Pure.

With 1,000 servers and 16,384 ranges a view takes 132 KB, and the death of a server changes 33 ranges of it. So a view
goes out as its difference from one that the receiver has. A difference names its base by epoch and digest, and the
digest of what it makes of it. Whoever receives it rebuilds the whole view and judges that, as if it had come whole.
Where the base is another one, or the result has another digest, nothing was received: a *gap*. Then the receiver asks
for the whole view.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from coordinator.core.decoding import inflate, read_json, read_rows
from coordinator.core.keys import CHANGES, ROSTER, VIEW
from coordinator.core.store import VALUE_MAX
from coordinator.core.view import (
    DIGEST_BYTES,
    REPLICAS_MAX,
    SERVERS_MAX,
    WORKERS_MAX,
    Roster,
    ServerInfo,
    View,
    WorkerInfo,
    check_ranges,
    row_of_server,
    server_of_row,
)

LONGEST_ROSTER_DIFFERENCE = 64 << 10  # then followers read the roster, which shrinks better as a whole
SHORT_BYTES = 1 << 10  # a difference that is no longer is written in any case
WHOLE_BYTES = 1 << 10  # a view that is no longer is sent whole: to make and to apply a difference takes more time
REMEMBERED = 8  # views from which differences are made: a receiver that is further behind gets the whole view
VIEW_CHANGES, ROSTER_CHANGES = CHANGES + VIEW + "/", CHANGES + ROSTER + "/"

_MAGIC = b"EPSD\x01"
_FIXED = struct.Struct(f"<Q{DIGEST_BYTES}sQ{DIGEST_BYTES}sIIIII")
_ROSTER_MAGIC = b"EPST\x01"
_ROSTER = struct.Struct(f"<Q{DIGEST_BYTES}sQ{DIGEST_BYTES}sII")


@dataclass(frozen=True, eq=False)
class ViewDifference:
    """What turns one view into a newer one of the same cluster. Arrays are as in views, of the changed ranges only.

    base, base_digest  the epoch and digest of the view that is changed; base 0: of none, there is only a newer one
    epoch, digest      those of the result
    ranges, replicas   those of both
    order    the servers of the result: (first, count) of the base, in its order, or a new one
    changed  int64 [n]: the ranges whose rows are below, ascending; in all others the same servers have the same places
    rows     int32 [n, replicas + 3]: chains, joining, leaving, copy_state
    epochs   int64 [n, 2]: since, recovery_epoch
    """

    base: int
    base_digest: bytes
    epoch: int
    digest: bytes
    ranges: int
    replicas: int
    reason: str
    order: tuple[tuple[int, int] | ServerInfo, ...]
    empty: tuple[tuple[str, int], ...]
    changed: NDArray[np.int64]
    rows: NDArray[np.int32]
    epochs: NDArray[np.int64]

    @classmethod
    def between(cls, base: View, view: View) -> ViewDifference:
        """The difference between two views of one cluster. ValueError if their ranges or replicas differ."""
        if (base.cluster, base.ranges, base.replicas) != (view.cluster, view.ranges, view.replicas):
            raise ValueError(f"{base} and {view} are of different clusters")
        order = _order(base.servers, view.servers)
        rows, epochs = _columns(base)
        found, times = _columns(view)
        differs = (_new_indices(base, order)[rows[:, :-1]] != found[:, :-1]).any(axis=1)
        changed = np.flatnonzero(differs | (rows[:, -1] != found[:, -1]) | (epochs != times).any(axis=1))
        return cls(
            base.epoch, base.digest, view.epoch, view.digest, view.ranges, view.replicas, view.reason, order,
            view.empty, changed, found[changed], times[changed],
        )  # fmt: skip

    @classmethod
    def notice(cls, view: View) -> ViewDifference:
        """Says that there is a view, and nothing of what it says: a gap to everybody who does not have it."""
        columns = _columns(view)
        none = np.empty(0, np.int64)
        return cls(
            0, bytes(DIGEST_BYTES), view.epoch, view.digest, view.ranges, view.replicas, view.reason, (), (), none,
            columns[0][none], columns[1][none],
        )  # fmt: skip

    def apply(self, base: View) -> View | None:
        """Returns the newer view, whole and checked as every view is; None if there is a gap."""
        if (self.base, self.base_digest) != (base.epoch, base.digest):
            return None
        if (self.ranges, self.replicas) != (base.ranges, base.replicas):
            return None
        rows, epochs = _columns(base)
        try:
            indices = _new_indices(base, self.order)
            rows[:, :-1] = indices[rows[:, :-1]]
            rows[self.changed], epochs[self.changed] = self.rows, self.epochs
            width = base.replicas
            view = View(
                base.cluster, self.epoch, base.ranges, width, _servers(base.servers, self.order), rows[:, :width],
                rows[:, width], epochs[:, 0], self.reason, rows[:, width + 1], rows[:, width + 2], epochs[:, 1],
                self.empty,
            )  # fmt: skip
        except (ValueError, IndexError):
            return None
        return view if view.digest == self.digest else None

    def encode(self) -> bytes:
        """The difference as bytes: magic and version, then zlib of the fixed fields, JSON for the servers, the arrays;
        of the changed ranges the first and the number of each run."""
        order = [row_of_server(each) if isinstance(each, ServerInfo) else list(each) for each in self.order]
        meta = json.dumps([self.reason, order, self.empty], separators=(",", ":")).encode()
        starts, counts = _runs(self.changed)
        fixed = _FIXED.pack(
            self.base, self.base_digest, self.epoch, self.digest, self.ranges, self.replicas, len(self.changed),
            len(starts), len(meta),
        )  # fmt: skip
        columns = (starts, counts, np.ascontiguousarray(self.rows.T))
        body = b"".join(each.astype("<i4").tobytes() for each in columns)
        body += np.ascontiguousarray(self.epochs.T).astype("<i8").tobytes()
        return _MAGIC + zlib.compress(fixed + meta + body, 1)

    @classmethod
    def decode(cls, data: bytes) -> ViewDifference:
        """The inverse of `encode`. ValueError says what is wrong with bytes that are none."""
        what = "difference of views"
        body = inflate(what, _MAGIC, data)
        if len(body) < _FIXED.size:
            raise ValueError(f"not a {what}: only {len(body)} bytes")
        base, base_digest, epoch, digest, ranges, replicas, count, runs, meta_size = _FIXED.unpack_from(body)
        check_ranges(ranges)
        if not 1 <= replicas <= REPLICAS_MAX or not runs <= count <= ranges or epoch <= base:
            raise ValueError(f"a {what} of {runs} runs of {count} of {ranges} ranges, from epoch {base} to {epoch}")
        at = _FIXED.size + meta_size
        if len(body) != at + 8 * runs + count * (4 * (replicas + 3) + 16):
            raise ValueError(f"a {what} of {runs} runs of {count} ranges has {len(body)} bytes: wrong length")
        reason, order, empty = _meta(what, body[_FIXED.size : at])
        starts, counts = np.frombuffer(body, "<i4", 2 * runs, at).reshape(2, runs).astype(np.int64)
        ends = starts + counts
        if counts.sum() != count or (counts < 1).any() or (runs and (starts[0] < 0 or ends[-1] > ranges)):
            raise ValueError(f"a {what} has runs of ranges outside 0..{ranges - 1}, or others than it says")
        if (starts[1:] <= ends[:-1]).any():
            raise ValueError(f"a {what} has runs of ranges that are not in order")
        changed = np.repeat(starts - np.cumsum(counts) + counts, counts) + np.arange(count)
        rows = np.frombuffer(body, "<i4", count * (replicas + 3), at + 8 * runs).reshape(replicas + 3, count).T
        epochs = np.frombuffer(body, "<i8", 2 * count, len(body) - 16 * count).reshape(2, count).T
        return cls(base, base_digest, epoch, digest, ranges, replicas, reason, order, empty, changed, rows, epochs)


@dataclass(frozen=True)
class RosterDifference:
    """What turns one roster into a newer one: who has left, by id, and who has come.

    base, base_print   the version and fingerprint of the roster that is changed; base 0: of none
    version, print_    those of the result
    """

    base: int
    base_print: int
    version: int
    print_: int
    left: tuple[int, ...]
    came: tuple[WorkerInfo, ...]

    @classmethod
    def between(cls, base: Roster, roster: Roster) -> RosterDifference:
        """The difference between two rosters of one cluster."""
        before, now = set(base.workers), set(roster.workers)
        left = sorted(worker.id for worker in before - now)
        came = sorted(now - before, key=lambda worker: worker.id)
        return cls(base.version, base.fingerprint, roster.version, roster.fingerprint, tuple(left), tuple(came))

    @classmethod
    def notice(cls, roster: Roster) -> RosterDifference:
        """Says that there is a roster, and nothing of what it says."""
        return cls(0, 0, roster.version, roster.fingerprint, (), ())

    def apply(self, base: Roster) -> Roster | None:
        """Returns the newer roster, checked as every roster is; None if there is a gap."""
        if (self.base, self.base_print) != (base.version, base.fingerprint):
            return None
        left = set(self.left)
        gone = tuple(base.by_id[id_] for id_ in sorted(left) if id_ in base.by_id)
        print_ = base.fingerprint + sum(w.fingerprint for w in self.came) - sum(w.fingerprint for w in gone)
        if len(gone) != len(left) or print_ % (1 << 8 * DIGEST_BYTES) != self.print_:
            return None
        try:
            return self._changed(base, left, gone)
        except ValueError:
            return None

    def _changed(self, base: Roster, left: Set[int], gone: tuple[WorkerInfo, ...]) -> Roster:
        """Makes the newer roster. ValueError if it cannot be. What is known of the base is not worked out again: of ten
        thousand workers a roster changes with each of them."""
        workers = [worker for worker in base.workers if worker.id not in left] if left else list(base.workers)
        workers += self.came
        if self.came:
            workers.sort(key=lambda worker: worker.id)  # mostly in order: whoever comes has the highest id
        roster = Roster(self.version, tuple(workers), base.cluster)
        by_id, newest = dict(base.by_id), dict(base.newest)
        for worker in gone:
            del by_id[worker.id], newest[worker.app, worker.name]
        by_id |= {worker.id: worker for worker in self.came}
        newest |= {(worker.app, worker.name): worker.id for worker in self.came}
        known = {"by_id": by_id, "newest": newest, "fingerprint": self.print_}
        roster.__dict__.update(known, change=(base.version, base.fingerprint, self.came, gone))
        return roster

    def encode(self) -> bytes:
        """The difference as bytes: magic and version, the fixed fields, then zlib of JSON."""
        came = [[w.id, w.name, w.incarnation, w.app] for w in self.came]
        prints = [value.to_bytes(DIGEST_BYTES, "little") for value in (self.base_print, self.print_)]
        fixed = _ROSTER.pack(self.base, prints[0], self.version, prints[1], len(self.left), len(came))
        return _ROSTER_MAGIC + zlib.compress(fixed + json.dumps([self.left, came], separators=(",", ":")).encode(), 1)

    @classmethod
    def decode(cls, data: bytes) -> RosterDifference:
        """The inverse of `encode`. ValueError says what is wrong."""
        what = "difference of rosters"
        body = inflate(what, _ROSTER_MAGIC, data)
        if len(body) < _ROSTER.size:
            raise ValueError(f"not a {what}: only {len(body)} bytes")
        base, base_print, version, print_, left_count, came_count = _ROSTER.unpack_from(body)
        if max(left_count, came_count) > WORKERS_MAX or version <= base:
            raise ValueError(f"a {what} from version {base} to {version}, of {left_count} and {came_count} workers")
        match read_json(what, body[_ROSTER.size :]):
            case [list(left), list(came)] if len(left) == left_count and len(came) == came_count:
                if not all(type(number) is int for number in left):
                    raise ValueError(f"not a {what}: an id is no number")
                workers = tuple(WorkerInfo(*row) for row in read_rows(what, came, 4))
            case _:
                raise ValueError(f"not a {what}: expected {left_count} ids and {came_count} workers")
        prints = [int.from_bytes(value, "little") for value in (base_print, print_)]
        return cls(base, prints[0], version, prints[1], tuple(left), workers)


class ViewHistory:
    """The newest view and some before it, which receivers may have."""

    def __init__(self) -> None:
        self._views: list[View] = []

    def add(self, view: View) -> None:
        """Takes the newest view. One of another cluster, or an older one, begins another history."""
        if self._views and (self._views[-1].cluster != view.cluster or self._views[-1].epoch >= view.epoch):
            self._views.clear()
        self._views = [*self._views[-REMEMBERED:], view]

    def since(self, epoch: int) -> bytes | None:
        """The encoded difference from the view of that epoch to the newest; None if the whole view serves better, or is
        all that there is."""
        base = next((each for each in self._views[:-1] if each.epoch == epoch), None)
        if base is None or len(self._views[-1].encode()) <= WHOLE_BYTES:
            return None
        return encoded_difference(base, self._views[-1])


@lru_cache(maxsize=2 * REMEMBERED)
def encoded_difference(base: View, view: View) -> bytes | None:
    """The difference between two views as bytes; None if it is long, and no shorter than the view."""
    if (base.ranges, base.replicas) != (view.ranges, view.replicas):
        return None
    data = ViewDifference.between(base, view).encode()
    return data if len(data) < max(SHORT_BYTES, len(view.encode())) else None


@lru_cache(maxsize=2 * REMEMBERED)
def apply_encoded(base: View, data: bytes) -> View | None:
    """Applies an encoded difference; None if there is a gap. ValueError if these bytes are none. The same difference
    comes from the leader, from the store and from peers: it is applied once."""
    return ViewDifference.decode(data).apply(base)


@lru_cache(maxsize=2 * REMEMBERED)
def apply_encoded_roster(base: Roster, data: bytes) -> Roster | None:
    """Applies an encoded difference of rosters, as `apply_encoded` does one of views."""
    return RosterDifference.decode(data).apply(base)


def change_of(value: View | Roster, base: View | Roster | None) -> tuple[str, bytes]:
    """Returns the key and the value that tell followers of the store of a view or roster that is written: its
    difference from the one before, or a notice if there was none or the whole serves better. The newest REMEMBERED of
    each stay."""
    data: bytes | None = None
    if isinstance(value, View):
        if isinstance(base, View) and base.cluster == value.cluster and base.epoch < value.epoch:
            data = encoded_difference(base, value)
        if data is not None and len(data) + len(value.encode()) > VALUE_MAX:  # both are written at once
            data = None
        return view_change_key(value.epoch), data or ViewDifference.notice(value).encode()
    if isinstance(base, Roster) and base.cluster == value.cluster and base.version < value.version:
        data = RosterDifference.between(base, value).encode()
    if data is None or len(data) > min(LONGEST_ROSTER_DIFFERENCE, VALUE_MAX - len(value.encode())):
        data = RosterDifference.notice(value).encode()
    return roster_change_key(value.version), data


def view_change_key(epoch: int) -> str:
    """The key of the difference that makes the view of this epoch."""
    return f"{VIEW_CHANGES}{epoch % REMEMBERED}"


def roster_change_key(version: int) -> str:
    """The key of the difference that makes the roster of this version."""
    return f"{ROSTER_CHANGES}{version % REMEMBERED}"


def follow_view(view: View, records: Iterable[bytes]) -> View | None:
    """Returns the newest view that these records of the store tell of, made from one that is known; None if there is a
    gap. ValueError if a record makes no sense."""
    found = [((each.epoch, each.digest), each.apply) for each in map(ViewDifference.decode, records)]
    return _follow(view, lambda known: (known.epoch, known.digest), found)


def follow_roster(roster: Roster, records: Iterable[bytes]) -> Roster | None:
    """Returns the newest roster that these records of the store tell of, as `follow_view` does the newest view."""
    found = [((each.version, each.print_), each.apply) for each in map(RosterDifference.decode, records)]
    return _follow(roster, lambda known: (known.version, known.fingerprint), found)


_Value = TypeVar("_Value", View, Roster)
_Version: TypeAlias = "tuple[int, bytes | int]"  # epoch and digest, or version and fingerprint


def _follow(
    known: _Value,
    version_of: Callable[[_Value], _Version],
    differences: Sequence[tuple[_Version, Callable[[_Value], _Value | None]]],
) -> _Value | None:
    """Applies the differences that lead on from what is known, each given with the version that it makes."""
    ordered = sorted(differences, key=lambda each: each[0][0])
    for version, apply in ordered:
        if version[0] > version_of(known)[0]:
            newer = apply(known)
            if newer is None:
                return None
            known = newer
    return known if ordered and ordered[-1][0] == version_of(known) else None


def _columns(view: View) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """int32 [P, replicas + 3] and int64 [P, 2], as in `ViewDifference`; copies."""
    rows = np.column_stack((view.chains, view.joining, view.leaving, view.copy_state))
    return rows, np.column_stack((view.since, view.recovery_epoch))


def _order(base: Sequence[ServerInfo], servers: Sequence[ServerInfo]) -> tuple[tuple[int, int] | ServerInfo, ...]:
    """The servers as runs of those of the base, and new ones."""
    at = {server: i for i, server in enumerate(base)}
    order: list[tuple[int, int] | ServerInfo] = []
    for server in servers:
        i = at.get(server, -1)
        last = order[-1] if order else None
        if i < 0:
            order.append(server)
        elif isinstance(last, tuple) and last[0] + last[1] == i:
            order[-1] = (last[0], last[1] + 1)
        else:
            order.append((i, 1))
    return tuple(order)


def _servers(base: Sequence[ServerInfo], order: Sequence[tuple[int, int] | ServerInfo]) -> tuple[ServerInfo, ...]:
    servers: list[ServerInfo] = []
    for each in order:
        if isinstance(each, ServerInfo):
            servers.append(each)
        else:
            servers += base[each[0] : sum(each)]
    return tuple(servers)


def _new_indices(base: View, order: Sequence[tuple[int, int] | ServerInfo]) -> NDArray[np.int32]:
    """int32 [servers of the base + 1]: where each is in the result, -1 if nowhere; the last element is that of -1.
    IndexError or ValueError for servers that the base does not have."""
    indices = np.full(len(base.servers) + 1, -1, np.int32)
    at = 0
    for each in order:
        if isinstance(each, ServerInfo):
            at += 1
            continue
        first, count = each
        if first + count > len(base.servers):
            raise ValueError(f"the base has {len(base.servers)} servers, not {first + count}")
        indices[first : first + count] = np.arange(at, at + count)
        at += count
    return indices


def _runs(ascending: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The first number of each run of consecutive ones, and how many it has."""
    first = np.flatnonzero(np.diff(ascending, prepend=-2) != 1)
    return ascending[first], np.diff(first, append=len(ascending))


def _meta(what: str, data: bytes) -> tuple[str, tuple[tuple[int, int] | ServerInfo, ...], tuple[tuple[str, int], ...]]:
    meta = read_json(what, data)
    match meta:
        case [str(reason), list(rows), list(empty)] if len(rows) <= 2 * SERVERS_MAX:
            pass
        case _:
            raise ValueError(f"not a {what}: expected a reason, servers and who is empty")
    order: list[tuple[int, int] | ServerInfo] = []
    total = 0
    try:
        for row in rows:
            if len(row) == 2:
                first, count = row
                if type(first) is not int or type(count) is not int or first < 0 or count < 1:
                    raise ValueError(f"not a {what}: {row!r:.100} are no servers of the base")
                order.append((first, count))
                total += count
            else:
                order.append(server_of_row(*row))
                total += 1
            if total > SERVERS_MAX:
                raise ValueError(f"not a {what}: it lists more than {SERVERS_MAX} servers")
        return reason, tuple(order), tuple((name, number) for name, number in read_rows(what, empty, 2))
    except TypeError as error:
        raise ValueError(f"not a {what}: {error}") from None
