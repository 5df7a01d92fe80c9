"""Which workers have left: their key is gone, and the store was there to tell of it. Pure.

A lease that runs out says that its holder is gone only if the holder could have renewed it. It could not while the
store stood still, and when the store goes on all leases have run out together. So after a time without answers, and in
the beginning, as nobody knows what was before, those that the roster lists have a whole lease to come back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from coordinator.core.view import Roster, WorkerInfo

COME_BACK_S = 6.0  # a lease, and a second to find out that it was lost
AWAY_S = 2.0  # the leader asks the store every second: without an answer for so long it was away


class LeaseGrace:
    """Answers of the store in, with the time; out comes whose absence counts."""

    def __init__(self, now: float) -> None:
        self._answered = now
        self._until = now + COME_BACK_S

    def answered(self, now: float) -> None:
        """The store has answered what it was asked just before."""
        if now - self._answered > AWAY_S:
            self._until = now + COME_BACK_S
        self._answered = now

    def left_s(self, now: float) -> float:
        """For how long those who are missing may still come back; 0: who is missing has left."""
        if now - self._answered > AWAY_S:
            return COME_BACK_S
        return max(0.0, self._until - now)

    def present(
        self, roster: Roster | None, registered: Iterable[WorkerInfo], signed_off: Collection[str], now: float
    ) -> list[WorkerInfo]:
        """The workers to list: those registered, and those that may still come back; not who signed off."""
        present = list(registered)
        if roster is not None and self.left_s(now) > 0:
            taken = {worker.name for worker in present}.union(signed_off)
            present += [worker for worker in roster.workers if worker.name not in taken]
        return present
