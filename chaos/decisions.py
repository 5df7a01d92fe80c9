"""What synchronous rounds promise: one decision for each, the mean of exactly its workers' gradients everywhere, in
order, and nothing else to be seen in between. The checks add up for themselves what workers sent first. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from chaos.contents import KEYS_PER_ID, TABLES, Done, Means, averaged
from chaos.control import CLUSTER
from chaos.frames import Shown
from chaos.sim.violation import Violation
from elasticps.hashing import group_range
from elasticps.server.protocol.barrier_state import BarrierGroup
from elasticps.server.protocol.data_shards_state import Claim
from elasticps.server.protocol.operations import RoundStep
from replication.messages import OperationKind

if TYPE_CHECKING:
    from chaos.checks import Checks
    from chaos.servers import Server
    from chaos.workers import Trainer


class DecisionChecks:
    """The decisions that somebody has acted on: made public by an answer, or by a range that has closed a round."""

    def __init__(self, checks: Checks) -> None:
        self.made: dict[int, tuple[int, ...]] = {}
        self._checks = checks
        self._payloads: list[RoundStep | Claim] = []
        self._numbers: dict[int, int] = {}
        self._means: dict[tuple[int, int], Means] = {}

    def number(self, payload: RoundStep | Claim) -> int:
        """An operation's number: equal contents are different operations."""
        number = self._numbers.get(id(payload))
        if number is None:
            number = self._numbers[id(payload)] = len(self._payloads)
            self._payloads.append(payload)  # which keeps its id from being used again
        return number

    def payload(self, done: Done) -> RoundStep | Claim:
        """The operation that observers call so."""
        return self._payloads[done[1]]

    # -- one decision -------------------------------------------------------------------------------------------------

    def _made(self, clock: int, workers: Sequence[int], where: str) -> None:
        known = self.made.setdefault(clock, tuple(workers))
        if known != tuple(workers):
            raise Violation("one decision", f"round {clock} is made of {known}, and of {tuple(workers)} {where}")

    def on_told(self, trainer: Trainer, clock: int, workers: Sequence[int]) -> None:
        """A worker hears what a round is made of: that must last."""
        if not clock:
            return
        self._made(clock, workers, f"as worker {trainer.worker} is told")
        world = self._checks.world
        group = group_range(CLUSTER, world.plan.ranges)
        for server in self._checks.holders(group):
            state = server.rounds.groups.get(CLUSTER, BarrierGroup())
            if state.decided < clock or (state.decided == clock and state.workers != tuple(workers)):
                text = f"worker {trainer.worker} is told of round {clock}, and {server.member} is at {state.decided}"
                raise Violation("lasting decisions", text)

    def on_left_out(self, trainer: Trainer, text: str) -> None:
        """A worker is told that a round goes on without it: only if it counts no longer."""
        if self._checks.world.counts(trainer):
            raise Violation("everybody in", f"worker {trainer.worker}, which takes part: {text}")

    # -- what a round applies -----------------------------------------------------------------------------------------

    def expected(self, clock: int, r: int) -> Means:
        """By key of a range, the mean of the workers' gradients, in the order of their ids, each counted once; and the
        rate of the first of them that has the key."""
        found = self._means.get((clock, r))
        if found is None:
            totals: dict[int, tuple[np.float32, int]] = {}
            workers = self.made[clock]
            for worker in sorted(workers):
                for content in self._checks.contents(worker, clock):
                    for key, value in content.updates.get(r, ()):
                        total, rate = totals.get(key, (np.float32(0), content.rate))
                        totals[key] = (np.float32(total + np.float32(value)), rate)
            count = np.float32(len(workers))
            found = {key: (float(np.float32(total / count)), rate) for key, (total, rate) in totals.items()}
            self._means[clock, r] = found
        return found

    def on_close(self, server: Server, step: RoundStep, bounds: Mapping[int, int], means: Means) -> None:
        """A replica closes a round in some ranges, and is about to apply this."""
        self._made(step.clock, step.workers, f"when {server.member} closes it")
        wanted: Means = {}
        for r, bound in bounds.items():
            if step.clock <= server.closed[r]:
                continue
            if step.clock != server.closed[r] + 1:
                text = f"{server.member} closes round {step.clock} of range {r} after round {server.closed[r]}"
                raise Violation("order of rounds", text)
            server.closed[r] = step.clock
            wanted |= {key: mean for key, mean in self.expected(step.clock, r).items() if key % KEYS_PER_ID < bound}
        if means != wanted:
            odd = min(key for key in means.keys() | wanted.keys() if means.get(key) != wanted.get(key))
            text = f"{server.member} applies {means.get(odd)} to key {odd} in round {step.clock}, not {wanted.get(odd)}"
            raise Violation("mean of a round", text)

    def replay(self, r: int, done: Done, closed: int, values: dict[int, int]) -> int:
        """Applies an operation of a range's history to its values; the last closed round after it."""
        step = self._payloads[done[1]]
        if done[0] != -OperationKind.BARRIER_CLOSE or not isinstance(step, RoundStep) or step.clock <= closed:
            return closed
        for key, (mean, rate) in self.expected(step.clock, r).items():
            values[key] = averaged(values, key, mean, rate)
        return step.clock

    def on_settled(self, trainer: Trainer, clock: int) -> None:
        """A worker goes on after a round that it was in: it is closed everywhere, for good."""
        if trainer.worker not in self.made.get(clock, ()):
            raise Violation("everybody in", f"worker {trainer.worker} goes on after round {clock} without being in it")
        for r in range(self._checks.world.plan.ranges):
            for server in self._checks.holders(r):
                if server.closed[r] < clock:
                    text = f"{server.member} has range {r} at round {server.closed[r]}, worker {trainer.worker} goes on"
                    raise Violation("lasting rounds", f"{text} after {clock}")

    def on_gather(self, server: Server, reader: int, clock: int, shown: tuple[Shown, ...]) -> None:
        """A server is about to answer a worker that is between round `clock` and the next."""
        trainer = self._checks.world.of_worker(reader)
        if not (self._checks.world.plan.rounds and self._checks.world.counts(trainer)):
            return
        for part in shown:
            if server.closed[part.range] != clock:
                text = f"{server.member} shows range {part.range} at round {server.closed[part.range]}"
                raise Violation("one round at a time", f"{text} to worker {reader}, which is after round {clock}")

    # -- equal state --------------------------------------------------------------------------------------------------

    def state(self, server: Server, r: int) -> object:
        """All that a replica knows of the rounds and shards of a range, in one order."""
        closed, groups, kept, _ = server.rounds.dump(r, 0, KEYS_PER_ID, TABLES)
        shares: dict[tuple[int, int], list[tuple[int, float, float]]] = {}
        for _, clock, worker, blocks in kept:
            rows = [(k, float(b.grads[i, 0]), float(b.step_values[0])) for b in blocks for i, k in enumerate(b.keys)]
            shares.setdefault((clock, worker), []).extend(rows)
        return closed, groups, {k: sorted(rows) for k, rows in shares.items() if rows}, server.shards.dump(r)
