"""Operations of the ranges themselves in the simulator: sent to every head, and again until one view's heads all have
committed them, as clients do with tables and initial values. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from chaos.frames import OperationFrame, ViewFrame
from chaos.network import Link, Process
from coordinator.view import View
from replication.chain import Chains, Member
from replication.effects import Reply, Status
from replication.messages import OperationKind

if TYPE_CHECKING:
    from chaos.simulator import World

TICK_S = 0.01
MOST_OPERATIONS = 2


class Task:
    """One operation until it is committed everywhere. asked: frame -> head; done: heads of this view that have it."""

    def __init__(self, number: int, kind: OperationKind, worker: int, roster: int) -> None:
        self.number = number
        self.kind = kind
        self.worker = worker
        self.roster = roster
        self.asked: dict[int, Member] = {}
        self.done: set[Member] = set()


class Operator(Process):
    """Creates, initialises, audits, and retires workers that were replaced."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world.loop)
        self.world = world
        self.name = name
        self.key = name
        self.view: Chains | None = None
        self.links: dict[Member, Link] = {}
        self.tasks: list[Task] = []
        self._numbers = 0
        self._frames = 0
        self._heads: list[Member] = []
        self.loop.after(0.0, self.run, self._tick)

    def retire(self, worker: int, roster: int) -> None:
        """A worker is gone for good, and not in the roster of that version any more."""
        self.world.checks.on_retire(worker)
        self._begin(OperationKind.RETIRE, worker, roster)

    def _tick(self) -> None:
        rng, world = self.loop.rng, self.world
        self.loop.after(TICK_S * rng.uniform(0.2, 2.0), self.run, self._tick)
        if self.view is None or any(member not in self.links for member in self._heads):
            world.fetch_view(self, 0)
        self._connect()
        if world.training and len(self.tasks) < MOST_OPERATIONS and rng.random() < world.plan.operations:
            self._begin(rng.choice((OperationKind.CREATE, OperationKind.INIT, OperationKind.AUDIT)), -1, 0)

    def _begin(self, kind: OperationKind, worker: int, roster: int) -> None:
        self._numbers += 1
        task = Task(self._numbers, kind, worker, roster)
        self.tasks.append(task)
        self._restart(task)

    # -- links and views --------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        for member in self._heads:
            if member not in self.links:
                self.world.connect(self, member)

    def on_up(self, link: Link, peer: Process) -> None:
        """A server took the connection."""
        member = peer.key
        assert isinstance(member, Member)
        old = self.links.get(member)
        if old is not None:
            if old.number > link.number:
                link.cut()
                return
            self.on_down(old, peer)
        self.links[member] = link
        for task in self.tasks:
            self._send(task, member)

    def on_down(self, link: Link, peer: Process) -> None:
        """A connection is lost; what was asked on it is asked again on the next."""
        member = peer.key
        assert isinstance(member, Member)
        if self.links.get(member) is not link:
            return
        del self.links[member]
        link.cut()
        for task in self.tasks:
            task.asked = {f: m for f, m in task.asked.items() if m != member}
        self.world.fetch_view(self, 0)

    def adopt(self, view: View) -> None:
        """A view came: its heads are asked, whatever those of the last one had."""
        if self.view is not None and view.epoch <= self.view.epoch:
            return
        self.view = chains = view.as_chains
        self._heads = [chains.members[i] for i in np.unique(chains.heads[chains.heads >= 0]).tolist()]
        for task in list(self.tasks):
            self._restart(task)
        self._connect()

    def on_message(self, link: Link, peer: Process, message: Any) -> None:
        """An answer, or a view."""
        member = peer.key
        assert isinstance(member, Member)
        if self.links.get(member) is not link:
            return
        if isinstance(message, ViewFrame):
            self.adopt(message.view)
        elif isinstance(message, Reply):
            self._reply(message)

    # -- operations -------------------------------------------------------------------------------------------------

    def _restart(self, task: Task) -> None:
        task.asked.clear()
        task.done.clear()
        for member in self._heads:
            self._send(task, member)

    def _send(self, task: Task, member: Member) -> None:
        link = self.links.get(member)
        if link is None or self.view is None or member in task.done or member not in self._heads:
            return
        self._frames += 1
        task.asked[self._frames] = member
        link.send(self, OperationFrame(self._frames, self.view.epoch, task.roster, task.kind, task.worker, task.number))

    def _reply(self, reply: Reply) -> None:
        frame = reply.token[1]  # type: ignore[index]
        task = next((t for t in self.tasks if frame in t.asked), None)
        if task is None:
            return
        member = task.asked.pop(frame)
        assert self.view is not None
        if reply.status != Status.COMMITTED or reply.moved.shape[0]:
            if reply.epoch > self.view.epoch:
                self.world.fetch_view(self, reply.epoch)
            else:
                self._send(task, member)
            return
        task.done.add(member)
        self._end(task)

    def _end(self, task: Task) -> None:
        if task.done == set(self._heads):
            self.tasks.remove(task)
            self.world.checks.on_operation(task.kind, task.worker, task.number)
