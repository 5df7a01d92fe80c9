"""Samples in shards, handed out to the workers that are there; `server.protocol.data_shards_state` has the whole story.

for shard in ps.shards(len(data), 64, epochs=3, shuffle_seed=1):
    ps.push({table: gradients(data[shard.indices])})     # one step per shard
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from elasticps.client.core.data_shards import ClaimScript, Need, ShardClaims, T
from elasticps.client.core.fan_out import Answer, Request
from elasticps.client.dispatcher import Dispatcher
from elasticps.client.registry import Registry
from elasticps.client.steps import Steps
from elasticps.errors import Error, InputError
from elasticps.model.sharding import ShardSpec, permuted

log = logging.getLogger(__name__)


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


class Shards:
    """An iterator of the shards that this worker is to train; ends when all of them, whoever trains them, are done.

    The shard handed out last belongs to the next step that begins. One that is passed over goes back to the others
    when this worker has nothing else to do, or closes the iterator. While others still train the last shards, which
    may yet come back, the iterator waits. Nobody waits for this worker then, nor after the end: it takes part again
    with its next operation.
    """

    def __init__(self, dispatcher: Dispatcher, steps: Steps, registry: Registry, name: str, spec: ShardSpec) -> None:
        self.name = name
        self.spec = spec
        self._dispatcher = dispatcher
        self._steps = steps
        self._registry = registry
        self._lock = dispatcher.runtime.lock()
        self._claims = ShardClaims(
            dispatcher.worker.app, name, spec, steps.barrier is not None, steps.timeout_s, self._report
        )
        self._lease = 0
        self._closed = False

    def __iter__(self) -> Shards:
        return self

    def __next__(self) -> Shard:
        with self._lock:
            if self._closed:
                raise StopIteration
            claims = self._claims
            if self._registry.registered() != self._lease or not self._lease:
                claims.queue.clear()  # the cluster may have given them to others
            while not claims.queue:
                if not self._carry_out(claims.fetch()):
                    self._settle()
                    self._end()
                    self._steps.pause()  # whoever goes on need not wait for those who are done
                    raise StopIteration
                if self._registry.registered() != self._lease:  # while we asked
                    claims.queue.clear()
            shard = claims.hand_over()
            self._steps.attach((claims.number, shard))
            return self._shard(shard)

    @property
    def held(self) -> int:
        """How many this worker has, to train or trained and not known to be committed."""
        return 0 if self._closed else self._claims.held

    @property
    def passed_over(self) -> bool:
        """Whether the shard handed out last has no step yet."""
        return bool(self._claims.passed_over)

    def _shard(self, number: int) -> Shard:
        spec = self.spec
        epoch, index = divmod(number, spec.per_epoch)
        start = index * spec.size
        return Shard(epoch, index, start, min(start + spec.size, spec.samples), spec.samples, spec.seed)

    def used(self, shard: tuple[int, int], clock: int) -> None:
        """A step that trains a shard, (set, number), has begun."""
        self._claims.used(*shard, clock)

    def close(self) -> None:
        """Waits for the steps so far, says what was trained and gives back what was not. The iterator ends. InputError
        while a step is open."""
        if not self._closed:
            self._settle()
            self.leave(self._steps.timeout_s)

    def leave(self, timeout_s: float) -> None:
        """The same without waiting for steps: what is not committed yet is left to others."""
        if not self._lock.acquire(timeout=timeout_s):  # somebody waits in `next`, and has nothing to give back
            return
        try:
            if not self._closed:
                self._carry_out(self._claims.give_back(timeout_s))
            self._end()
        finally:
            self._lock.release()

    def _settle(self) -> None:
        self._steps.settle_own_steps(f"waiting for shards {self.name!r}")

    def _end(self) -> None:
        self._closed = True
        self._claims.queue.clear()
        self._steps.attach(None)

    def _report(self) -> int:
        """The clock up to which every step is committed and its round closed; what is held belongs to this lease."""
        closed = self._steps.closed()
        self._lease = self._registry.registered()
        return closed

    def _carry_out(self, script: ClaimScript[T]) -> T:
        answers = list[Answer]()
        try:
            wish = next(script)
            while True:
                if isinstance(wish, Request):
                    answers = self._dispatcher.ask_all(*wish)
                elif wish is Need.SETTLE:
                    self._settle()
                elif wish is Need.ATTACH_NOTHING:
                    self._steps.attach(None)
                elif wish is Need.PAUSE:
                    self._steps.pause()
                else:
                    self._dispatcher.runtime.sleep(wish)
                wish = script.send(answers)
        except StopIteration as end:
            result: T = end.value
            return result


class WorkerShards:
    """The sets of shards that a worker iterates over."""

    def __init__(self, dispatcher: Dispatcher, steps: Steps, registry: Registry) -> None:
        self._dispatcher = dispatcher
        self._steps = steps
        self._registry = registry
        self._open: list[Shards] = []

    def open(self, name: str, spec: ShardSpec) -> Shards:
        """Begins to iterate over the set of this name. InputError for one that cannot be."""
        label: object = name
        if not isinstance(label, str) or not 0 < len(name) <= 200:
            raise InputError(f"shards take a name of 1 to 200 letters, got {name!r}")
        shards = Shards(self._dispatcher, self._steps, self._registry, name, spec)
        self._steps.when_used(shards.used)
        self._open.append(shards)
        return shards

    @property
    def held(self) -> int:
        """Shards that this worker has, of all sets."""
        return sum(shards.held for shards in self._open)

    def leave(self, timeout_s: float) -> None:
        """Gives back what was not trained: others need not wait until this worker is out of the roster."""
        for shards in self._open:
            try:
                shards.leave(timeout_s)
            except Error as error:
                log.info("worker %s leaves with shards %r: %s", self._dispatcher.worker.name, shards.name, error)
