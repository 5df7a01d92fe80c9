"""One replica of every range that its server holds: events in, effects out. The chain protocol of van Renesse and
Schneider (OSDI 2004), vectorised over ranges, with views in place of a master's orders.

Events: adopt, adopt_roster, peer_up, peer_down, peer_full, receive, push, ask, doubt, let_go, piece, go_on. Each
returns the effects to carry out, in order (see `effects`). No I/O, no clock, no randomness: same events, same effects.

Why it is right.

Order. Only the head of r gives seqs, one more each time; links are FIFO; a follower applies exactly its seq + 1. So the
replicas of a chain hold prefixes of one history, longer towards the head. A view removes members and appends level
ones, so this survives it. A message is heard only if sender and receiver agree on r's chain (both epochs are >=
since[r], and a chain does not change between since[r] and now): what a deposed head or a former neighbour says is void.

Ack safety. acked[r] grows at the tail, to seq, or to min(seq, the joiner's) once acknowledgements wait for a joiner;
elsewhere it is what came up the chain. All before the tail have at least what the tail has. So at that moment every
full and level replica has applied it. Later full replicas are filled from one that has it, and are level only when they
have all that was ever acknowledged (see `snapshot_transfer`); or they were full and are kept (see `chain`): until the
one that is left hears of it acked grows with them in the chain, from then on it waits for them as joiners. When it
does so no longer they are late: what they lack is kept (see `retained`) until they are level, as any joiner has to be.

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

import numpy as np
from numpy.typing import NDArray

from replication.admission import Admission
from replication.chain import COMPLETE, Chains, CopyState, Member, Ranges, Role, place
from replication.core import NO_RANGES, PeerError, ProtocolError, Shared, Waiter
from replication.effects import Apply, CaughtUp, Distrust, Effects, NeedView
from replication.log import Entry, Log
from replication.messages import (
    NOTHING,
    Ack,
    Forward,
    Message,
    Operation,
    Payload,
    Resync,
    Seqs,
    SnapshotChunk,
)  # fmt: skip
from replication.progress import Progress

_ORDERS_MAX = 64


class Replica(Admission):
    """The state machine. `ranges` is P; `budget_bytes` bounds the log at a head: beyond it pushes wait. `log`: where
    entries are kept, by default a log of its own."""

    def __init__(self, me: Member, ranges: int, budget_bytes: int = 256 << 20, log: Log | None = None) -> None:
        super().__init__(me, ranges, budget_bytes, log)
        self._parted: Seqs = np.full(
            ranges, -1, dtype=np.int64
        )  # where a `CopyState.PREDECESSOR` left us, -1 for nobody
        self._late: NDArray[np.bool_] = np.zeros(ranges, dtype=np.bool_)  # I am the tail beside a `CopyState.LATE`
        self._holds: NDArray[np.bool_] = np.zeros(ranges, dtype=np.bool_)
        self._mute: NDArray[np.bool_] = np.zeros(
            ranges, dtype=np.bool_
        )  # joined as `CopyState.PREDECESSOR`: no successor
        self._held: dict[int, deque[Message]] = {}

    # -- views ------------------------------------------------------------------------------------------------------

    def adopt(self, view: Chains) -> Effects:
        """Follows a view; one that is not newer is ignored, views in between may be missing."""
        out: Effects = []
        if view.epoch <= self.epoch:
            return out
        changed = view.since > self.epoch
        self.epoch, self.view = view.epoch, view
        self._change_roles(view, changed, out)
        self._regroup(changed, out)
        if self._roster is not None:
            self.clocks.shelve(self._roster)  # fillings have brought clocks of workers that have left
        self._resync_up(changed, out)
        self._hear_held(out)
        return self._settle(out)

    def shared(self) -> Shared:
        """What stands until `version` changes. `seq`, `acked`, `joined` and the clocks are shared themselves."""
        code = self._code
        return Shared(
            self._up, self._down, self._since, code & 1 != 0, code & 2 != 0, code & 4 != 0,
            self._tail & (self._down >= 0), self.waiting, np.array(sorted(self._reported), np.int64),
            self._bounds, self._members, self._linked, self._orders,
        )  # fmt: skip

    @property
    def joined(self) -> Seqs:
        """How far the joiner of a range, of which I am the tail, is known to be."""
        return self._joined

    @property
    def careful(self) -> bool:
        """Whether something waits here that the next push, forward or acknowledgement could overtake, or is kept of
        each."""
        waits = self.congested or self._doubtful or self._parked or self._waiters or any(self._held.values())
        return bool(waits or self.retained.active)

    def _change_roles(self, view: Chains, changed: NDArray[np.bool_], out: Effects) -> None:
        where = place(view, self.me)
        promoted = (self.role == Role.JOINING) & (where.role == Role.FULL)
        if np.count_nonzero(promoted & ~self.filled):
            raise ProtocolError(f"{self.me}: promoted half filled in ranges {np.flatnonzero(promoted & ~self.filled)}")
        complete = np.isin(view.copy_state, COMPLETE)
        mine = (view.copy_state > CopyState.NONE) & (where.role == Role.JOINING)
        emptied = changed & (where.role == Role.JOINING) & ~mine
        gone = (where.role == Role.OUT) & self._holds & (view.heads >= 0)
        self.role = where.role
        self._holds = (self._holds | (where.role != Role.OUT)) & ~gone
        erased = np.flatnonzero(emptied | gone).astype(np.int64)
        if erased.size:
            self._erase(erased, out)
        self.filled |= mine
        self._mute = mine & ((view.copy_state == CopyState.PREDECESSOR) | (view.copy_state == CopyState.LATE))
        slots = np.array([self._slot(m) for m in view.members] + [-1], dtype=np.int64)  # index -1 stays -1
        self._up, self._down = slots[where.up], slots[where.down]
        self._head, self._tail = where.head, where.tail
        self._since = view.since
        self._newest_since = int(view.since[where.role != Role.OUT].max(initial=0))
        self._synced &= ~changed
        self._unacknowledged &= ~changed
        self.waiting &= ~changed
        self._joined[changed] = -1
        for r in np.flatnonzero(changed).tolist():
            self._fills.pop(r, None)
            self._reported.pop(r, None)
        last = changed & where.tail
        self._retain(view, changed, last)
        joined = promoted & (view.copy_state == CopyState.PREDECESSOR)  # it stood before us and has all that we have
        sure = last & (joined | ~complete)
        self.acked[sure] = self.seq[sure]
        self.waiting |= last & complete
        self._joined[last & complete] = self.acked[last & complete]
        headed = view.headed_by(view.index(self.me))
        if not np.array_equal(np.sort(headed), np.sort(self._headed)):
            self._orders = {}
        self._headed = self._orders[view.epoch] = headed
        if len(self._orders) > _ORDERS_MAX:
            del self._orders[min(self._orders)]
        self._recode()

    def _retain(self, view: Chains, changed: NDArray[np.bool_], last: NDArray[np.bool_]) -> None:
        """Keeps for copies that are late what is acknowledged without them: from when it first is, so not if that was
        given up before they were asked back. The history of one that stood before us is ours as far as we had come
        when it was left out."""
        late, back, was_late = view.copy_state == CopyState.LATE, view.copy_state == CopyState.CATCHING_UP, self._late
        goes_on = last & back & was_late
        self.retained.end(np.flatnonzero(changed & ~goes_on))
        self.retained.spent &= ~changed | goes_on
        begun: Ranges = np.flatnonzero(last & (late | back & ~was_late))
        if begun.size:
            parted = np.where(self._parted[begun] < 0, self.seq[begun], self._parted[begun])
            self.retained.begin(begun, self.acked[begun], parted, self.log.entries())
        before = last & (view.copy_state == CopyState.PREDECESSOR)
        self._parted[changed] = np.where(before, self.seq, -1)[changed]
        self._late, self._back = self._tail & late, self._tail & back

    def _regroup(self, changed: NDArray[np.bool_], out: Effects) -> None:
        """Gives the log's entries to their new neighbours, drops what is committed or gone, answers whoever is left."""
        if not changed.any():
            return

        def split(entry: Entry) -> list[tuple[int, Entry]]:
            ranges, frame = entry.ranges, entry.frame
            if frame.token is not None and not self._head[ranges].all():
                frame.moved.append(ranges[~self._head[ranges]])
            keep = (self.role[ranges] == Role.FULL) & (self.acked[ranges] < entry.seqs)
            successors = np.where(keep, self._down[ranges], -1)
            return [(slot, entry.part(successors == slot)) for slot in np.unique(successors[keep]).tolist()]

        for frame in self.log.rebuild(split):
            self._finish(frame, out)
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            mine = self._head[waiter.ranges]
            if not mine.all():
                waiter.frame.moved.append(waiter.ranges[~mine])
            self._waiters.append(Waiter(waiter.frame, waiter.ranges[mine], waiter.seqs[mine]))
        self._check_waiters(out)

    # -- range recovery -----------------------------------------------------------------------------------------------

    def bring_back(self, r: int, kind: int, payload: Payload) -> Effects:
        """What a checkpoint has of a range that is recovered here, as operations that no log has."""
        return [Apply(Operation(kind, -1, 0, payload, 0), np.array([r]), self.seq[[r]], None)]

    def brought_back(self, r: int) -> Effects:
        """All of it is there: the leader is told, who may make this the range's only replica."""
        self.filled[r] = True
        self._reported[r] = int(self._since[r])
        self._recode()
        return [CaughtUp(r, int(self._since[r]), self.me)]

    def brings_back(self) -> Ranges:
        """The ranges that are to be brought back here, and have not been."""
        if self.view is None:
            return NO_RANGES
        return np.flatnonzero(
            (self.role == Role.JOINING) & (self.view.copy_state == CopyState.RECOVERING) & ~self.filled
        )

    # -- links ------------------------------------------------------------------------------------------------------

    def peer_up(self, peer: Member) -> Effects:
        """A new link to a peer, both ways FIFO; whatever was on an older one will not come any more."""
        out: Effects = []
        slot = self._slot(peer)
        if self._linked[slot]:
            self._unlink(slot)
        self._linked[slot] = True
        self.version += 1
        self._resync_up(self._up == slot, out)
        return self._settle(out)

    def peer_down(self, peer: Member) -> Effects:
        """The link is lost."""
        out: Effects = []
        self._unlink(self._slot(peer))
        return self._settle(out)

    def peer_full(self, peer: Member, full: bool) -> Effects:
        """More waits on the link to a peer than its socket takes, or no longer so. That it does lets nobody go on: it
        may be told while effects are carried out, and no other may come in between."""
        slot = self._slot(peer)
        if full and self._linked[slot]:
            self._full.add(slot)
        else:
            self._full.discard(slot)
        self._look_at_links()
        if full:
            self.unsettled = self.unsettled and not self.congested
            return []
        return self._settle([])

    def _unlink(self, slot: int) -> None:
        self._linked[slot] = False
        self._full.discard(slot)
        self._held.pop(slot, None)
        self._synced &= self._down != slot
        for r in [r for r, fill in self._fills.items() if fill.slot == slot]:
            del self._fills[r]
        self._recode()

    def _resync_up(self, which: NDArray[np.bool_], out: Effects) -> None:
        """First word to the predecessors about these ranges."""
        which = which & ~self._mute
        for up in np.unique(self._up[which & (self._up >= 0)]).tolist():
            ranges = np.flatnonzero(which & (self._up == up)).astype(np.int64)
            empty = (self.role[ranges] == Role.JOINING) & ~self.filled[ranges]
            seqs = np.where(empty, NOTHING, self.seq[ranges])
            self._send(up, Resync(self.epoch, ranges, seqs, self.acked[ranges]), out)

    # -- messages ---------------------------------------------------------------------------------------------------

    def receive(self, peer: Member, message: Message) -> Effects:
        """The next message on the current link to `peer`."""
        out: Effects = []
        slot = self._slot(peer)
        if not self._linked[slot]:
            return out
        if message.epoch > self.epoch or self._held.get(slot):
            if not self._held.get(slot):
                out.append(NeedView(message.epoch))
            self._held.setdefault(slot, deque()).append(message)
            return out
        self._hear(slot, message, out)
        return self._settle(out)

    def holds(self, peer: Member) -> bool:
        """Whether messages of a peer wait here for the view that they speak of."""
        return bool(self._held.get(self._slot(peer)))

    def _hear_held(self, out: Effects) -> None:
        for slot, held in sorted(self._held.items()):
            while self._linked[slot] and held and held[0].epoch <= self.epoch:
                self._hear(slot, held.popleft(), out)
            if self._linked[slot] and held:
                out.append(NeedView(held[0].epoch))

    def _hear(self, slot: int, message: Message, out: Effects) -> None:
        try:
            self._handle(slot, message, out)
        except PeerError as error:
            self._unlink(slot)
            out.append(Distrust(self._members[slot], str(error)))

    def _handle(self, slot: int, message: Message, out: Effects) -> None:
        if isinstance(message, Forward):
            self._forward(slot, message, out)
        elif isinstance(message, Ack):
            self._ack(slot, message, out)
        elif isinstance(message, Resync):
            self._resync(slot, message, out)
        elif isinstance(message, SnapshotChunk):
            self._piece(slot, message, out)
        else:
            self._installed(slot, message, out)

    def _forward(self, slot: int, message: Forward, out: Effects) -> None:
        ranges, seqs = message.ranges, message.seqs
        fresh = self._heard(slot, message.epoch, ranges, self._up)
        gap = seqs - self.seq[ranges]
        if np.count_nonzero(fresh & (gap > 1)):
            raise PeerError(f"{self.me}: {self._members[slot]} left out an operation")
        fresh &= gap == 1
        quiet = ranges[fresh & (self._code[ranges] & 4 != 0)]
        if quiet.size and not self._bounds.keys() >= set(quiet.tolist()):
            raise PeerError(f"{self.me}: {self._members[slot]} forwarded to ranges that it has sent nothing of")
        if np.count_nonzero(fresh) < ranges.shape[0]:
            ranges, seqs = ranges[fresh], seqs[fresh]
            if ranges.shape[0] == 0:
                return
        self._check_content(slot, message)
        operation = message.operation
        before: int | Progress = 0
        if operation.worker >= 0:
            row = self.clocks.row(operation.worker)
            before = row[ranges]
            row[ranges] = operation.after
        self.seq[ranges] = seqs
        frame = self._frame(operation, None, ranges)
        self._perform(frame, ranges, seqs, before, out)
        if operation.after == 0:
            self.clocks.forget(operation.worker)

    def _ack(self, slot: int, message: Ack, out: Effects) -> None:
        ranges, seqs = message.ranges, message.seqs
        ok = self._heard(slot, message.epoch, ranges, self._down)
        if np.count_nonzero(ok) < ranges.shape[0]:
            ranges, seqs = ranges[ok], seqs[ok]
        self._check_sent(slot, ranges, seqs)
        if self._fed:
            joiner = self._tail[ranges]
            self._joiner_acked(slot, ranges[joiner], seqs[joiner], out)
            ranges, seqs = ranges[~joiner], seqs[~joiner]
        if ranges.shape[0]:
            self._commit(slot, ranges, seqs, out)

    def _resync(self, slot: int, message: Resync, out: Effects) -> None:
        ok = self._heard(slot, message.epoch, message.ranges, self._down) & ~self._late[message.ranges]
        ranges, seqs, acked = message.ranges[ok], message.seqs[ok], message.acked[ok]
        joiner = self._tail[ranges]
        back = self._back[ranges] & ~np.isin(ranges, list(self._reported))
        if back.any():
            self._catch_up(slot, ranges[back], seqs[back], out)
            ranges, seqs, acked, joiner = ranges[~back], seqs[~back], acked[~back], joiner[~back]
        self._check_prefix(slot, ranges, seqs, acked, joiner)
        for r, seq in zip(ranges[joiner].tolist(), seqs[joiner].tolist(), strict=True):
            self._joiner_resync(slot, r, seq, out)
        ranges, seqs, acked = ranges[~joiner], seqs[~joiner], acked[~joiner]
        if ranges.shape[0] == 0:
            return
        self._commit(slot, ranges, acked, out)
        position = np.full(self.ranges, np.iinfo(np.int64).max, dtype=np.int64)
        position[ranges] = seqs
        for entry in self.log.waiting_for(slot):
            missing = entry.seqs > position[entry.ranges]
            if missing.any():
                part = entry.part(missing)
                self._send(slot, Forward(self.epoch, part.ranges, part.seqs, entry.frame.operation), out)
        self._synced[ranges] = True
        self._recode()
