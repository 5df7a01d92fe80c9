"""The promise of data shards: each is trained, by one living worker at a time, and again only if that work was lost;
once a worker knows that its step is committed, the shard is done for good.

A shard is a key, and each incarnation of a worker has a column: so the table says who trained what.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from chaos.sim.checks.sums import COLUMNS, KEYS, Keys, Rows
from chaos.sim.checks.violation import Violation

TRAINED = 12  # what a step adds; under rounds the mean of up to four workers


class Hand:
    """The steps of one worker incarnation, of id `worker`. ended: it was killed or fenced."""

    def __init__(self, column: int, worker: int) -> None:
        self.column = column
        self.worker = worker
        self.ended = False
        self.steps: list[tuple[int, int]] = []  # clock and shard of each step not known to be committed


class Handed:
    """The shards of one application, and who trains them."""

    def __init__(self, app: str, shards: int) -> None:
        self.app = app
        self.shards = shards
        self._hands: list[Hand] = []
        self._holder: dict[int, Hand] = {}
        self._done: dict[int, Hand] = {}
        self._begun: set[int] = set()  # some step has trained it

    def start(self, worker: int) -> Hand:
        """Adds an incarnation of a worker."""
        hand = Hand(len(self._hands), worker)
        self._hands.append(hand)
        return hand

    def grads(self, hand: Hand) -> Rows:
        """Returns the gradients that a worker pushes for a shard."""
        grads = np.zeros((1, COLUMNS), np.float32)
        grads[:, hand.column] = TRAINED
        return grads

    def take(self, hand: Hand, shard: int, counted: Collection[int]) -> None:
        """A worker was given a shard. counted: the ids of the workers that the cluster knows now. A worker that the
        cluster has forgotten may not know that yet: its steps do not count."""
        if hand.worker not in counted:
            return
        if shard in self._done:
            text = f"shard {shard} goes to worker {hand.worker}, worker {self._done[shard].worker} has trained it"
            raise Violation("every shard once", f"{self.app}: {text}")
        other = self._holder.get(shard, hand)
        if other is not hand and other.worker in counted:
            text = f"shard {shard} goes to worker {hand.worker}, while worker {other.worker} trains it"
            raise Violation("one hand", f"{self.app}: {text}")
        self._holder[shard] = hand

    def pass_over(self, hand: Hand, shard: int) -> None:
        """The worker will not train its shard."""
        if self._holder.get(shard) is hand:
            del self._holder[shard]

    def begin(self, shard: int) -> None:
        """A step that trains a shard is about to be pushed."""
        self._begun.add(shard)

    def step(self, hand: Hand, shard: int, clock: int) -> None:
        """A step that trains a shard is on its way."""
        hand.steps.append((clock, shard))

    def over(self, hand: Hand, counted: Collection[int]) -> None:
        """Checks that all shards are done, as a worker was told."""
        left = set(range(self.shards)) - self._begun
        if left and hand.worker in counted:
            text = f"worker {hand.worker} is told that all is done, nobody has trained shards {sorted(left)}"
            raise Violation("all shards", f"{self.app}: {text}")

    def committed(self, hand: Hand, clock: int) -> None:
        """A worker knows that its steps up to a clock are committed, and their rounds closed."""
        for _, shard in (step for step in hand.steps if step[0] <= clock):
            before = self._done.setdefault(shard, hand)
            if before is not hand:
                text = f"shard {shard} is trained by worker {before.worker} and by worker {hand.worker}"
                raise Violation("every shard once", f"{self.app}: {text}")
        hand.steps = [step for step in hand.steps if step[0] > clock]

    def check_end(self, rows: Rows) -> None:
        """Checks, when everything has come to rest, which workers trained each shard."""
        odd = [value for value in np.unique(rows).tolist() if value not in (0, *(TRAINED / n for n in (1, 2, 3, 4)))]
        if odd:
            raise Violation("shards", f"{self.app}: a shard was trained by {odd[0] / TRAINED} steps of one worker")
        for shard, row in enumerate(rows):
            hands = [self._hands[c] for c in np.flatnonzero(row[: len(self._hands)]).tolist()]
            counted = [h.worker for h in hands if not h.ended or self._done.get(shard) is h]
            known = self._done.get(shard)
            if not hands or len(counted) > 1 or (known is not None and known not in hands):
                text = f"shard {shard} was trained by workers {[h.worker for h in hands]}, of these count {counted}"
                raise Violation("every shard once", f"{self.app}: {text}")


def key_of(shard: int) -> Keys:
    """The key that stands for a shard."""
    assert 0 <= shard < KEYS
    return np.array([shard], np.int64)
