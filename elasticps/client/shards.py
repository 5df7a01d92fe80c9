"""Samples in shards, handed out to the workers that are there; `elasticps.server.shards` has the whole story.

for shard in ps.shards(len(data), 64, epochs=3, shuffle_seed=1):
    ps.push({table: gradients(data[shard.indices])})     # one step per shard
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from elasticps.client.joining import Joining, clocks_of
from elasticps.client.network import Network
from elasticps.client.session import Session
from elasticps.client.synchronous import SyncRounds, ask_home
from elasticps.sharding import ShardSpec, permuted
from elasticps.wire.frames import HEADER_BYTES, Kind, json_frame, unpack_header
from replication.progress import PART_BITS

PREFETCH = 4  # shards that a worker asks to hold at once
POLL_FIRST_S = 0.02
POLL_MOST_S = 0.1


@dataclass(frozen=True)
class Shard:
    """What one step trains: samples `start` … `stop` - 1 of an epoch's order; `indices` says which these are."""

    epoch: int
    index: int
    start: int
    stop: int
    samples: int
    seed: int | None

    def __len__(self) -> int:
        return self.stop - self.start

    @cached_property
    def indices(self) -> NDArray[np.int64]:
        """The numbers of the samples, int64 [stop - start]; without a seed `start` … `stop` - 1."""
        order = np.arange(self.start, self.stop, dtype=np.int64)
        return order if self.seed is None else permuted(order, self.samples, self.seed, self.epoch)


class Lease(Protocol):
    """What says whether the cluster still counts on this worker."""

    def registered(self) -> int:
        """The lease under which this worker is registered, 0 if it has run out."""


class Parts(NamedTuple):
    """The parts of a client that shards need."""

    network: Network
    session: Session
    joining: Joining
    sync: SyncRounds | None
    control: Lease
    lock: threading.RLock


class Owner(Protocol):
    """The client."""

    app: str
    timeout: float

    def attach(self, shard: tuple[int, int] | None) -> None:
        """The next step that begins trains this shard: (set, number)."""

    def settle_all(self) -> None:
        """Waits until every step so far is committed and its round closed."""


class _Answer(NamedTuple):
    number: int  # of the set
    held: list[list[int]]  # [shard, worker, clock, last round of that worker]
    finished: bool
    decided: tuple[int, list[int]]


class Shards:
    """An iterator of the shards that this worker is to train; ends when all of them, whoever trains them, are done.

    The shard handed out last belongs to the next step that begins. One that is passed over goes back to the others
    when this worker has nothing else to do, or closes the iterator. While others still train the last shards, which
    may yet come back, the iterator waits. Nobody waits for this worker then, nor after the end: it takes part again
    with its next operation.
    """

    def __init__(self, owner: Owner, parts: Parts, name: str, spec: ShardSpec) -> None:
        self.name = name
        self.spec = spec
        self._owner = owner
        self._parts = parts
        self._lock = threading.Lock()
        self._queue: deque[int] = deque()  # held, and good to train
        self._handed: dict[int, int] = {}  # to the caller: shard -> clock of its step, 0 as long as there is none
        self._number = 0
        self._lease = 0
        self._closed = False

    def __iter__(self) -> Shards:
        return self

    def __next__(self) -> Shard:
        with self._lock:
            if self._closed:
                raise StopIteration
            if self._parts.control.registered() != self._lease or not self._lease:
                self._queue.clear()  # the cluster may have given them to others
            while not self._queue:
                if not self._fetch():
                    self._end()
                    self._owner.settle_all()
                    self._parts.joining.pause()  # whoever goes on need not wait for those who are done
                    raise StopIteration
            number = self._queue.popleft()
            self._handed[number] = 0
            self._owner.attach((self._number, number))
            return self._shard(number)

    @property
    def passed_over(self) -> bool:
        """Whether the shard handed out last has no step yet."""
        return any(not clock for clock in self._handed.values())

    def _shard(self, number: int) -> Shard:
        spec = self.spec
        epoch, index = divmod(number, spec.per_epoch)
        start = index * spec.size
        return Shard(epoch, index, start, min(start + spec.size, spec.samples), spec.samples, spec.seed)

    def used(self, shard: tuple[int, int], clock: int) -> None:
        """A step that trains a shard, (set, number), has begun."""
        number, shard_number = shard
        if number == self._number and shard_number in self._handed:
            self._handed[shard_number] = clock

    def close(self) -> None:
        """Waits for the steps so far, says what was trained and gives back what was not. The iterator ends."""
        if not self._closed:
            self._owner.settle_all()
            self.leave(self._owner.timeout)

    def leave(self, timeout_s: float) -> None:
        """The same without waiting for steps: what is not committed yet is left to others."""
        if not self._lock.acquire(timeout=timeout_s):  # somebody waits in `next`, and has nothing to give back
            return
        try:
            if not self._closed and self._number:
                self._take(0, back=[*self._queue, *self._passed_over()], timeout_s=timeout_s)
            self._end()
        finally:
            self._lock.release()

    def _end(self) -> None:
        self._closed = True
        self._queue.clear()
        self._owner.attach(None)

    # --- asking -----------------------------------------------------------------------------------------------------

    def _fetch(self) -> bool:
        """Gets shards to train into the queue, waiting if need be; False when all are done."""
        if self._parts.sync is not None:
            self._owner.settle_all()
        self._owner.attach(None)
        answer = self._choose(self._take(PREFETCH))
        if self._queue or answer.finished:
            return bool(self._queue)
        self._owner.settle_all()  # what others wait for may be ours
        pause_s = POLL_FIRST_S
        while True:
            answer = self._choose(self._take(PREFETCH, back=self._passed_over()))
            if self._queue or answer.finished:
                return bool(self._queue)
            self._parts.joining.pause()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, POLL_MOST_S)

    def _passed_over(self) -> list[int]:
        return [number for number, clock in self._handed.items() if not clock]

    def _take(
        self, want: int, *, done: Sequence[int] = (), back: Sequence[int] = (), timeout_s: float | None = None
    ) -> _Answer:
        """Settles what is committed, and asks to hold `want` shards."""
        parts, spec = self._parts, self.spec
        timeout_s = self._owner.timeout if timeout_s is None else timeout_s
        with parts.lock:
            committed = parts.session.committed
        if parts.sync is not None:
            committed = parts.sync.closed(committed)
        self._handed = {n: clock for n, clock in self._handed.items() if n not in back and not 0 < clock <= committed}
        self._lease = parts.control.registered()
        document = {**spec._asdict(), "name": self.name, "want": want, "done": [*done], "back": [*back]}
        frame = json_frame(Kind.TAKE, document)
        header = unpack_header(frame)._replace(clock=committed)
        (answer,) = ask_home(parts.network, self._owner.app, header, frame[HEADER_BYTES:], timeout_s,
                             f"asking for shards {self.name!r}")  # fmt: skip
        return _answer(json.loads(answer.body))

    def _choose(self, answer: _Answer) -> _Answer:
        """Queues the shards that are to be trained; says which of them lost workers had trained already."""
        while True:
            self._number = answer.number
            fresh = [one for one in answer.held if one[0] not in self._handed]
            done = [one[0] for one in fresh if one[2] and self._was_trained(answer, *one[1:])]
            if not done:
                self._queue.extend(one[0] for one in fresh if one[0] not in self._queue)
                return answer
            answer = self._take(PREFETCH, done=done)

    def _was_trained(self, answer: _Answer, worker: int, clock: int, last: int) -> bool:
        """Whether the step of a lost worker that used a shard is in the parameters, in every range. It may be on its
        way down the chains still: then it will be, unless heads die as well."""
        if self._parts.sync is not None:
            if last < clock:
                return False
            self._parts.sync.close(*answer.decided, self._owner.timeout)  # its members may all be lost
            return True
        while True:
            applied, committed = clocks_of(self._parts.network, worker, self._owner.timeout)
            if int(committed.min()) >> PART_BITS >= clock:
                return True
            if int(applied.min()) >> PART_BITS < clock:
                return False
            time.sleep(POLL_FIRST_S)


def _answer(document: dict[str, Any]) -> _Answer:
    decided, workers = document["decided"]
    return _Answer(document["set"], document["held"], document["done"] >= document["total"], (decided, workers))
