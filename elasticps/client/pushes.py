"""A worker's steps on their way: carries out what the session wants, and tells it what servers answer.

The session thinks in frames, one per part and head. A large one goes as several PUSH frames that name disjoint ranges;
their answers are gathered here, and the session hears of one. Everything runs under the network's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from elasticps.client.core.fan_out import SendAll
from elasticps.client.core.routing import Routes
from elasticps.client.core.session import Ask, Committed, Effect, Frame, NeedView, PushSession
from elasticps.client.push_batch import PackedPart
from elasticps.client.short_keys import Short, ShortKeys
from elasticps.client.writes import Part, PushFrame, named_ranges
from elasticps.errors import Refused
from elasticps.model.sharding import GROUP_BITS
from elasticps.wire.clocks import encode_record
from elasticps.wire.frames import HEADER_BYTES, Buffer
from elasticps.wire.headers import GetClocksHeader, ShardRef, write_push
from elasticps.wire.refusals import RefusedRows
from replication.chain import Member, Ranges
from replication.effects import Status
from replication.progress import Progress
from replication.step_records import StepRecord, home_range

MAX_FAILURES = 64  # the first ones are kept
NO_RANGES: Ranges = np.empty(0, np.int64)


class StepState:
    """One step as its caller sees it: done when it is committed along every chain; `error` if servers refused some of
    it, and `refused` which rows."""

    __slots__ = ("clock", "done", "error", "refused")

    def __init__(self, clock: int) -> None:
        self.clock = clock
        self.done = False
        self.error: Exception | None = None
        self.refused: list[tuple[Exception, RefusedRows]] = []

    def begin_again(self, clock: int) -> None:
        """It is pushed again, all of it, as another step: what was refused before is judged again."""
        self.clock, self.done, self.error = clock, False, None
        self.refused.clear()

    def refused_of(self, table: int, why: type[Exception] = Exception) -> NDArray[np.int64]:
        """Keys of a table's rows that were refused, each once, in ascending order; final when the step is done. why:
        only those that were refused with an error of this kind."""
        some = [rows.keys[table] for error, rows in self.refused if table in rows.keys and isinstance(error, why)]
        return np.unique(np.concatenate(some)) if some else NO_RANGES


class _Sent:
    """A frame of the session, and what has been answered of it."""

    __slots__ = ("committed", "epoch", "frame", "left", "moved", "state")

    def __init__(self, frame: Frame, state: StepState) -> None:
        self.frame = frame
        self.state = state
        self.left: dict[int, Ranges | None] = {}  # by request, the ranges it named; None: all that the head heads
        self.committed: tuple[Ranges, ...] = ()
        self.moved: tuple[Ranges, ...] = ()
        self.epoch = 0


class PushesInFlight:
    """Steps of one worker. `send` takes frames for servers, `on_fenced` hears that the cluster has dropped us."""

    def __init__(
        self, session: PushSession, worker: int, requests: Iterator[int], send: SendAll, on_fenced: Callable[[], None],
        keys_of: Callable[[Member], ShortKeys | None] = lambda member: None,
        want: Callable[[Member], object] = lambda member: None,
    ) -> None:  # fmt: skip
        self.session = session  # which steps are outstanding, what to send
        self.failures: dict[int, Exception] = {}  # by clock: steps that a server refused, until somebody was told
        self.needed_epoch = 0  # somebody spoke of it
        self.shards: dict[int, tuple[int, int]] = {}  # by clock: (set, shard) that a step trains
        self.round = False  # whether each step is a share of a synchronous round
        # Hears that servers refused rows.
        self.on_refused: Callable[[], None] = lambda: None
        self.name_of: Callable[[int], str | None] = lambda table: None  # of a table, by its id
        self.on_finished: Callable[[], None] = lambda: None  # hears that a step is committed
        self.routes: Routes  # of the newest view
        self._worker = worker  # its id
        self._requests = requests  # the next numbers
        self._send = send  # takes frames for servers
        self._on_fenced = on_fenced  # hears that the cluster has dropped this worker
        self._keys_of = keys_of  # makes keys for a server shorter
        self._want = want  # has a server connected that is to get something
        self.short: dict[int, Short] = {}  # tables whose keys are to be made shorter
        self._states: dict[int, StepState] = {}  # by clock, those outstanding
        self._sent: dict[int, _Sent] = {}  # by request
        self._asks: dict[int, Ask] = {}  # by request

    @property
    def oldest(self) -> int:
        """The oldest request that has not been answered, 0 for none."""
        return next(iter(self._sent), 0) or next(iter(self._asks), 0)

    @property
    def owing(self) -> set[Member]:
        """The servers that owe answers, or are to get something."""
        owing = {sent.frame.head for sent in self._sent.values()} | {ask.head for ask in self._asks.values()}
        return owing | self.session.outstanding_heads

    def push(
        self, part: Part | PackedPart, last: bool, state: StepState | None = None, shard: tuple[int, int] | None = None
    ) -> None:
        """Sends a part, the next of the open step, or the first of a new one if there is a `state` for that. shard:
        (set, number), what a new step trains; its last part says so. The part is outstanding as a whole, with a copy
        of its content, or not at all, whatever is raised."""
        if state is not None:
            self._states[state.clock] = state
            if shard is not None:
                self.shards[state.clock] = shard
        try:
            shard = self.shards.get(self.session.clock + (state is not None))
            group = None if shard is None else shard[0] & (1 << GROUP_BITS) - 1  # which is told who trains a shard
            self._perform(self.session.push(part, last, group))
            if self.session.unreached:
                self._reach()
        finally:
            part.complete()

    def begun(self, state: StepState) -> bool:
        """Whether the step is outstanding, or has been: not if an exception came before."""
        return state.done or self._states.get(state.clock) is state

    def recover(self) -> None:
        """Begins afresh after something that an exception cut short; no connection is left."""
        self._sent.clear()
        self._asks.clear()
        effects = self.session.recover(self.routes.view.as_chains)
        for clock in list(self._states):
            if clock > self.session.clock:
                del self._states[clock]
                self.shards.pop(clock, None)
            elif not self.session.holds(clock):
                self._finish(clock)
        self._perform(effects)
        self._reach()

    def fail(self, error: Exception) -> None:
        """Ends every outstanding step: nobody will answer any more."""
        for state in self._states.values():
            state.error = state.error or error
            state.done = True
        for table in (self._states, self._sent, self._asks):
            table.clear()

    # -- views and connections ----------------------------------------------------------------------------------------

    def adopt(self, routes: Routes) -> None:
        """Follows a view: what is outstanding goes to the heads that it names. Ranges that come back from a checkpoint
        judge all of it again."""
        judged: Ranges = np.flatnonzero(routes.view.as_chains.recovery_epoch <= self.session.epoch)
        if self.session.epoch and len(judged) < routes.view.ranges:
            for state in self._states.values():
                cut = [(error, rows.part(judged) if len(rows) else rows, len(rows)) for error, rows in state.refused]
                state.refused = [(error, rows) for error, rows, before in cut if len(rows) or not before]
        self.routes = routes
        self._perform(self.session.adopt(routes.view.as_chains))
        self._reach()

    def _reach(self) -> None:
        """Has the heads connected that outstanding steps go to."""
        for member in self.session.unreached:
            self._want(member)

    def connected(self, member: Member) -> None:
        """A server has welcomed us on a new connection."""
        self._perform(self.session.connected(member))

    def disconnected(self, member: Member) -> None:
        """The connection is gone, and with it the answers that it owed."""
        self._sent = {request: sent for request, sent in self._sent.items() if sent.frame.head != member}
        self._asks = {request: ask for request, ask in self._asks.items() if ask.head != member}
        self._perform(self.session.disconnected(member))

    # -- answers: each is True if the request was one of ours ---------------------------------------------------------

    def ok(self, request: int) -> bool:
        """All that a frame named is committed."""
        sent = self._sent.pop(request, None)
        if sent is None:
            return False
        ranges = sent.left.pop(request)
        if ranges is not None:
            sent.committed += (ranges,)
        if sent.left:
            return True
        if sent.moved:
            self._answered(sent)
        else:
            effects = self.session.reply(sent.frame.frame, Status.COMMITTED, sent.epoch, None, NO_RANGES)
            if effects:
                self._perform(effects)
        return True

    def partly(self, request: int, epoch: int, committed: Ranges, moved: Ranges) -> bool:
        """Some of it is committed, some went to other heads."""
        sent = self._sent.pop(request, None)
        if sent is None:
            return False
        del sent.left[request]
        sent.epoch = max(sent.epoch, epoch)
        sent.committed += (committed,)
        sent.moved += (moved,)
        if not sent.left:
            self._answered(sent)
        return True

    def refused(self, request: int, refused: Iterable[tuple[Exception, RefusedRows]], answered: bool) -> bool:
        """A server refused rows for good: the step ticks without them, and what is said here is committed so. answered:
        that is the frame's answer, which else follows."""
        sent = self._sent.get(request)
        if sent is None:
            return False
        sent.state.refused += refused
        self.on_refused()
        return self.ok(request) if answered else True

    def not_done(self, request: int, status: Status, epoch: int) -> bool:
        """A server did nothing: it is at another view, lacks an earlier part, or has been told to drop us."""
        sent, ask = self._sent.pop(request, None), self._asks.pop(request, None)
        if sent is not None:
            for other in sent.left:
                self._sent.pop(other, None)
            self._perform(self.session.reply(sent.frame.frame, status, epoch, NO_RANGES, NO_RANGES))
        elif ask is not None:
            none: Progress = NO_RANGES
            self._perform(self.session.clocks(ask.ask, status, epoch, NO_RANGES, none, none))
        return sent is not None or ask is not None

    def clocks(
        self, request: int, epoch: int, ranges: Ranges, applied: Progress, committed: Progress,
        refused: Sequence[tuple[int, Exception, RefusedRows]] = (),
    ) -> bool:  # fmt: skip
        """A server said how far our steps are there, and which rows committed steps are without there: whoever was to
        say so may be gone."""
        ask = self._asks.pop(request, None)
        if ask is None:
            return False
        for clock, error, rows in refused:
            if (state := self._states.get(clock)) is not None:
                state.refused.append((error, rows))
                self.on_refused()
        self._perform(self.session.clocks(ask.ask, Status.COMMITTED, epoch, ranges, applied, committed))
        return True

    def _answered(self, sent: _Sent) -> None:
        committed, moved = np.concatenate(sent.committed), np.concatenate(sent.moved)
        self._perform(self.session.reply(sent.frame.frame, Status.COMMITTED, sent.epoch, committed, moved))

    # -- what the session wants ---------------------------------------------------------------------------------------

    def _perform(self, effects: list[Effect]) -> None:
        frames: dict[Member, list[Buffer]] = {}  # to be sent
        for effect in effects:
            if isinstance(effect, Frame):
                self._frame(effect, frames)
            elif isinstance(effect, Committed):
                self._finish(effect.clock)
            elif isinstance(effect, Ask):
                request = next(self._requests)
                self._asks[request] = effect
                ask = GetClocksHeader(self._worker, request, effect.epoch).header().pack()
                frames.setdefault(effect.head, []).append(ask)
            elif isinstance(effect, NeedView):
                self.needed_epoch = max(self.needed_epoch, effect.epoch)
            else:
                self._on_fenced()
        if frames:
            self._send(frames)

    def _frame(self, frame: Frame, frames: dict[Member, list[Buffer]]) -> None:
        """Adds to what is to be sent. Content that is not copied yet is sent at once, one frame while the next is
        copied."""
        sent = _Sent(frame, self._states[frame.clock])
        committed = self.session.committed
        if committed >= frame.clock:  # one that is sent again
            committed = frame.clock - 1
        shards, number = self.shards.get(frame.clock, (0, -1)) if frame.last else (0, -1)
        shard = None if number < 0 else ShardRef(shards, number)
        content, ready = frame.content, None
        if isinstance(content, PackedPart) and frame.ranges is None:
            ready = content.ready(self.routes.index_of[frame.head], self.routes)
        if ready is None and frames:
            self._send(frames)
            frames.clear()
        for cut in self._cuts(frame) if ready is None else (ready,):
            request = next(self._requests)
            sent.left[request] = cut.ranges
            self._sent[request] = sent
            record = [] if frame.record is None else self._record(frame.record, cut)
            rest = [*cut.buffers, *record]
            front = memoryview(bytearray(HEADER_BYTES)) if cut.frame is None else cut.frame
            write_push(
                front, sum(map(len, rest)), request, frame.epoch, frame.clock, frame.prev, cut.items, frame.part,
                frame.last, cut.ranges is None, frame.content is None, self.round, committed, shard, bool(record),
            )  # fmt: skip
            keys = self._keys_of(frame.head) if self.short and cut.frame is not None else None
            buffers = [front, *rest] if keys is None else keys.push(front, self.short, record)
            if ready is None:
                self._send({frame.head: buffers})
            else:
                frames.setdefault(frame.head, []).extend(buffers)

    def _record(self, record: StepRecord, cut: PushFrame) -> list[bytes]:
        """The record of a frame's step, if it belongs into this cut."""
        home = home_range(self._worker, self.routes.view.ranges)
        return [encode_record(record)] if cut.ranges is None or (cut.ranges == home).any() else []

    def _cuts(self, frame: Frame) -> Iterable[PushFrame]:
        content = frame.content
        if content is None:
            return (PushFrame(frame.ranges, 0, [] if frame.ranges is None else [named_ranges(frame.ranges)]),)
        assert isinstance(content, Part | PackedPart)
        if frame.ranges is not None:
            return content.named(frame.ranges)
        return content.whole(self.routes.index_of[frame.head], self.routes)

    def _finish(self, clock: int) -> None:
        state = self._states.pop(clock)
        self.shards.pop(clock, None)
        if state.refused:
            state.error = self._error(state)
            self.failures[clock] = state.error
            if len(self.failures) > MAX_FAILURES:
                del self.failures[max(self.failures)]
        self.on_finished()
        state.done = True  # last: whoever waits for it looks at the rest without the lock

    def _error(self, state: StepState) -> Exception:
        """The first refusal, with all rows that the step lacks."""
        error = state.refused[0][0]
        tables = sorted({table for _, rows in state.refused for table in rows.keys})
        named = {name: state.refused_of(table) for table in tables if (name := self.name_of(table)) is not None}
        if isinstance(error, Refused) and named:
            error.refused = named
            counts = ", ".join(f"{len(keys):,} of {name!r}" for name, keys in named.items())
            error.args = (
                f"{error}. Step {state.clock} counts without these rows: {counts}. All others are applied: push "
                "exactly the rows of error.refused again, not the whole step",
                *error.args[1:],
            )
        return error
