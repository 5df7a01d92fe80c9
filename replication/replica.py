"""One replica of every range that its server holds: events in, effects out. The chain protocol of van Renesse and
Schneider (OSDI 2004), vectorised over ranges, with views in place of a master's orders.

Events: adopt, adopt_roster, peer_up, peer_down, peer_full, receive, push, ask, doubt, let_go, piece, refill, go_on.
Each returns the effects to carry out, in order (see `effects`). No I/O, no clock, no randomness: same events, same
effects.

Why it is right.

Order. Only the head of r gives seqs, one more each time; links are FIFO; a follower applies exactly its seq + 1. So the
replicas of a chain hold prefixes of one history, longer towards the head. A view removes members and appends level
ones, so this survives it. A message is heard only if sender and receiver agree on r's chain (both epochs are >=
since[r], and a chain does not change between since[r] and now): what a deposed head or a former neighbour says is void.

Ack safety. Take the chain [a, b, c]. The tail c acknowledges what it has applied: there acked[r] grows to seq. At b and
a acked[r] is what came up the chain, so each keeps an operation in its log until c has it. a and b applied it before c
did. So when acked[r] covers an operation, every full replica has applied it. Three kinds of replicas come later:

- A joiner is filled from a full replica. It becomes full when it has all that was ever acknowledged: once it is level,
  acked[r] grows at the tail only to min(seq, joined), with what the joiner has (see `snapshot_transfer`).
- A copy is retained (see `chain`): b is removed from [a, b] as silent, and keeps its copy. Until a adopts that view,
  acked grew with b in the chain. From then on a waits for b as for a level joiner. So b's copy is complete.
- A copy is late: a stopped waiting for b. What b lacks from there on is kept (see `retained`). b becomes full when it
  has caught up and is level, as any joiner.

Nothing acknowledged is lost, and nothing logged is: the log keeps acked < seq, RESYNC gives the successor's seq, which
is >= acked of everyone before it, so what is missing is in the log of any predecessor, whoever died between.

Exactly once. The head judges (clock, part) against progress, which every replica advances with the operation itself; a
new head therefore judges as the old one did, for the operations that survived. A repeat is answered only when `acked`
reaches the range's seq of that moment, which is not before the tail has what it repeats. A repeat without content is
never applied. Clocks asked for come as (applied, committed): applied tells what to leave out, committed what to forget.
A step ticks without rows that its head refuses; which ones is logged with the tick: so a repeat is answered with that
by whoever has the tick, and asked for it is told with the clocks (see `refusals`).

One head per epoch. Views are totally ordered and a head acts only for ranges that its view gives it. Two servers may
both believe they head r, under different views; only the one whose chain is current gets acknowledgements. The last
full replica has no one to ask: the leader must not replace it while its lease may live.

Back-pressure. Only `push` waits (for a view, a roster, room in the log, or on the link to a joiner); messages between
replicas never do, except for the view they speak of. The log drains by messages alone, so a full log always empties.
What a joiner is sent while it is filled is in no log: as long as the link to it is full its tail keeps acknowledgements
back (see `Core`), and sends them when the link has room again or is lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec

import numpy as np
from numpy.typing import NDArray

from replication.admission import Admission
from replication.chain import Chains, CopyState, Member, Ranges, Role
from replication.core import NO_RANGES, Core, PeerError, ProtocolError, Shared
from replication.effects import Apply, Ask, CaughtUp, Distrust, Effects, NeedView, Push
from replication.log import Frame, Log
from replication.messages import (
    NOTHING,
    Ack,
    Forward,
    Message,
    Operation,
    Payload,
    Resync,
    SnapshotChunk,
)  # fmt: skip
from replication.progress import Progress
from replication.snapshot_transfer import SnapshotTransfer
from replication.view_change import ViewChange

_More = ParamSpec("_More")


def event(method: Callable[Concatenate[Replica, _More], None]) -> Callable[Concatenate[Replica, _More], Effects]:
    """Makes a method an event of the replica, which returns what its parts have put into `core.effects`.

    An event that raises has changed part of the state, and nobody carries out its effects. So the replica takes no
    event after it, which would return those effects as its own. PeerError, what a peer has done wrong, ends in `_hear`.
    """

    @wraps(method)
    def take(self: Replica, /, *more: _More.args, **named: _More.kwargs) -> Effects:
        core = self.core
        if core.failed:
            raise ProtocolError(f"{self.me} takes no more events: {core.failed}")
        try:
            method(self, *more, **named)
        except BaseException as error:
            core.failed = f"{method.__name__} ended in the midst, by {error!r}"
            raise
        return core.take_effects()

    return take


class Replica:
    """The state machine: one method for each event, which returns the effects to carry out.

    Parts: `core`, the ranges and the steps on them; `transfer`, both ends of fillings; `admission`, the side towards
    workers; `view_change`, what follows from a new view. `me`: the member whose replica this is. `ranges` is P;
    `budget_bytes` bounds the log at a head: beyond it pushes wait. `log`: where entries are held, by default a log of
    its own.

    seq, acked, joined   int64 [P]: the last operation applied here; known to be at the tail; and at the joiner of a
                         range of which I am the tail
    filled, waiting      bool [P]: all of the range is here; acknowledgements wait for its joiner
    clocks, refusals, records, log, retained  of all ranges
    """

    def __init__(self, me: Member, ranges: int, budget_bytes: int = 256 << 20, log: Log | None = None) -> None:
        core = self.core = Core(me, ranges, log)
        self.transfer = SnapshotTransfer(core)
        self.admission = Admission(core, budget_bytes)
        self.view_change = ViewChange(core, self.transfer, self.admission)
        self.me, self.ranges = me, ranges
        # The parts change these in place, so whoever reads them needs no way through the parts.
        self.seq, self.acked, self.joined = core.seq, core.acked, core.joined
        self.filled, self.waiting = core.filled, core.waiting
        self.clocks, self.refusals, self.log, self.retained = core.clocks, core.refusals, core.log, core.retained
        self.records = core.records
        self._held: dict[int, deque[Message]] = {}  # by slot, messages that wait for the view that they speak of

    @property
    def epoch(self) -> int:
        """The epoch of the view that is followed."""
        return self.core.epoch

    @property
    def view(self) -> Chains | None:
        """The view that is followed."""
        return self.core.view

    @property
    def role(self) -> NDArray[np.int8]:
        """int8 [P]: what I am to each range, a `Role`."""
        return self.core.role

    @property
    def version(self) -> int:
        """Grows with every change of neighbours, links or fillings."""
        return self.core.version

    @property
    def guarded(self) -> bool:
        """Whether acknowledgements of some range wait for its joiner (see `Core`)."""
        return self.core.guarded

    @property
    def congested(self) -> bool:
        """Whether a full link to a joiner keeps pushes from being let in (see `Core`)."""
        return self.core.congested

    # -- workers ----------------------------------------------------------------------------------------------------

    @event
    def push(self, push: Push) -> None:
        """A worker's part of a step, or an operation of the ranges themselves; answered by one Reply, maybe later."""
        self.admission.push(push)

    @event
    def ask(self, ask: Ask) -> None:
        """A worker's question how far its pushes are applied and committed in the ranges headed here."""
        self.admission.ask(ask)

    @event
    def adopt_roster(self, version: int, workers: frozenset[int]) -> None:
        """Follows the roster: only these worker ids may push. A restarted worker has a new id, none is used again."""
        self.admission.adopt_roster(version, workers)
        self.admission.settle()

    @event
    def forget(self, token: object) -> None:
        """The worker that waits for this answer is gone: its push is dropped if it still waits for admission."""
        self.admission.forget(token)

    @event
    def limit_log(self, budget_bytes: int) -> None:
        """Lets the log take so many bytes before pushes wait; with 0 all wait."""
        self.admission.limit_log(budget_bytes)
        self.admission.settle()

    @event
    def doubt(self, doubtful: bool) -> None:
        """Whether I may no longer head what my view gives me, because I was stopped: then pushes wait."""
        self.admission.doubtful = doubtful
        self.admission.settle()

    @event
    def go_on(self) -> None:
        """All effects so far are carried out: lets in more of the pushes that wait, as long as this is `unsettled`."""
        self.admission.settle()

    @property
    def unsettled(self) -> bool:
        """Whether pushes that wait could go on, with `go_on`, once all effects so far are carried out."""
        return self.admission.unsettled

    @property
    def parked(self) -> int:
        """The number of pushes and questions that wait here for a view, a roster or room in the log."""
        return self.admission.parked

    def waits(self, token: object) -> bool:
        """Whether a push with that token waits for admission."""
        return self.admission.waits(token)

    def headed(self, epoch: int) -> Ranges | None:
        """All ranges that a push of that epoch ticks here, in the order of its keys; None if it is stale."""
        return self.admission.headed(epoch)

    # -- fillings ---------------------------------------------------------------------------------------------------

    @event
    def piece(self, r: int, serial: int, upto: int, last: bool, payload: Payload) -> None:
        """A piece of snapshot `serial` was cut at this instant; nothing happens if the snapshot is void."""
        self.transfer.piece(r, serial, upto, last, payload)

    @event
    def refill(self, r: int, serial: int) -> None:
        """The next piece of snapshot `serial` would not fit those before it: it begins again from the first piece."""
        self.transfer.refill(r, serial)

    def levels(self) -> list[CaughtUp]:
        """Every CAUGHT_UP that stands: state, reported again to each new leader."""
        return self.transfer.levels()

    def spent(self) -> list[tuple[int, int]]:
        """(range, fill) of late copies whose missing operations are gone: reported to leaders as `levels` are."""
        return self.transfer.spent()

    @event
    def let_go(self) -> None:
        """Memory is short: nothing more is retained for late copies."""
        self.retained.give_up_all()

    # -- views ------------------------------------------------------------------------------------------------------

    @event
    def adopt(self, view: Chains) -> None:
        """Follows a view; one that is not newer is ignored, views in between may be missing."""
        core = self.core
        if view.epoch <= core.epoch:
            return
        changed = view.since > core.epoch
        core.epoch, core.view = view.epoch, view
        self.view_change.change_roles(view, changed)
        self.view_change.regroup(changed)
        if self.admission.roster is not None:
            core.clocks.retire_rows(self.admission.roster)  # fillings have brought clocks of workers that have left
        self._resync_up(changed)
        self._hear_held()
        self.admission.settle()

    def shared(self) -> Shared:
        """What stands until `version` changes. `seq`, `acked`, `joined` and the clocks are shared themselves."""
        core = self.core
        code, near = core.code, core.neighbours
        return Shared(
            near.up, near.down, near.since, code & 1 != 0, code & 2 != 0, code & 4 != 0,
            near.tail & (near.down >= 0), core.waiting, np.array(sorted(self.transfer.reported), np.int64),
            core.bounds, near.members, near.linked, self.admission.orders,
        )  # fmt: skip

    @property
    def careful(self) -> bool:
        """Whether something waits here that the next push, forward or acknowledgement could overtake, or is kept of
        each."""
        core = self.core
        waits = (
            core.congested
            or self.admission.doubtful
            or self.admission.parked
            or core.waiters
            or any(self._held.values())
        )
        return bool(waits or core.retained.active)

    # -- range recovery -----------------------------------------------------------------------------------------------

    @event
    def bring_back(self, r: int, kind: int, payload: Payload) -> None:
        """What a checkpoint has of a range that is recovered here, as operations that no log has."""
        operation = Operation(kind, -1, 0, payload, 0)
        self.core.effects.append(Apply(operation, np.array([r]), self.core.seq[[r]], None))

    @event
    def brought_back(self, r: int) -> None:
        """All of it is there: the leader is told, who may make this the range's only replica."""
        core = self.core
        core.filled[r] = True
        self.transfer.reported[r] = int(core.neighbours.since[r])
        core.recode()
        core.effects.append(CaughtUp(r, int(core.neighbours.since[r]), core.me))

    def brings_back(self) -> Ranges:
        """The ranges that are to be brought back here, and have not been."""
        core = self.core
        if core.view is None:
            return NO_RANGES
        return np.flatnonzero(
            (core.role == Role.JOINING) & (core.view.copy_state == CopyState.RECOVERING) & ~core.filled
        )

    # -- links ------------------------------------------------------------------------------------------------------

    @event
    def peer_up(self, peer: Member) -> None:
        """A new link to a peer, both ways FIFO; whatever was on an older one will not come any more."""
        core = self.core
        slot = core.neighbours.slot(peer)
        if core.neighbours.linked[slot]:
            self._unlink(slot)
        core.neighbours.linked[slot] = True
        core.version += 1
        self._resync_up(core.neighbours.up == slot)
        self.admission.settle()

    @event
    def peer_down(self, peer: Member) -> None:
        """The link is lost."""
        self._unlink(self.core.neighbours.slot(peer))
        self.admission.settle()

    @event
    def peer_full(self, peer: Member, full: bool) -> None:
        """More waits on the link to a peer than its socket takes, or no longer so. That it does lets nobody go on: it
        may be told while effects are carried out, and no other may come in between."""
        core = self.core
        slot = core.neighbours.slot(peer)
        if full and core.neighbours.linked[slot]:
            core.neighbours.full.add(slot)
        else:
            core.neighbours.full.discard(slot)
        core.look_at_links()
        if full:
            self.admission.unsettled = self.admission.unsettled and not core.congested
            return
        self.admission.settle()

    def _unlink(self, slot: int) -> None:
        core = self.core
        core.neighbours.linked[slot] = False
        core.neighbours.full.discard(slot)
        self._held.pop(slot, None)
        core.synced &= core.neighbours.down != slot
        for r in [r for r, fill in self.transfer.fills.items() if fill.slot == slot]:
            del self.transfer.fills[r]
        core.recode()

    def _resync_up(self, which: NDArray[np.bool_]) -> None:
        """First word to the predecessors about these ranges."""
        core = self.core
        which = which & ~self.view_change.mute
        for up in np.unique(core.neighbours.up[which & (core.neighbours.up >= 0)]).tolist():
            ranges = np.flatnonzero(which & (core.neighbours.up == up)).astype(np.int64)
            empty = (core.role[ranges] == Role.JOINING) & ~core.filled[ranges]
            seqs = np.where(empty, NOTHING, core.seq[ranges])
            core.send(up, Resync(core.epoch, ranges, seqs, core.acked[ranges]))

    # -- messages ---------------------------------------------------------------------------------------------------

    @event
    def receive(self, peer: Member, message: Message) -> None:
        """The next message on the current link to `peer`."""
        core = self.core
        slot = core.neighbours.slot(peer)
        if not core.neighbours.linked[slot]:
            return
        if message.epoch > core.epoch or self._held.get(slot):
            if not self._held.get(slot):
                core.effects.append(NeedView(message.epoch))
            self._held.setdefault(slot, deque()).append(message)
            return
        self._hear(slot, message)
        self.admission.settle()

    def holds(self, peer: Member) -> bool:
        """Whether messages of a peer wait here for the view that they speak of."""
        return bool(self._held.get(self.core.neighbours.slot(peer)))

    def _hear_held(self) -> None:
        core = self.core
        for slot, held in sorted(self._held.items()):
            while core.neighbours.linked[slot] and held and held[0].epoch <= core.epoch:
                self._hear(slot, held.popleft())
            if core.neighbours.linked[slot] and held:
                core.effects.append(NeedView(held[0].epoch))

    def _hear(self, slot: int, message: Message) -> None:
        core = self.core
        try:
            self._handle(slot, message)
        except PeerError as error:
            self._unlink(slot)
            core.effects.append(Distrust(core.neighbours.members[slot], str(error)))

    def _handle(self, slot: int, message: Message) -> None:
        if isinstance(message, Forward):
            self._forward(slot, message)
        elif isinstance(message, Ack):
            self._ack(slot, message)
        elif isinstance(message, Resync):
            self._resync(slot, message)
        elif isinstance(message, SnapshotChunk):
            self.transfer.install_piece(slot, message)
        else:
            self.transfer.installed(slot, message)

    def _forward(self, slot: int, message: Forward) -> None:
        core = self.core
        ranges, seqs = message.ranges, message.seqs
        fresh = core.neighbours.heard(slot, message.epoch, ranges, core.neighbours.up)
        gap = seqs - core.seq[ranges]
        if np.count_nonzero(fresh & (gap > 1)):
            raise PeerError(f"{core.me}: {core.neighbours.members[slot]} left out an operation")
        fresh &= gap == 1
        quiet = ranges[fresh & (core.code[ranges] & 4 != 0)]
        if quiet.size and not core.bounds.keys() >= set(quiet.tolist()):
            raise PeerError(
                f"{core.me}: {core.neighbours.members[slot]} forwarded to ranges that it has sent nothing of"
            )
        if np.count_nonzero(fresh) < ranges.shape[0]:
            ranges, seqs = ranges[fresh], seqs[fresh]
            if ranges.shape[0] == 0:
                return
        core.check_content(slot, message)
        operation = message.operation
        before: int | Progress = 0
        if operation.worker >= 0:
            before = core.clocks.of(operation.worker, ranges)
            core.clocks.set(operation.worker, ranges, operation.after)
        core.seq[ranges] = seqs
        frame = Frame(operation, None, ranges)
        core.perform(frame, ranges, seqs, before)
        if operation.after == 0:
            core.clocks.forget(operation.worker)
            core.records.forget(operation.worker)

    def _ack(self, slot: int, message: Ack) -> None:
        core = self.core
        ranges, seqs = message.ranges, message.seqs
        ok = core.neighbours.heard(slot, message.epoch, ranges, core.neighbours.down)
        if np.count_nonzero(ok) < ranges.shape[0]:
            ranges, seqs = ranges[ok], seqs[ok]
        self.transfer.check_sent(slot, ranges, seqs)
        if core.fed:
            joiner = core.neighbours.tail[ranges]
            self.transfer.joiner_acked(slot, ranges[joiner], seqs[joiner])
            ranges, seqs = ranges[~joiner], seqs[~joiner]
        if ranges.shape[0]:
            core.commit(slot, ranges, seqs)

    def _resync(self, slot: int, message: Resync) -> None:
        core = self.core
        ok = (
            core.neighbours.heard(slot, message.epoch, message.ranges, core.neighbours.down)
            & ~self.view_change.late[message.ranges]
        )
        ranges, seqs, acked = message.ranges[ok], message.seqs[ok], message.acked[ok]
        joiner = core.neighbours.tail[ranges]
        back = self.transfer.back[ranges] & ~np.isin(ranges, list(self.transfer.reported))
        if back.any():
            self.transfer.catch_up(slot, ranges[back], seqs[back])
            ranges, seqs, acked, joiner = ranges[~back], seqs[~back], acked[~back], joiner[~back]
        self.transfer.check_prefix(slot, ranges, seqs, acked, joiner)
        for r, seq in zip(ranges[joiner].tolist(), seqs[joiner].tolist(), strict=True):
            self.transfer.joiner_resync(slot, r, seq)
        ranges, seqs, acked = ranges[~joiner], seqs[~joiner], acked[~joiner]
        if ranges.shape[0] == 0:
            return
        core.commit(slot, ranges, acked)
        position = np.full(core.ranges, np.iinfo(np.int64).max, dtype=np.int64)
        position[ranges] = seqs
        for entry in core.log.waiting_for(slot):
            missing = entry.seqs > position[entry.ranges]
            if missing.any():
                part = entry.part(missing)
                core.send(slot, Forward(core.epoch, part.ranges, part.seqs, entry.frame.operation))
        core.synced[ranges] = True
        core.recode()
