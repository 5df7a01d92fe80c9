"""What a worker of the simulator reads: pulls at tails, or at any full replica, asked again until they are answered."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chaos.contents import KEYS_PER_ID, KEYS_PER_RANGE
from chaos.frames import PullFrame, PullReply
from replication.chain import Chains, Member

if TYPE_CHECKING:
    from chaos.workers import Trainer

MOST_PULLS = 3
PULLS_PER_TICK = 0.15


class Pull:
    """A pull in flight. keys: those still missing, by range; floor: per range the position that it must not be
    behind, because an earlier pull has shown that; bound: as in frames."""

    def __init__(
        self, clock: int, committed: int, anywhere: bool, keys: dict[int, list[int]], floor: dict[int, int], bound: int
    ) -> None:
        self.clock = clock
        self.committed = committed
        self.anywhere = anywhere
        self.keys = keys
        self.floor = floor
        self.bound = bound


class Reader:
    """The pulls of one worker incarnation."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.pulls: list[Pull] = []
        self._asked: dict[int, tuple[Pull, Member, tuple[int, ...]]] = {}
        self._number = 0

    def tick(self) -> None:
        """Now and then a new pull."""
        trainer, rng = self.trainer, self.trainer.loop.rng
        session = trainer.session
        if session is None or trainer.view is None or len(self.pulls) >= MOST_PULLS or rng.random() > PULLS_PER_TICK:
            return
        self.begin()

    def begin(self) -> None:
        """A new pull."""
        trainer, rng = self.trainer, self.trainer.loop.rng
        session = trainer.session
        assert session is not None
        ranges = trainer.world.plan.ranges
        chosen = rng.sample(range(ranges), rng.randint(1, ranges))
        keys = {r: [r * KEYS_PER_ID + k for k in rng.sample(range(KEYS_PER_RANGE), 2)] for r in sorted(chosen)}
        clock = session.clock - session.open
        bound = trainer.world.plan.bound if trainer.part.active and not trainer.world.plan.rounds else 0
        floor = trainer.world.checks.reads.floor(trainer.worker, chosen)
        pull = Pull(clock, session.committed, rng.random() < trainer.world.plan.anywhere, keys, floor, bound)
        self.pulls.append(pull)
        self._ask(pull, None)

    def adopt(self) -> None:
        """A view came: everything is asked anew."""
        self._asked.clear()
        for pull in self.pulls:
            self._ask(pull, None)

    def connected(self, member: Member) -> None:
        """A fresh connection: what was asked on the old one is asked again."""
        self.disconnected(member)
        for pull in self.pulls:
            self._ask(pull, member)

    def disconnected(self, member: Member) -> None:
        """Nobody answers what was asked of this server."""
        self._asked = {n: asked for n, asked in self._asked.items() if asked[1] != member}

    def answer(self, reply: PullReply) -> None:
        """Rows, or a refusal."""
        asked = self._asked.pop(reply.pull, None)
        if asked is None:
            return
        pull, _, _ = asked
        trainer = self.trainer
        if reply.shown is None:
            assert trainer.view is not None
            if reply.epoch > trainer.view.epoch:
                trainer.world.fetch_view(trainer, reply.epoch)
            else:
                self._ask(pull, None)
            return
        for shown in reply.shown:
            if pull.keys.pop(shown.range, None) is not None:
                trainer.world.checks.reads.on_shown(trainer.worker, pull, shown)
        if not pull.keys:
            self.pulls.remove(pull)

    def _ask(self, pull: Pull, only: Member | None) -> None:
        """Asks for what is missing and not under way; of one server, or of all."""
        trainer = self.trainer
        view = trainer.view
        if view is None:
            return
        under_way = {r for p, _, ranges in self._asked.values() if p is pull for r in ranges}
        by_member: dict[Member, list[int]] = {}
        for r in pull.keys:
            if r not in under_way:
                by_member.setdefault(self._reader(view, pull, r, only), []).append(r)
        for member, ranges in by_member.items():
            link = trainer.links.get(member)
            if link is None or (only is not None and member != only):
                continue
            self._number += 1
            self._asked[self._number] = (pull, member, tuple(ranges))
            keys = tuple(key for r in ranges for key in pull.keys[r])
            frame = PullFrame(
                self._number, trainer.worker, view.epoch, pull.clock, trainer.base, pull.anywhere, keys, pull.bound
            )
            link.send(trainer, frame)

    def _reader(self, view: Chains, pull: Pull, r: int, only: Member | None) -> Member:
        if not pull.anywhere:
            return view.members[int(view.tails[r])]
        members = view.members_of(r)
        return only if only is not None and only in members else self.trainer.loop.rng.choice(members)
