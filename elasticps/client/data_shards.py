"""Samples in shards, handed out to the workers that are there; `server.protocol.data_shards_state` has the whole story.

for shard in ps.shards(len(data), 64, epochs=3, shuffle_seed=1):
    ps.push({table: gradients(data[shard.indices])})     # one step per shard
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from elasticps.client.barrier import Barrier
from elasticps.client.dispatcher import Dispatcher
from elasticps.client.join import Joining
from elasticps.client.protocol.data_shards import ClaimScript, Need, ShardClaims, T
from elasticps.client.protocol.fan_out import Answer, Request
from elasticps.client.protocol.session import Session
from elasticps.client.runtime import Lock, Runtime
from elasticps.sharding import ShardSpec, permuted


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

    runtime: Runtime
    network: Dispatcher
    session: Session
    joining: Joining
    sync: Barrier | None
    control: Lease
    lock: Lock


class Owner(Protocol):
    """The client."""

    app: str
    timeout: float

    def attach(self, shard: tuple[int, int] | None) -> None:
        """The next step that begins trains this shard: (set, number)."""

    def settle_all(self) -> None:
        """Waits until every step so far is committed and its round closed."""


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
        self._lock = parts.runtime.lock()
        self._taking = ShardClaims(owner.app, name, spec, parts.sync is not None, owner.timeout, self._report)
        self._lease = 0
        self._closed = False

    def __iter__(self) -> Shards:
        return self

    def __next__(self) -> Shard:
        with self._lock:
            if self._closed:
                raise StopIteration
            taking = self._taking
            if self._parts.control.registered() != self._lease or not self._lease:
                taking.queue.clear()  # the cluster may have given them to others
            while not taking.queue:
                if not self._carry_out(taking.fetch()):
                    self._end()
                    self._owner.settle_all()
                    self._parts.joining.pause()  # whoever goes on need not wait for those who are done
                    raise StopIteration
                if self._parts.control.registered() != self._lease:  # while we asked
                    taking.queue.clear()
            shard = taking.hand_over()
            self._owner.attach((taking.number, shard))
            return self._shard(shard)

    @property
    def passed_over(self) -> bool:
        """Whether the shard handed out last has no step yet."""
        return bool(self._taking.passed_over)

    def _shard(self, number: int) -> Shard:
        spec = self.spec
        epoch, index = divmod(number, spec.per_epoch)
        start = index * spec.size
        return Shard(epoch, index, start, min(start + spec.size, spec.samples), spec.samples, spec.seed)

    def used(self, shard: tuple[int, int], clock: int) -> None:
        """A step that trains a shard, (set, number), has begun."""
        self._taking.used(*shard, clock)

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
            if not self._closed:
                self._carry_out(self._taking.give_back(timeout_s))
            self._end()
        finally:
            self._lock.release()

    def _end(self) -> None:
        self._closed = True
        self._taking.queue.clear()
        self._owner.attach(None)

    def _report(self) -> int:
        """The clock up to which every step is committed and its round closed; what is held belongs to this lease."""
        parts = self._parts
        with parts.lock:
            committed = parts.session.committed
        self._lease = parts.control.registered()
        return committed if parts.sync is None else parts.sync.closed(committed)

    def _carry_out(self, script: ClaimScript[T]) -> T:
        parts, answers = self._parts, list[Answer]()
        try:
            wish = next(script)
            while True:
                if isinstance(wish, Request):
                    answers = parts.network.ask_all(*wish)
                elif wish is Need.SETTLE:
                    self._owner.settle_all()
                elif wish is Need.ATTACH_NOTHING:
                    self._owner.attach(None)
                elif wish is Need.PAUSE:
                    parts.joining.pause()
                else:
                    parts.runtime.sleep(wish)
                wish = script.send(answers)
        except StopIteration as end:
            result: T = end.value
            return result
