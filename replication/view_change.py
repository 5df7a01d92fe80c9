"""What a replica does with its ranges when their chains change: roles, what is retained, and the log's entries."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from replication.admission import Admission
from replication.chain import Chains, CopyState, Ranges, Role, place
from replication.core import Core, ProtocolError, Waiter
from replication.log import Entry
from replication.messages import Seqs
from replication.snapshot_transfer import SnapshotTransfer

_ORDERS_MAX = 64


class ViewChange:
    """Moves the ranges of a replica from the chains of one view to those of the next.

    mute   bool [P]: the copy came back with its own rows, and says nothing to predecessors yet
    late   bool [P]: I am the tail beside a copy that was left out and may come back
    """

    def __init__(self, core: Core, transfer: SnapshotTransfer, admission: Admission) -> None:
        ranges = core.ranges
        self._core, self._transfer, self._admission = core, transfer, admission
        # Where a `CopyState.PREDECESSOR` left us, -1 for nobody.
        self._parted: Seqs = np.full(ranges, -1, dtype=np.int64)
        self.late: NDArray[np.bool_] = np.zeros(ranges, dtype=np.bool_)  # I am the tail beside a `CopyState.LATE`
        self._holds: NDArray[np.bool_] = np.zeros(ranges, dtype=np.bool_)  # something of the range is here
        self.mute: NDArray[np.bool_] = np.zeros(ranges, dtype=np.bool_)  # a `CopyState.PREDECESSOR`: no successor

    def change_roles(self, view: Chains, changed: NDArray[np.bool_]) -> None:
        """Takes the roles that a view gives this member. changed, bool [P]: ranges with another chain. Raises
        ProtocolError."""
        core = self._core
        where = place(view, core.me)
        promoted = (core.role == Role.JOINING) & (where.role == Role.FULL)
        if np.count_nonzero(promoted & ~core.filled):
            raise ProtocolError(f"{core.me}: promoted half filled in ranges {np.flatnonzero(promoted & ~core.filled)}")
        complete = view.complete
        mine = (view.copy_state > CopyState.NONE) & (where.role == Role.JOINING)
        emptied = changed & (where.role == Role.JOINING) & ~mine
        gone = (where.role == Role.OUT) & self._holds & (view.heads >= 0)
        core.role = where.role
        self._holds = (self._holds | (where.role != Role.OUT)) & ~gone
        erased = np.flatnonzero(emptied | gone).astype(np.int64)
        if erased.size:
            self._transfer.erase(erased)
        core.filled |= mine
        self.mute = mine & ((view.copy_state == CopyState.PREDECESSOR) | (view.copy_state == CopyState.LATE))
        core.neighbours.follow(view, where)
        core.synced &= ~changed
        core.unacknowledged &= ~changed
        core.waiting &= ~changed
        core.joined[changed] = -1
        for known in (self._transfer.fills, self._transfer.reported):
            for r in [r for r in known if changed[r]]:
                known.pop(r)
        last = changed & where.tail
        self._retain(view, changed, last)
        joined = promoted & (view.copy_state == CopyState.PREDECESSOR)  # it stood before us and has all that we have
        sure = last & (joined | ~complete)
        core.acked[sure] = core.seq[sure]
        core.waiting |= last & complete
        core.joined[last & complete] = core.acked[last & complete]
        headed = view.headed_by(view.index(core.me))
        if np.array_equal(headed, core.headed):
            headed = core.headed  # whoever has prepared something for these ranges knows them again
        elif not np.array_equal(np.sort(headed), np.sort(core.headed)):
            self._admission.orders = {}
        core.headed = self._admission.orders[view.epoch] = headed
        if len(self._admission.orders) > _ORDERS_MAX:
            del self._admission.orders[min(self._admission.orders)]
        core.recode()

    def _retain(self, view: Chains, changed: NDArray[np.bool_], last: NDArray[np.bool_]) -> None:
        """Keeps for copies that are late what is acknowledged without them: from when it first is, so not if that was
        given up before they were asked back. The history of one that stood before us is ours as far as we had come
        when it was left out."""
        core = self._core
        late, back, was_late = view.copy_state == CopyState.LATE, view.copy_state == CopyState.CATCHING_UP, self.late
        goes_on = last & back & was_late
        core.retained.end(np.flatnonzero(changed & ~goes_on))
        core.retained.spent &= ~changed | goes_on
        begun: Ranges = np.flatnonzero(last & (late | back & ~was_late))
        if begun.size:
            parted = np.where(self._parted[begun] < 0, core.seq[begun], self._parted[begun])
            core.retained.begin(begun, core.acked[begun], parted, core.log.entries())
        before = last & (view.copy_state == CopyState.PREDECESSOR)
        self._parted[changed] = np.where(before, core.seq, -1)[changed]
        self.late, self._transfer.back = core.neighbours.tail & late, core.neighbours.tail & back

    def regroup(self, changed: NDArray[np.bool_]) -> None:
        """Gives the log's entries to their new neighbours, drops what is committed or gone, answers whoever is left."""
        core = self._core
        if not changed.any():
            return

        def split(entry: Entry) -> list[tuple[int, Entry]]:
            ranges, frame = entry.ranges, entry.frame
            if frame.token is not None and not core.neighbours.head[ranges].all():
                frame.moved.append(ranges[~core.neighbours.head[ranges]])
            keep = (core.role[ranges] == Role.FULL) & (core.acked[ranges] < entry.seqs)
            successors = np.where(keep, core.neighbours.down[ranges], -1)
            return [(slot, entry.part(successors == slot)) for slot in np.unique(successors[keep]).tolist()]

        for frame in core.log.rebuild(split):
            core.finish(frame)
        waiters, core.waiters = core.waiters, []
        for waiter in waiters:
            mine = core.neighbours.head[waiter.ranges]
            if not mine.all():
                waiter.frame.moved.append(waiter.ranges[~mine])
            core.waiters.append(Waiter(waiter.frame, waiter.ranges[mine], waiter.seqs[mine]))
        core.check_waiters()
