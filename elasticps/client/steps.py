"""Steps, the ticks of a worker's clock: as a training loop holds them, and how they leave."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from operator import attrgetter
from types import TracebackType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from elasticps.client.barrier import Barrier
from elasticps.client.core.join import Resume
from elasticps.client.core.outstanding import PartContent
from elasticps.client.dispatcher import Dispatcher
from elasticps.client.join import Joining
from elasticps.client.losses import Losses
from elasticps.client.push_batch import PackedPart, Packer
from elasticps.client.pushes import StepState
from elasticps.client.tables import Handle, Rates, push_sources
from elasticps.client.writes import Part, check_size
from elasticps.errors import Error, InputError, Refused
from elasticps.model.optimizers import ServerOptimizer
from elasticps.wire.pool import Pool
from replication.progress import MAX_PARTS

POOL_BYTES = 32 << 20
_DONE = attrgetter("done")  # of a step's state: a thread that waits asks it again and again

Values = Mapping[Handle, object]


def _rate(handle: Handle, rates: Rates) -> float | None:
    return rates.get(handle) if isinstance(rates, Mapping) else rates


class _Share(NamedTuple):
    """A step that is to be in a synchronous round; `shard`: what it trains; targets: by id, what it has gradients of,
    and the optimizer of then. Another rate that is set later is that of later steps."""

    state: StepState
    parts: list[PartContent]
    rates: Rates
    shard: tuple[int, int] | None
    targets: dict[int, tuple[Handle, ServerOptimizer]]


class Step:
    """One tick of the worker's clock on its way to the servers."""

    def __init__(self, steps: Steps, state: StepState) -> None:
        self._steps = steps
        self._state = state

    def __repr__(self) -> str:
        return f"<Step {self.clock}: {'committed' if self.done() else 'not committed'}>"

    @property
    def clock(self) -> int:
        """The clock that this step ticked to."""
        return self._state.clock

    def done(self) -> bool:
        """Whether the step is committed."""
        return self._state.done

    def result(self, timeout: float | None = None) -> None:
        """Waits until the step is committed. Raises `ServerError` if servers refused rows of it, whose `refused` has
        their keys by table: all others are applied, so push exactly these again. `Timeout` when `timeout` seconds
        (default: the client's) were not enough; the step goes on being sent then."""
        self._steps.finish(self._state, timeout)


class OpenStep:
    """A step that is sent in parts, for instance layer by layer while the backward pass still runs.

    Each part is applied when it arrives, and the last one ticks the clock; so a row belongs into one part only. If
    servers refuse rows, `Refused.refused` names keys, not parts: of a key in several parts, it does not say which
    gradients are to be pushed again.
    As a context manager it commits at the end, also after an exception: what was sent cannot be taken back.
    """

    def __init__(self, steps: Steps, rates: Rates) -> None:
        self.state: StepState | None = None  # None before the first part is outstanding
        self._steps = steps
        self._rates = rates

    def __repr__(self) -> str:
        parts = "empty" if self.state is None else "sent in part"
        return f"<OpenStep: {repr(self._step()) if self._closed else parts}>"

    def push(self, values: Values, *, copy: bool = True) -> None:
        """Sends gradients, as `Client.push` does, without ending the step."""
        self._refuse_closed()
        self._steps.push(self, values, self._rates, last=False, copy=copy)

    def _refuse_closed(self) -> None:
        if self._closed:
            assert self.state is not None
            raise InputError(f"step {self.state.clock} is committed already; begin another one")

    def commit(self) -> Step:
        """Ends the step: one tick. Again: the same step."""
        return self._step() if self._closed else self.end({})

    def end(self, values: Values, *, copy: bool = True, then: Callable[[], None] | None = None) -> Step:
        """Sends the last part; `then` as for `Steps.push`."""
        self._refuse_closed()
        self._steps.push(self, values, self._rates, last=True, copy=copy, then=then)
        return self._step()

    def _step(self) -> Step:
        assert self.state is not None
        return Step(self._steps, self.state)

    @property
    def _closed(self) -> bool:
        """Whether its last part is outstanding, or more than that. Of an interrupted `commit`, the client knows."""
        return self.state is not None and self._steps.is_closed(self.state)

    def __enter__(self) -> OpenStep:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.state is not None or error is None:
            self.commit()


class Steps:
    """The steps of one worker. tables: those that it has opened, by name; barrier: if it trains in rounds."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        joining: Joining,
        barrier: Barrier | None,
        tables: Mapping[str, Handle],
        timeout_s: float,
        losses: Losses,
    ) -> None:
        self.timeout_s = timeout_s
        self.losses = losses
        self.barrier = barrier
        self._dispatcher = dispatcher
        self._pushes = dispatcher.pushes
        self._session = dispatcher.session
        self._joining = joining
        self._tables = tables
        self._packer = Packer(Pool(POOL_BYTES))  # under the lock
        self._shard: tuple[int, int] | None = None  # what the next step trains
        self._share: _Share | None = None  # the newest step, as long as its round may be closed without it
        self._on_used: list[Callable[[tuple[int, int], int], None]] = []
        if barrier is not None:
            dispatcher.holding.in_round, dispatcher.holding.settle = self._in_round, self._settle_quietly
            dispatcher.delay.committed = self.closed  # nobody sees more of a step before its round closes

    # --- sending ------------------------------------------------------------------------------------------------

    def whole(self, values: Values, rates: Rates, *, copy: bool) -> Step:
        """Sends a step of one part."""
        return OpenStep(self, rates).end(values, copy=copy)

    def push(
        self, step: OpenStep, values: Values, rates: Rates, *, last: bool, copy: bool,
        then: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        """Sends one part of a step, the first of which begins it. Waits as long as the window is full. then: asks
        servers for something, and waits for nothing; what it sends leaves in one message with the part."""
        dispatcher, session, holding = self._dispatcher, self._session, self._dispatcher.holding
        if self.losses.unreported:
            self.losses.check(self.timeout_s)
        if not self._joining.active:
            dispatcher.check()
            self._joining.enter()
        if self.barrier is not None and step.state is None:
            dispatcher.check()
            self.settle(None)
        while True:
            with dispatcher.lock:
                dispatcher.check()
                if step.state is not None and not self._pushes.begun(step.state):
                    step.state = None
                if step.state is None and session.open:
                    raise self._open_before("pushing another")
                begins = step.state is None
                paused = begins and not self._joining.active  # by another thread
                unsettled = begins and self.barrier is not None and self.barrier.is_open  # of another thread
                held = begins and bool(holding.hold.cut) and holding.holds(session.clock + 1)
                if not begins or (session.room and not (paused or held or unsettled)):
                    if then is None:
                        self._push(step, values, rates, last, copy)
                    else:
                        self._push_and(then, step, values, rates, last, copy)
                    break
            if paused:
                self._joining.enter()
            elif unsettled:
                self.settle(None)
            elif held:
                dispatcher.wait_released(session.clock + 1, self.timeout_s)
            else:
                self._wait(lambda: session.room, None, "room in the window")
        dispatcher.nudge()

    def _push_and(
        self, then: Callable[[], None], step: OpenStep, values: Values, rates: Rates, last: bool, copy: bool
    ) -> None:
        connections = self._dispatcher.connections
        try:
            connections.gather()
            self._push(step, values, rates, last, copy)
            then()
            connections.release()
        except BaseException:
            if connections.abandon():
                self._dispatcher.hurt()
            raise

    def _push(self, step: OpenStep, values: Values, rates: Rates, last: bool, copy: bool) -> None:
        """Whatever is raised, at any point: the part is outstanding, with all its content copied, or nothing is."""
        session, begins, shard = self._session, None, None
        if step.state is None:
            clock = session.clock + 1
            begins, shard = StepState(clock), self._shard
        else:
            clock = session.clock
            if not last and session.parts >= MAX_PARTS - 1:
                raise InputError(f"a step has at most {MAX_PARTS} parts")
        part = self._part(values, clock, rates, copy or self.barrier is not None)  # it may be pushed again
        try:
            if begins is not None:
                step.state = begins
            self._pushes.push(part, last, begins, shard)
            assert step.state is not None
            for handle in values:
                if handle.remembers_pushes:
                    handle.sent(step.state)
        except BaseException:
            self._dispatcher.hurt()
            for handle in values:
                handle.forget()
            raise
        finally:
            if begins is not None and session.clock == clock:
                if self.barrier is not None:
                    self._share = _Share(begins, session.contents, rates, shard, {})
                if shard is not None:
                    self._shard = None
                    self._use(shard, clock)
            if self._share is not None:
                self._share.targets.update({handle.id: (handle, handle.optimizer) for handle in values})

    def _use(self, shard: tuple[int, int], clock: int) -> None:
        for used in self._on_used:
            used(shard, clock)

    def _push_again(self) -> None:
        """Begins the newest step anew, all of it, at the clock that has come; under the lock, in the same breath."""
        share, clock = self._share, self._session.clock + 1
        assert share is not None

        def values(table: int) -> NDArray[np.float32] | None:
            handle, optimizer = share.targets[table]
            if self._tables.get(handle.name) is not handle:  # dropped meanwhile, by another thread
                return None
            return optimizer.step_values(clock, _rate(handle, share.rates))

        parts = [part.with_values(values) for part in share.parts if isinstance(part, Part | PackedPart)]
        state = share.state
        self._pushes.failures.pop(state.clock, None)
        state.begin_again(clock)
        for number, part in enumerate(parts, start=1):
            self._pushes.push(part, number == len(parts), state if number == 1 else None, share.shard)
        if share.shard is not None:
            self._use(share.shard, clock)

    def _part(self, values: Values, clock: int, rates: Rates, copy: bool) -> Part | PackedPart:
        """What a push of these values sends under the view of now; a copy, but for what is lent."""
        routes = self._dispatcher.routes
        sources, lent = push_sources(self._tables, values, clock, rates, routes, copy)
        packed = self._packer.pack(sources, routes)
        if not lent:
            return packed
        writes = packed.writes() + lent
        check_size(writes)
        return Part(writes, routes)

    # --- waiting ------------------------------------------------------------------------------------------------

    def is_closed(self, state: StepState) -> bool:
        """Whether all parts of a step are outstanding, or more than that."""
        session = self._session
        with self._dispatcher.lock:
            self._dispatcher.check()
            return self._pushes.begun(state) and not (session.open and session.clock == state.clock)

    def finish(self, state: StepState, timeout: float | None) -> None:
        """Waits until a step is committed, and its round closed. Before that it may yet be pushed again for a later
        round, and what was refused of it is judged again."""
        if not state.done:
            timeout_s = self.timeout_s if timeout is None else timeout
            self._dispatcher.wait(partial(_DONE, state), timeout_s, f"step {state.clock}")
        if self.barrier is not None:
            self.settle(timeout)
        self._check(state)

    def _check(self, state: StepState) -> None:
        if state.error is not None:
            self._pushes.failures.pop(state.clock, None)
            raise state.error

    def flush(self, timeout: float | None) -> None:
        """Waits until every step so far is committed; raises the first refusal that nobody has been told of, with all
        later ones."""
        failures = self._pushes.failures
        self.settle_own_steps(timeout=timeout, what="flush")
        with self._dispatcher.lock:
            found = dict(failures)
            failures.clear()
        if found:
            error, *others = (found[clock] for clock in sorted(found))
            if others and isinstance(error, Refused):
                error.others = others
            raise error

    def settle_own_steps(self, doing: str = "", *, timeout: float | None = None, what: str = "a step") -> None:
        """Waits until every step so far is committed and its round closed, so that whatever servers are asked next
        comes behind these steps. A step that is still open is left out: it ends only when its caller goes on. So
        whatever has to come behind that one as well is refused at once: `doing` says what, InputError."""
        dispatcher, session = self._dispatcher, self._session
        if self.losses.unreported:
            self.losses.check(self.timeout_s)
        dispatcher.check()
        with dispatcher.lock:
            if doing and session.open:
                raise self._open_before(doing)
            newest = session.clock - session.open
        self._wait(lambda: session.committed >= newest, timeout, what)
        self.settle(timeout)

    def settle(self, timeout: float | None) -> None:
        """Under BSP: closes the round of the newest step, so that whatever comes next sees its result."""
        if self.barrier is not None:
            timeout_s = self.timeout_s if timeout is None else timeout
            self.barrier.settle(
                lambda: self._wait(self._none_outstanding, timeout_s, "a step"),
                lambda: self._joining.later(self._push_again),
                timeout_s,
            )

    def _in_round(self) -> bool | None:
        """Whether the round of the newest step is open, None if there are no rounds for this worker now."""
        if self.barrier is None or not self._joining.active:
            return None
        return bool(self._session.outstanding) or self.barrier.is_open

    def _settle_quietly(self) -> None:
        """Closes the newest round; whatever is wrong, whoever trains will hear of it as well."""
        with contextlib.suppress(Error):
            self.settle(None)

    def _open_before(self, doing: str) -> InputError:
        what = f"step {self._session.clock} is still open: commit it, or call step() of the elasticps.torch.Optimizer"
        return InputError(f"{what} that began it, before {doing}")

    def wait_briefly(self, timeout_s: float) -> None:
        """Gives what is outstanding a last chance; a step that is still open has none."""
        newest = self._session.clock - self._session.open
        with contextlib.suppress(Error):
            self._wait(lambda: self._session.committed >= newest, timeout_s, "a step")

    def before_read(self) -> int:
        """Sees to it that a read may begin; returns the clock that it reads at. Who has pushed nothing yet reads what
        can be read, though it cannot take part before all can be asked where it should start."""
        if self.losses.unreported:
            self.losses.check(self.timeout_s)
        if not self._joining.active:
            self._dispatcher.check()
            if self.barrier is None and self._session.clock == 0 and self._joining.has_to_wait():
                return 0
            self._joining.enter()
        if self.barrier is not None:
            self._dispatcher.check()
            self.settle(None)
        session = self._session
        with self._dispatcher.lock:
            return session.clock - session.open

    def _none_outstanding(self) -> bool:
        return not self._session.outstanding

    def _wait(self, condition: Callable[[], bool], timeout: float | None, what: str) -> None:
        """Waits for something that does not come true by itself when the client ends."""
        dispatcher = self._dispatcher
        timeout_s = self.timeout_s if timeout is None else timeout
        dispatcher.wait(lambda: condition() or dispatcher.error is not None, timeout_s, what)
        dispatcher.check()

    # --- taking part, and shards --------------------------------------------------------------------------------

    def enter(self) -> Resume:
        """Takes part from now on; says where this worker has started."""
        self._dispatcher.check()
        return self._joining.enter()

    def pause(self) -> None:
        """Holds nobody back until the next operation; all steps are committed."""
        self._joining.pause()

    def closed(self) -> int:
        """The clock up to which every step is committed and its round closed."""
        with self._dispatcher.lock:
            committed = self._session.committed
        return committed if self.barrier is None else self.barrier.closed(committed)

    def attach(self, shard: tuple[int, int] | None) -> None:
        """What the next step that begins trains: (set, number) of a shard."""
        if shard is not None:
            self._dispatcher.check()
        with self._dispatcher.lock:
            self._shard = shard

    def when_used(self, used: Callable[[tuple[int, int], int], None]) -> None:
        """`used(shard, clock)` hears of each step that begins and trains a shard."""
        with self._dispatcher.lock:
            self._on_used.append(used)
