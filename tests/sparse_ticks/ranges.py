"""A model of sparse ticks, without bytes: pushes name only the ranges that they touch.

Today every step of a worker ticks every range, so one number says how far a worker is anywhere. Here a step names the
ranges that it touches, each with `prev`: the worker's progress there before it. One range is the worker's *home*: each
step ticks it, too, with a record of what it touches and of the clock up to which the worker knows all to be committed.

- A head judges a worker's progress P in a range. P = prev: next. P >= after: a duplicate. P < prev: a gap, unless all
  up to prev is known to be committed (the range came back from a checkpoint, without what came later). Anything else is
  no frame of this worker.
- A step has parts. The last part ticks all ranges that the step touches, and home. So progress in the middle of a step
  means that the step is not whole in that range.
- A step is committed when all ranges that it touches and home have acknowledged its last part.
- A successor reads home. All steps up to the newest record's `committed` are committed. For each later record it asks
  the ranges that the record names; the first step that is not committed in one of them ends what is trained.
- A shard is done when the step that marks it is committed; who gets it after a loss learns that in the same way.
- A worker holds for a cut when none of its steps is outstanding, and reports a digest of its progress in all ranges.
  The cut is of one moment if the digests of the ranges add up to the same.
- Under bounded delay a home reports its workers' committed clocks to the head of the application's range. That head
  knows the lowest clock only when it has heard of every active worker.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from random import Random

PART = 16
MASK = (1 << 64) - 1

MISTAKES = {
    "a gap is applied": "a head takes a frame whose predecessor it lacks",
    "a gap is a duplicate": "a head answers a frame whose predecessor it lacks as if it had both",
    "home alone commits": "a step is committed when home has it",
    "a duplicate is answered at once": "a head answers a duplicate that its tail may lack",
    "prev is read at the resend": "prev is not that of the first send but the worker's newest step in the range",
    "prev is forgotten with the view": "a worker forgets its last step in ranges whose head changes",
    "only the last part's ranges tick": "ranges that only earlier parts touch stay in the middle of the step",
    "a record is not replicated": "home's records stay at its head",
    "a moved range forgets": "a snapshot leaves the workers' progress out",
    "a record claims its own step": "the record of step c says that all up to c are committed",
    "a jump needs no proof": "every gap counts as one of a range recovered from a checkpoint",
    "resume trusts home alone": "a successor takes home's newest record for trained",
    "resume reads applied": "a successor asks heads what they have, not what their tails have",
    "resume before the fence": "a successor asks ranges that its predecessor may still write to",
    "a shard by home alone": "a shard is done when home has its step",
    "a shard is asked about once": "a shard is handed out again while its step is on its way down a chain",
    "held when home is": "a worker holds for a cut when home has its newest step",
    "departed clocks are dropped": "a range forgets a worker that has left, though steps of it may come again",
    "a recovered range keeps its marks": "a worker goes on counting what a recovered range had committed",
    "the delay reads home": "the lowest clock is that of steps that homes have, committed elsewhere or not",
    "a new head of the application guesses": "it answers before it has heard of every active worker",
}


class Broken(AssertionError):
    """A promise that a story has seen broken."""


def after(clock: int, part: int, last: bool) -> int:
    """The progress that a part leaves."""
    return clock << PART if last else (clock - 1) << PART | part + 1


def digest(r: int, worker: int, progress: int) -> int:
    """A number for (range, worker, progress), 0 for no progress: sums of these are compared, modulo 2^64."""
    if not progress:
        return 0
    x = (r * 0x9E3779B97F4A7C15 ^ worker * 0xC2B2AE3D27D4EB4F ^ progress * 0x165667B19E3779F9) & MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


@dataclass(frozen=True)
class Tick:
    """A part of a step, as one range gets it. names: at home, in the last part, the ranges that the step touches."""

    worker: int
    clock: int
    part: int
    last: bool
    prev: int
    committed: int
    touched: bool  # in this part, not only ticked by the last one
    names: frozenset[int] | None = None
    shard: int | None = None

    @property
    def after(self) -> int:
        return after(self.clock, self.part, self.last)


@dataclass
class State:
    """What a replica has of a range. applied: the parts that it has, in order, for the judge alone."""

    progress: dict[int, int] = field(default_factory=dict)
    records: dict[int, dict[int, frozenset[int]]] = field(default_factory=dict)
    committed: dict[int, int] = field(default_factory=dict)  # by worker, as its newest tick here said
    shards: dict[int, tuple[int, int]] = field(
        default_factory=dict
    )  # by number: the worker and step that marked it last
    applied: list[tuple[int, int, int]] = field(default_factory=list)
    cut: int = 0

    def apply(self, tick: Tick, with_records: bool) -> None:
        """Does what a logged tick says."""
        self.progress[tick.worker] = tick.after
        self.committed[tick.worker] = max(self.committed.get(tick.worker, 0), tick.committed)
        if tick.touched:
            self.applied.append((tick.worker, tick.clock, tick.part))
        if tick.shard is not None and tick.last:
            self.shards[tick.shard] = tick.worker, tick.clock
        if tick.names is not None and with_records:
            records = self.records.setdefault(tick.worker, {})
            records[tick.clock] = tick.names
            for clock in [c for c in records if c <= tick.committed]:
                del records[clock]


class Range:
    """A range and its chain: one log, and how much of it each replica has. heads: how often the head has changed.
    recoveries: how often all replicas were lost. log: ticks and numbers of cuts."""

    def __init__(self, r: int, replicas: int, mistake: str) -> None:
        self.r = r
        self.mistake = mistake
        self.log: list[Tick | int] = []
        self.copies = [State() for _ in range(replicas)]
        self.has = [0] * replicas
        self.heads = self.recoveries = 0
        self.roster: frozenset[int] | None = None
        self.at_cut: dict[int, State] = {}

    @property
    def head(self) -> State:
        return self.copies[0]

    @property
    def tail(self) -> State:
        return self.copies[-1]

    def judge(self, tick: Tick) -> str:
        """What the head does with a frame: next, duplicate, gap or fenced."""
        if self.roster is not None and tick.worker not in self.roster:
            return "fenced"
        have = self.head.progress.get(tick.worker, 0)
        known = tick.committed << PART
        jump = have < tick.prev and (tick.prev <= known or self.mistake == "a jump needs no proof")
        if have == tick.prev or jump:
            return "next"
        if have >= tick.after or tick.after <= known:
            return "duplicate"
        if have < tick.prev:
            return {"a gap is applied": "next", "a gap is a duplicate": "duplicate"}.get(self.mistake, "gap")
        raise Broken(f"range {self.r}: progress {have:#x} is between {tick.prev:#x} and {tick.after:#x}")

    def write(self, entry: Tick | int) -> None:
        """The head logs and applies."""
        self.log.append(entry)
        self.pass_on(0)

    def pass_on(self, copy: int) -> None:
        """A replica applies its next entry."""
        entry = self.log[self.has[copy]]
        self.has[copy] += 1
        if isinstance(entry, int):
            self.copies[copy].cut = entry
            if copy == len(self.copies) - 1:
                self.at_cut[entry] = deepcopy(self.tail)
        else:
            self.copies[copy].apply(entry, with_records=copy == 0 or self.mistake != "a record is not replicated")

    def replicate(self, random: Random) -> None:
        """Some follower comes as far as the one before it, or nearly."""
        if len(self.copies) > 1:
            copy = random.randrange(1, len(self.copies))
            for _ in range(random.randint(1, 3)):
                if self.has[copy] < self.has[copy - 1]:
                    self.pass_on(copy)

    def acknowledged(self, worker: int) -> int:
        """The worker's progress that all replicas have."""
        return min(copy.progress.get(worker, 0) for copy in self.copies)

    def snapshot(self) -> State:
        """What a joiner gets of the tail."""
        state = deepcopy(self.tail)
        if self.mistake == "a moved range forgets":
            state.progress.clear()
        return state

    def lose(self, copy: int) -> None:
        """A replica dies; a joiner is filled from the tail."""
        if len(self.copies) > 1:
            del self.copies[copy], self.has[copy]
            self.copies.append(self.snapshot())
            self.has.append(self.has[-1])
            if copy == 0:
                self.heads += 1
                del self.log[self.has[0] :]

    def move(self) -> None:
        """A joiner is filled from the tail, then the head leaves: it hands over all that it has."""
        self.settle()
        self.copies.append(self.snapshot())
        self.has.append(self.has[-1])
        del self.copies[0], self.has[0]
        self.heads += 1

    def recover(self, state: State | None) -> None:
        """All replicas are lost; new ones begin with what a checkpoint has."""
        self.log.clear()
        self.copies = [deepcopy(state) if state is not None else State() for _ in self.copies]
        self.has = [0] * len(self.copies)
        self.heads += 1
        self.recoveries += 1

    def fence(self, roster: frozenset[int]) -> None:
        """Follows a roster."""
        self.roster = roster
        if self.mistake == "departed clocks are dropped":
            for copy in self.copies:
                for worker in [w for w in copy.progress if w not in roster]:
                    del copy.progress[worker]

    def settle(self) -> None:
        """All replicas come as far as the head."""
        for copy in range(1, len(self.copies)):
            while self.has[copy] < self.has[copy - 1]:
                self.pass_on(copy)
