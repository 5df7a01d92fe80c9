"""Who takes part, and what bounded delay promises: a pull at clock c under bound k shows what every worker that takes
part has done up to step c - k, and waits until there is that. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chaos.frames import JoinFrame, Shown
from chaos.network import Link
from chaos.sim.violation import Violation
from elasticps.client.protocol.session import Session
from replication.chain import Member
from replication.progress import PART_BITS

if TYPE_CHECKING:
    from chaos.servers import Server
    from chaos.workers import Trainer

REST_S = 0.03


class Part:
    """Whether one worker incarnation takes part, as it tells every server on every connection."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.active = False
        self._serial = 0
        self._until_s = 0.0
        self._answered: set[Member] = set()

    def look(self, session: Session) -> None:
        """Joins, or pauses when there is nothing to do or it feels like it, and nothing is outstanding."""
        trainer = self.trainer
        world, rng = trainer.world, trainer.loop.rng
        if world.training and world.plan.rests and self.active and rng.random() < world.plan.rests:
            self._until_s = trainer.loop.now + REST_S * rng.random()
        wanted = world.training and trainer.next_sample < world.plan.steps and trainer.loop.now >= self._until_s
        if wanted and not self.active:
            self.change(True)
        elif not wanted and session.outstanding == 0 and not session.open and (self.active or not self._serial):
            self.change(False)

    def change(self, active: bool) -> None:
        """Says everywhere that the worker takes part from now on, or holds nobody back."""
        self.active = active
        self._serial += 1
        self._answered.clear()
        if not active:
            self.trainer.world.checks.reads.parts.on_pause(self.trainer.worker)
        for link in self.trainer.links.values():
            self.connected(link)

    def connected(self, link: Link) -> None:
        """A connection is up: the first thing said on it is how things are."""
        trainer = self.trainer
        if self._serial:
            link.send(trainer, JoinFrame(self._serial, trainer.worker, trainer.base, not self.active))

    def known(self) -> bool:
        """Whether every server that the worker needs has answered."""
        return self._answered >= set(self.trainer.wanted)

    def answered(self, member: Member, serial: int) -> None:
        """A server knows."""
        if serial == self._serial:
            self._answered.add(member)
        if serial == self._serial and self.active:
            self.trainer.world.checks.reads.parts.on_joined(self.trainer.worker, member)


class PartChecks:
    """Whom pulls have to wait for, where. A worker that says that it pauses holds nobody back from then on; one that
    was let in holds everybody back at the servers that have answered it, and where its steps are."""

    def __init__(self) -> None:
        self._trainers: dict[int, Trainer] = {}
        self._joined: dict[int, set[Member]] = {}
        self._paused: set[int] = set()

    def on_start(self, trainer: Trainer) -> None:
        """A worker starts."""
        self._trainers[trainer.worker] = trainer

    def on_pause(self, worker: int) -> None:
        """A worker is about to say that it pauses."""
        self._joined.pop(worker, None)
        self._paused.add(worker)

    def on_joined(self, worker: int, member: Member) -> None:
        """A worker hears from a server that it takes part."""
        self._joined.setdefault(worker, set()).add(member)

    def on_gather(self, server: Server, reader: int, floor: int, shown: tuple[Shown, ...]) -> None:
        """A server is about to answer a pull that must show all steps up to `floor`."""
        for worker in sorted(server.workers):
            trainer = self._trainers[worker]
            joined = server.member in self._joined.get(worker, ())
            for part in shown:
                reached = server.reached[part.range].get(worker, 0) >> PART_BITS
                counts = joined or (reached > 0 and worker not in self._paused)
                if counts and max(reached, trainer.base) < floor:
                    text = f"{server.member} shows range {part.range} to worker {reader}, with worker {worker} at step "
                    raise Violation("bounded delay", f"{text}{reached}, and all must be at {floor}")
