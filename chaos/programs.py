"""What a worker's program does that trains in synchronous rounds, or on shards: the client's own scripts, carried out
between links instead of threads and sockets. Pure."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any

from chaos.control import CLUSTER
from chaos.frames import RequestFrame
from chaos.shard_checks import NAME
from chaos.sim.violation import Violation
from coordinator.view import View
from elasticps.client.protocol.barrier import leaving, settling
from elasticps.client.protocol.data_shards import ClaimScript, Need, ShardClaims
from elasticps.client.protocol.fan_out import Answer, FanOut, FanOuts, Request
from elasticps.client.protocol.join import Past, Starting, first_past, past_again
from elasticps.client.protocol.routing import Routes
from elasticps.client.protocol.session import Session
from elasticps.errors import ServerError, Timeout
from elasticps.server.protocol.data_shards_state import ShardMark
from elasticps.wire.frames import HEADER_BYTES, Buffer, Kind, unpack_header
from replication.chain import Member

if TYPE_CHECKING:
    from chaos.workers import Trainer

FOREVER_S = 30.0
IMPATIENT_S = 0.05

Wait = Request | Callable[[], bool] | float
"""Until it goes on: answers, a condition, or a number of seconds."""

Program = Generator[Wait, list[Answer], Any]


class Training:
    """One worker incarnation's program, from joining to its end. `finished`: it has left."""

    def __init__(self, trainer: Trainer, session: Session) -> None:
        self.trainer = trainer
        self.finished = False
        self.next_mark: ShardMark | None = None
        plan = trainer.world.plan
        app = CLUSTER if plan.rounds else ""
        self._world = trainer.world
        self._session = session
        self._rng = trainer.loop.rng
        self._starting = Starting(trainer.worker, app, FOREVER_S)
        self._calls = FanOuts(itertools.count(1), self._send)
        self._routes: Routes | None = None
        self._past = Past(0, 0, 0, 0, 0)
        self._open = 0  # the step whose round is not closed yet
        self._program = self._run()
        self._wait: Wait = 0.0
        self._round: FanOut | None = None
        self._until_s = 0.0
        self._begun = False
        self._lease = False

    # -- events -------------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Time has passed."""
        if self._routes is None or self.finished:
            return
        self._calls.resume(self._routes)
        if not self._begun:
            self._begun = True
            self._go_on(lambda: next(self._program))
        self.advance()

    def adopt(self, view: View) -> None:
        """A view came."""
        self._routes = Routes(view)
        self._calls.adopt(self._routes)

    def connected(self, member: Member) -> None:
        """A fresh connection."""
        self._calls.connected(member)

    def answer(self, frame: bytes) -> None:
        """A server answers a request, or refuses it."""
        assert self._routes is not None
        header, body = unpack_header(frame), frame[HEADER_BYTES:]
        if header.kind == Kind.PARTLY:
            self._stall(header.request, header.epoch)
        elif header.kind != Kind.ERROR:
            self._calls.answered(header, body)
        else:
            document = json.loads(body)
            code, text = document["code"], document["message"]
            if code == "stale-view":
                self._stall(header.request, document["epoch"])
            elif code == "fenced":
                self._world.network.kill(self.trainer)
            elif code == "behind":
                self._calls.refused(header.request, Timeout(text))
            else:
                if code == "left-out":
                    self._world.checks.decisions.on_left_out(self.trainer, text)
                self._calls.refused(header.request, ServerError(text))

    def _stall(self, request: int, epoch: int) -> None:
        assert self._routes is not None
        self._world.fetch_view(self.trainer, epoch)
        self._calls.stall(request, self._routes)

    def _send(self, member: Member, buffers: Sequence[Buffer]) -> None:
        frame = b"".join(bytes(buffer) for buffer in buffers)
        if unpack_header(frame).kind == Kind.BARRIER_CLOSE:
            document = json.loads(frame[HEADER_BYTES:])
            self._world.checks.decisions.on_told(self.trainer, document["round"], document["workers"])
        link = self.trainer.links.get(member)
        if link is not None:
            link.send(self.trainer, RequestFrame(frame))

    # -- carrying out -------------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Goes on as far as it can."""
        while self._begun and not self.finished and self.trainer.alive:
            wait, answers = self._wait, list[Answer]()
            if isinstance(wait, Request):
                assert self._round is not None
                if not self._round.done():
                    return
                round_, self._round = self._round, None
                self._calls.end(round_)
                if round_.error is not None:
                    self._go_on(functools.partial(self._program.throw, round_.error))
                    continue
                answers = round_.answers
            elif callable(wait):
                if not wait():
                    return
            elif self.trainer.loop.now < self._until_s:
                return
            self._go_on(functools.partial(self._program.send, answers))

    def _go_on(self, step: Callable[[], Wait]) -> None:
        assert self._routes is not None
        try:
            self._wait = step()
        except StopIteration:
            self.finished = True
            return
        if isinstance(self._wait, Request):
            self._round = FanOut(self._wait.questions)
            self._calls.begin(self._round, self._routes)
        elif isinstance(self._wait, float):
            self._until_s = self.trainer.loop.now + self._wait

    # -- taking part --------------------------------------------------------------------------------------------------

    def _enter(self) -> Program:
        """Joins, after whoever had the name before, or after a pause."""
        trainer, world = self.trainer, self._world
        if trainer.part.active:
            return
        if not self._past.id:
            while True:
                yield lambda: world.store.up
                past = world.pasts.get(trainer.name)
                if past is not None and past.id > trainer.worker:
                    world.network.kill(trainer)
                found = yield from self._starting.first(past)
                if (yield from self._keep(first_past(trainer.worker, found, past))):
                    break
            start, trainer.next_sample = found.clock, found.steps
        else:
            own = self._session.clock
            start = max(own, (yield from self._starting.lowest()))
            if start > own and not (yield from self._keep(past_again(self._past, own, start))):
                world.network.kill(trainer)
        self._session.start_at(start)
        trainer.base = start
        trainer.part.change(True)
        yield trainer.part.known

    def _keep(self, past: Past) -> Program:
        """Writes it into the store, if nobody else has."""
        world = self._world
        yield lambda: world.store.up
        kept = world.keep(self.trainer.name, past)
        if kept is None:
            return False
        self._past = kept
        return True

    def _pause(self) -> Program:
        """Holds nobody back; nothing is outstanding."""
        part = self.trainer.part
        if part.active:
            if self._world.plan.rounds:
                yield from leaving(CLUSTER, self.trainer.worker, FOREVER_S)
            part.change(False)
            yield part.known

    # -- training -----------------------------------------------------------------------------------------------------

    def _run(self) -> Program:
        yield from self._enter()
        if self._world.plan.shards:
            yield from self._train_shards()
        else:
            yield from self._train_samples()
        yield from self._settle_all()
        yield from self._pause()

    def _train_samples(self) -> Program:
        trainer, plan = self.trainer, self._world.plan
        while self._world.training and trainer.next_sample < plan.steps:
            yield from self._step(trainer.next_sample)
            if self._rng.random() < plan.rests:
                yield from self._settle_all()
                yield from self._pause()
                yield 0.03 * self._rng.random()

    def _train_shards(self) -> Program:
        trainer, world = self.trainer, self._world
        checks = world.checks.shards
        taking = ShardClaims(CLUSTER, NAME, world.spec, world.plan.rounds, FOREVER_S, self._report)
        while True:
            if not world.registered(trainer) or not self._lease:
                taking.queue.clear()
            while not taking.queue:
                if not (yield from self._take(taking.fetch())):
                    return
                if world.registered(trainer) != self._lease:
                    taking.queue.clear()
            shard = taking.hand_over()
            checks.on_handed(trainer, shard)
            self.next_mark = ShardMark(taking.number, shard)
            if self._rng.random() < 0.05:  # the program has no use for it
                checks.on_passed_over(shard)
                continue
            yield from self._step(shard)
            taking.used(taking.number, shard, self._session.clock)

    def _report(self) -> int:
        self._lease = self._world.registered(self.trainer)
        return min(self._session.committed, self._open - 1) if self._open else self._session.committed

    def _take(self, script: ClaimScript[bool]) -> Program:
        """Carries out what asks for shards."""
        answers = list[Answer]()
        try:
            wish = next(script)
            while True:
                if wish is Need.SETTLE:
                    yield from self._settle_all()
                elif wish is Need.PAUSE:
                    yield from self._pause()
                elif wish is Need.ATTACH_NOTHING:
                    self.next_mark = None
                else:
                    answers = yield wish
                wish = script.send(answers)
        except StopIteration as end:
            return end.value

    def _step(self, sample: int) -> Program:
        """Pushes one step, part by part, and perhaps looks at what has come of it."""
        trainer, session = self.trainer, self._session
        yield from self._enter()
        yield from self._settle()
        yield lambda: session.room
        trainer.next_sample = sample
        trainer.push(session)
        while session.open:
            yield 0.002 * self._rng.random()
            trainer.push(session)
        if self._world.plan.rounds:
            self._open = session.clock
            if self._rng.random() < 0.5:
                yield from self._settle()
                for _ in range(self._rng.randint(0, 2)):
                    trainer.reader.begin()
                yield lambda: not trainer.reader.pulls

    def _settle_all(self) -> Program:
        session = self._session
        yield lambda: session.outstanding == 0
        yield from self._settle()

    def _settle(self) -> Program:
        """Closes the open round."""
        session, clock = self._session, self._open
        if not clock:
            return
        yield lambda: session.outstanding == 0
        while True:
            timeout_s = IMPATIENT_S if self._rng.random() < 0.2 and self._world.training else FOREVER_S
            try:
                yield from settling(CLUSTER, self.trainer.worker, clock, timeout_s)
                break
            except Timeout:
                continue
            except ServerError as error:
                if self._world.counts(self.trainer):
                    raise Violation("everybody in", str(error)) from None
                self._world.network.kill(self.trainer)
                yield lambda: False
        self._open = 0
        self._world.checks.on_settled(self.trainer, clock)
