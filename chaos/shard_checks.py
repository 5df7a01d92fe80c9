"""What shards promise: each is trained, by one worker at a time, and again only if it was lost; done when its step is
committed, and then for good. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chaos.control import CLUSTER
from chaos.sim.violation import Violation
from elasticps.hashing import group_range

if TYPE_CHECKING:
    from chaos.checks import Checks
    from chaos.servers import Server
    from chaos.workers import Trainer

NAME = "train"


class ShardChecks:
    """Which steps trained which shard, who has it in hand, and whose step was acknowledged."""

    def __init__(self, checks: Checks) -> None:
        self.acknowledged: dict[int, tuple[int, int]] = {}
        self.count = 0  # that are done for good
        self._checks = checks
        self._steps: dict[int, list[tuple[int, int]]] = {}
        self._shard_of: dict[tuple[int, int], int] = {}
        self._hands: dict[int, Trainer] = {}

    # -- at workers ---------------------------------------------------------------------------------------------------

    def on_handed(self, trainer: Trainer, shard: int) -> None:
        """A worker's program is given a shard to train. One that is lost need not know that yet; its steps do not
        count, unless they come to servers that do not know it either."""
        world = self._checks.world
        if not world.counts(trainer):
            return
        if shard in self.acknowledged:
            text = f"shard {shard} goes to worker {trainer.worker}, worker {self.acknowledged[shard][0]} has trained it"
            raise Violation("every shard once", text)
        other = self._hands.get(shard)
        if other is not None and other is not trainer and world.counts(other):
            text = f"shard {shard} goes to worker {trainer.worker}, while worker {other.worker} trains it"
            raise Violation("one hand", text)
        self._hands[shard] = trainer

    def on_passed_over(self, shard: int) -> None:
        """It will not train it."""
        self._hands.pop(shard, None)

    def on_step(self, trainer: Trainer, clock: int, shard: int) -> None:
        """A step that trains a shard begins."""
        self._steps.setdefault(shard, []).append((trainer.worker, clock))
        self._shard_of[trainer.worker, clock] = shard

    def on_acknowledged(self, trainer: Trainer, clock: int) -> None:
        """A worker that counts knows that a step is committed, and its round closed."""
        shard = self._shard_of.get((trainer.worker, clock))
        if shard is None or not self._checks.world.counts(trainer):
            return
        before = self.acknowledged.setdefault(shard, (trainer.worker, clock))
        if before != (trainer.worker, clock):
            raise Violation("every shard once", f"shard {shard} is trained by {before} and {trainer.worker, clock}")
        self._hands.pop(shard, None)

    # -- at servers ---------------------------------------------------------------------------------------------------

    def done_at(self, server: Server) -> set[int]:
        """The shards that are neither to do nor in anybody's hands, as a replica has it."""
        found = server.shards.find(CLUSTER, NAME)
        if found is None:
            return set()
        held = [shard for mine in found.doing.values() for shard in mine]
        open_ = [*held, *found.returned]
        if len(set(open_)) < len(open_) or any(shard >= found.upcoming for shard in open_):
            raise Violation("one hand", f"{server.member} has shards {sorted(open_)} of {found.upcoming} to give away")
        done = set(range(found.upcoming)) - set(open_)
        if len(done) != found.done:
            raise Violation("shards done", f"{server.member} counts {found.done}, and these are {sorted(done)}")
        return done

    def on_change(self, server: Server, before: set[int]) -> None:
        """A replica has applied a TAKE."""
        after = self.done_at(server)
        if before - after:
            raise Violation("done for good", f"{server.member}: shards {sorted(before - after)} come back")
        for shard in sorted(after - before):
            if not any(self._checks.lasting(*step) for step in self._steps.get(shard, ())):
                text = f"shard {shard} is done at {server.member}, trained by {self._steps.get(shard)}"
                raise Violation("done when committed", text)

    def at_end(self) -> None:
        """All has settled: each shard counts once, but for what lost workers left behind unacknowledged."""
        world = self._checks.world
        if not world.plan.shards:
            return
        for server in self._checks.holders(group_range(CLUSTER, world.plan.ranges)):
            missing = set(range(world.spec.total)) - self.done_at(server)
            self.count = world.spec.total - len(missing)
            if missing:
                raise Violation("every shard", f"shards {sorted(missing)} are not done at {server.member}")
        for shard in range(world.spec.total):
            steps = [step for step in self._steps.get(shard, ()) if self._checks.lasting(*step)]
            mine = [step for step in steps if world.counted(step[0]) or self.acknowledged.get(shard) == step]
            if not steps or len(mine) > 1:
                raise Violation("every shard once", f"shard {shard} was trained by {steps}, of these count {mine}")
