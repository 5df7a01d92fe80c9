"""Which cut this server's workers hold for: who has been told, who holds, until when. Pure.

A worker that was told to hold begins no step and writes nothing else. It says so when all that it has written is
committed, and its newest round closed. Who trains in rounds cannot hold at any step: as soon as one worker has pushed
its share of a round, all others of its application have to come as far, or that one waits for them for ever. So whoever
is told to hold with a round open says that at once, and the others are told how far they still have to go.
"""

from __future__ import annotations

from typing import NamedTuple

from elasticps.wire.headers import HeldHeader, HoldHeader

MOST_S = 60.0  # nobody is held for longer


class _Worker(NamedTuple):
    app: str
    said: HeldHeader


class Holding:
    """One cut at a time: the newest that somebody asked for. A lower number is refused, and so is one that has been
    released, or whose time was over: its workers may have gone on."""

    def __init__(self) -> None:
        self.cut = 0
        self._until_s = 0.0
        self._workers: dict[int, _Worker] = {}
        self._rounds: dict[str, int] = {}  # by application: the newest round that somebody has pushed to

    def begin(self, cut: int, hold_s: float, now: float) -> bool:
        """Holds for a cut, or goes on to, as long as was said first; whether it does."""
        if cut > self.cut and 0 < hold_s <= MOST_S:
            self.cut, self._until_s = cut, now + hold_s
            self._workers.clear()
            self._rounds.clear()
        return cut == self.cut and now < self._until_s

    def tells(self, app: str, now: float) -> HoldHeader | None:
        """What a worker of that application is told now, if it is to hold."""
        left_ms = int((self._until_s - now) * 1000)
        return HoldHeader(self.cut, left_ms, self._rounds.get(app, 0)) if left_ms > 0 else None

    def hear(self, app: str, said: HeldHeader, now: float) -> bool:
        """A worker holds, or is about to; whether the others of its application have to be told to come as far."""
        if said.cut != self.cut or now >= self._until_s:
            return False
        self._workers[said.worker] = _Worker(app, said)
        if not said.open or said.clock <= self._rounds.get(app, 0):
            return False
        self._rounds[app] = said.clock
        return True

    def held(self, cut: int, now: float) -> dict[int, int]:
        """The workers that hold for this cut, with the clock up to which they have written; those that still have to
        push to a round do not."""
        if cut != self.cut or now >= self._until_s:
            return {}
        return {
            id: said.clock
            for id, (app, said) in self._workers.items()
            if not said.open and (said.apart or said.clock >= self._rounds.get(app, 0))
        }

    def release(self, cut: int) -> bool:
        """Its workers may go on; whether they were held until now."""
        if cut != self.cut:
            return False
        was, self._until_s = self._until_s, 0.0
        return was > 0.0
