"""Data shards: hands samples out to workers, a shard per step. `elasticps.client.data_shards` is the worker's side.

Shards are numbered through all epochs, and handed out in that order. The log of the application's *group range* holds
"worker w used shard i at clock c" if and only if it holds the push of that step: the push itself names its shard. A
shard is done once its worker reports clock c as committed. When a worker leaves the roster, its shards go back to the
others, each with what is known of its use: a worker that gets a used shard asks all heads whether clock c is committed
everywhere, and then reports the shard as done or trains it again.

Claims are idempotent: a worker asks to *hold* n unused shards, and is answered with all shards that it holds.

`ShardLedger` is state that only logged operations change, and that moves with its range. `ShardDispenser` answers
CLAIM_SHARDS at the head of the group range.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from elasticps.kernels.hashing import group_range
from elasticps.model.sharding import GROUP_BITS, MAX_SAMPLES, MAX_SHARDS, ShardSpec
from elasticps.server.core.barrier_state import BarrierGroup, RoundStep
from elasticps.server.core.group_log import GroupLog, NoTicket
from elasticps.server.core.requests import Asker, Body, RequestError
from elasticps.wire.frames import FrameError, Header, Kind, json_body, json_frame, text, whole, wholes
from elasticps.wire.headers import ClaimShardsHeader
from replication.messages import OperationKind
from replication.progress import MAX_CLOCK

MAX_SETS = (1 << 16) - 1  # of all applications with one group range


class Used(NamedTuple):
    """A shard was used by a step: the worker, and the step's clock; (0, 0) for one that was not."""

    worker: int
    clock: int


UNUSED = Used(0, 0)


class ShardMark(NamedTuple):
    """What a push says of the shard that it trains: the id of the set, and the shard's number."""

    set: int
    shard: int


class Claim(NamedTuple):
    """CLAIM_SHARDS: `worker` wants to hold `want` unused shards. `committed`: its steps up to there are; lost: workers
    that hold shards and have left the roster; done: shards that others had trained already; back: it gives back."""

    app: str
    name: str
    spec: ShardSpec
    worker: int
    committed: int
    want: int
    lost: tuple[int, ...]
    done: tuple[int, ...]
    back: tuple[int, ...]


@dataclass
class Doing:
    """A shard in a worker's hands: the clock of the step that uses it, 0 for none yet; who may have used it before."""

    clock: int
    before: Used


@dataclass
class ShardSet:
    """One set of shards. `upcoming`: the next one that nobody has had; `returned`: those given back or taken from lost
    workers, with who may have used them; `doing`: by worker, then by shard."""

    id: int
    spec: ShardSpec
    upcoming: int = 0
    done: int = 0
    returned: dict[int, Used] = field(default_factory=dict)
    doing: dict[int, dict[int, Doing]] = field(default_factory=dict)

    def idle(self, step: Claim) -> bool:
        """Whether a claim would change nothing, and there is nothing to tell but to wait, or that all is done."""
        mine = self.doing.get(step.worker, {}).values()
        return (
            not (step.done or step.back or step.lost or self.returned)
            and self.upcoming == self.spec.total
            and all(doing.clock > step.committed for doing in mine)
        )

    def settle(self, worker: int, committed: int) -> None:
        """All steps of a worker up to `committed` are: the shards that they used are done."""
        mine = self.doing.get(worker, {})
        for shard in [s for s, doing in mine.items() if 0 < doing.clock <= committed]:
            del mine[shard]
            self.done += 1

    def finish(self, worker: int, shards: Iterable[int]) -> None:
        """Counts shards that a worker holds as done: an earlier holder turned out to have trained them."""
        mine = self.doing.get(worker, {})
        for shard in shards:
            if shard in mine and not mine[shard].clock:
                del mine[shard]
                self.done += 1

    def give_back(self, worker: int, shards: Iterable[int]) -> None:
        """Unused shards go back to the others."""
        mine = self.doing.get(worker, {})
        for shard in shards:
            if shard in mine and not mine[shard].clock:
                self.returned[shard] = mine.pop(shard).before

    def lose(self, workers: Iterable[int]) -> None:
        """Workers are gone: all that they held goes back to the others."""
        for worker in workers:
            for shard, doing in self.doing.pop(worker, {}).items():
                self.returned[shard] = Used(worker, doing.clock) if doing.clock else doing.before

    def hand_out(self, worker: int, want: int) -> None:
        """Gives a worker unused shards until it holds `want`: fewer towards the end, so that all end together."""
        mine = self.doing.setdefault(worker, {})
        left = self.spec.total - self.upcoming + len(self.returned)
        want = min(want, max(1, left // (2 * len(self.doing)))) if want else 0
        unused = sum(not doing.clock for doing in mine.values())
        for _ in range(want - unused):
            if self.returned:
                shard = min(self.returned)
                mine[shard] = Doing(0, self.returned.pop(shard))
            elif self.upcoming < self.spec.total:
                mine[self.upcoming] = Doing(0, UNUSED)
                self.upcoming += 1
        if not mine:
            del self.doing[worker]

    def held(self, worker: int) -> list[tuple[int, Used]]:
        """The unused shards that a worker holds, in order, with who may have used them before."""
        mine = self.doing.get(worker, {})
        return [(shard, mine[shard].before) for shard in sorted(mine) if not mine[shard].clock]

    def parts(self, most: int) -> Iterator[ShardSet]:
        """Sets with at most so many shards each, that `extend` makes this one of."""
        returned = list(self.returned.items())
        doing = [(worker, shard, one) for worker, mine in self.doing.items() for shard, one in mine.items()]
        for at in range(0, max(1, len(returned), len(doing)), most):
            part = ShardSet(self.id, self.spec, self.upcoming, self.done, dict(returned[at : at + most]))
            for worker, shard, one in doing[at : at + most]:
                part.doing.setdefault(worker, {})[shard] = one
            yield part

    def extend(self, part: ShardSet) -> None:
        """Takes the next part in."""
        self.returned.update(part.returned)
        for worker, mine in part.doing.items():
            self.doing.setdefault(worker, {}).update(mine)


RangeShards = dict[str, dict[str, ShardSet]]
"""What a piece of a range carries: sets by application and name."""


class ShardLedger:
    """The sets of all applications whose group ranges are held here."""

    def __init__(self, ranges: int) -> None:
        self._ranges = ranges
        self._sets: dict[str, dict[str, ShardSet]] = {}

    def find(self, app: str, name: str) -> ShardSet | None:
        """A set, if it is known here."""
        return self._sets.get(app, {}).get(name)

    # --- operations -------------------------------------------------------------------------------------------------

    def take(self, step: Claim) -> None:
        """Carries out a claim; one with another spec than the set has changes nothing."""
        found = self._open(step.app, step.name, step.spec)
        if found is None or found.spec != step.spec:
            return
        found.settle(step.worker, step.committed)
        found.finish(step.worker, step.done)
        found.give_back(step.worker, step.back)
        found.lose(worker for worker in step.lost if worker != step.worker)
        found.hand_out(step.worker, step.want)

    def _open(self, app: str, name: str, spec: ShardSpec) -> ShardSet | None:
        found = self.find(app, name)
        if found is None and spec.possible:
            group = group_range(app, self._ranges)
            count = sum(len(sets) for other, sets in self._sets.items() if group_range(other, self._ranges) == group)
            if count < MAX_SETS:
                found = ShardSet((count + 1) << GROUP_BITS | group, spec)
                self._sets.setdefault(app, {})[name] = found
        return found

    def note(self, mark: ShardMark, worker: int, clock: int) -> None:
        """A worker's push of step `clock` uses a shard; no effect if the worker does not hold it any more. A step that
        its synchronous round was closed without comes again, at a later clock."""
        for sets in self._sets.values():
            for one in sets.values():
                if one.id == mark.set and (doing := one.doing.get(worker, {}).get(mark.shard)) is not None:
                    doing.clock = max(doing.clock, clock)

    def owns(self, app: str, number: int) -> bool:
        """Whether a set of that id belongs to an application."""
        return any(one.id == number for one in self._sets.get(app, {}).values())

    # --- ranges -----------------------------------------------------------------------------------------------------

    def erase(self, ranges: Iterable[int]) -> None:
        """Forgets everything about these ranges."""
        gone = set(ranges)
        for app in [a for a in self._sets if group_range(a, self._ranges) in gone]:
            del self._sets[app]

    def dump(self, r: int) -> RangeShards:
        """What belongs to range r; not a copy."""
        return {app: sets for app, sets in self._sets.items() if group_range(app, self._ranges) == r}

    def load(self, piece: RangeShards, more: bool = False) -> None:
        """Takes over what `dump` gave. more: it goes on where the piece before ended, also in the midst of a set."""
        for app, sets in piece.items():
            mine = self._sets.setdefault(app, {})
            for name, one in sets.items():
                if more and name in mine:
                    mine[name].extend(one)
                else:
                    mine[name] = one

    def words(self, r: int) -> list[int]:
        """Numbers that replicas of a range must agree on, for digests."""
        words = []
        for app, sets in sorted(self.dump(r).items()):
            for name, one in sorted(sets.items()):
                words += [len(app), len(name), one.id, one.upcoming, one.done, len(one.returned)]
                words += [n for shard in sorted(one.returned) for n in (shard, *one.returned[shard])]
                for worker in sorted(one.doing):
                    for shard, doing in sorted(one.doing[worker].items()):
                        words += [worker, shard, doing.clock]
        return words


def group_of(mark: ShardMark) -> int:
    """The group range of the set that a mark names."""
    return mark.set & ((1 << GROUP_BITS) - 1)


MAX_HELD = 1024
MAX_NAME = 200


class ShardDispenser:
    """Its handler."""

    def __init__(self, log: GroupLog, shards: ShardLedger) -> None:
        self._group = log
        self._serving, self._rounds, self._shards = log.serving, log.rounds, shards
        self.handlers: dict[int, Callable[[Asker, Header, Body], None]] = {Kind.CLAIM_SHARDS: self._claim}

    def _claim(self, connection: Asker, header: Header, body: Body) -> None:
        claim = _read(connection, header, body)
        group = self._group.group_range(connection, header, body)
        if group is None:
            return
        found = self._shards.find(claim.app, claim.name)
        if found is not None:
            _check(claim, found)
            if self._group.knows_the_lost(claim.app):
                claim = claim._replace(lost=tuple(sorted(w for w in found.doing if w not in self._serving.workers)))
            if found.idle(claim):  # workers that wait ask often: that need not go down the log
                document = self._document(found, claim)
                connection.send(json_frame(Kind.SHARDS, document, request=header.request, epoch=self._serving.epoch))
                return

        def answer() -> bytes:
            found = self._shards.find(claim.app, claim.name)
            if found is None:
                raise RequestError("busy", f"there are too many sets of shards already for {claim.name!r} to be made")
            _check(claim, found)  # another one with that name may have been on its way
            document = self._document(found, claim)
            return json_frame(Kind.SHARDS, document, request=header.request, epoch=self._serving.epoch)

        version = self._serving.roster_version
        if self._rounds.groups.get(claim.app, BarrierGroup()).roster < version:  # by which whoever asks is known
            self._group.log(NoTicket(), OperationKind.BARRIER_JOIN, RoundStep(claim.app, version, ()), group)
        self._group.log(
            self._group.ticket(connection, header.kind, header.request, answer),
            OperationKind.CLAIM_SHARDS,
            claim,
            group,
        )

    def _document(self, found: ShardSet, claim: Claim) -> dict[str, object]:
        rounds = self._rounds.groups.get(claim.app, BarrierGroup())
        held = [[shard, *used, rounds.last.get(used.worker, 0)] for shard, used in found.held(claim.worker)]
        return {"set": found.id, "held": held, "done": found.done, "total": found.spec.total}


def _read(connection: Asker, header: Header, body: Body) -> Claim:
    document, committed = json_body(body.data), ClaimShardsHeader.of(header).committed
    try:
        samples, size, epochs = (whole(document[name], MAX_SAMPLES, 1) for name in ("samples", "size", "epochs"))
        seed = None if document["seed"] is None else whole(document["seed"], (1 << 64) - 1)
        name, want = text(document["name"], MAX_NAME), whole(document["want"], MAX_HELD)
        done, back = (wholes(document[name], MAX_SHARDS) for name in ("done", "back"))
    except KeyError as error:
        raise FrameError(f"a take lacks {error}") from None
    spec = ShardSpec(samples, size, epochs, seed)
    if max(len(done), len(back)) > MAX_HELD:
        raise FrameError(f"a take speaks of at most {MAX_HELD} shards")
    if not spec.possible or committed >= MAX_CLOCK:
        raise FrameError(f"a take of shards that cannot be: {spec}")
    return Claim(connection.app, name, spec, connection.worker, committed, want, (), done, back)


def _check(claim: Claim, found: ShardSet) -> None:
    if found.spec != claim.spec:
        theirs, ours = found.spec._asdict(), claim.spec._asdict()
        differ = ", ".join(f"{key} {ours[key]} instead of {theirs[key]}" for key in theirs if ours[key] != theirs[key])
        raise RequestError(
            "spec", f"shards {claim.name!r} exist with another cut: {differ}. Use the same, or another name"
        )
