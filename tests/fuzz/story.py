"""One seed: bursts of frames from every kind of peer, between views, while an honest worker works."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from random import Random
from typing import NamedTuple

from elasticps.model.spec import TableSpec
from elasticps.wire.frames import view_frame
from tests.fuzz.core import HOSTILE, NOBODY, Core, Wire
from tests.fuzz.corpus import LEADER, PEER, ROUNDS, WORKER, Corpus
from tests.fuzz.voices import Voices

BATCHES = 150  # between two views
PIECES = 60  # that a batch arrives in, at most
CONNECTIONS = 6
REMEMBERED = 40
FLOOD, FLOOD_BYTES = 3000, 2 << 20
_ROLES = (WORKER, WORKER, WORKER, WORKER, PEER, PEER, PEER, ROUNDS, LEADER)
_SIZES = (1 << 20, 1 << 20, 1 << 20, 1 << 20, 5000, 600, 65, 64, 63, 8)
_WRONG = (0.0, 0.0, 0.05, 0.05, 0.3, 1.0)


class Reported(NamedTuple):
    """Counts of heard frames and connections. digest: of everything that the server sent."""

    frames: int
    connections: int
    digest: int


class Talk:
    """One connection of a peer."""

    def __init__(self, wire: Wire, role: str, worker: int) -> None:
        self.wire, self.role, self.worker = wire, role, worker
        self.heard = bytearray()  # of the first frames, to be said again by somebody else


class Story:
    """A core, and those who talk to it."""

    def __init__(self, seed: str, corpus: Corpus, tables: Mapping[int, TableSpec], compiled: bool) -> None:
        self.random = Random(seed)
        self.core = Core(self.random, tables, compiled)
        self._corpus, self._tables = corpus, tables
        self._talks: list[Talk] = []
        self._before: list[bytes] = []  # what connections said that are over
        self.frames = self.connections = self._digest = 0

    def tell(self, frames: int) -> Reported:
        """Until so many frames were heard."""
        while self.frames < frames:
            self.burst()
        return Reported(self.frames, self.connections, self._digest)

    def burst(self) -> None:
        """Some talk, a new view in the middle; then all go."""
        core, random = self.core, self.random
        for _ in range(2):
            core.server.adopt(core.next_view())
            core.settle()
            voices = Voices(core, self._corpus, self._tables, random)
            for _ in range(BATCHES):
                self._batch(voices)
                core.settle()
                if random.random() < 0.05:
                    core.honest.work()
                if random.random() < 0.1:
                    core.pass_time(random.choice((0.05, 0.25, 1.0, 3.0)))
                core.check_under_way([talk.wire for talk in self._talks])
        wires = []
        while self._talks:
            wires.append(self._talks[0].wire)
            self._end(self._talks[0])
        core.end_burst(wires)
        self._digest = zlib.crc32(core.honest.wire.digest.to_bytes(4, "little"), self._digest)

    def _note(self, wire: Wire) -> None:
        self._digest = zlib.crc32(wire.digest.to_bytes(4, "little"), self._digest)

    def _batch(self, voices: Voices) -> None:
        """Sends some frames on one of the connections."""
        random = self.random
        for talk in [talk for talk in self._talks if talk.wire.closed]:
            self._end(talk)
        if len(self._talks) < CONNECTIONS and (not self._talks or random.random() < 0.3):
            self._open(voices)
            return
        talk = random.choice(self._talks)
        if random.random() < 0.02:
            talk.wire.abort()
            return
        if talk.role == LEADER and random.random() < 0.02:
            frames = [bytearray(view_frame(self.core.next_view()))]
        else:
            frames = voices.say(talk.role, talk.worker, random.choice((1, 3, 10, 30, 60)), random.choice(_WRONG))
        if random.random() < 0.04:
            self._flood(talk, frames)
            return
        if random.random() < 0.2:
            frames += [bytearray(frame) for frame in random.sample(frames, min(3, len(frames)))]
        if random.random() < 0.2:
            random.shuffle(frames)
        self._say(talk, frames, self._size())

    def _size(self) -> int:
        return self.random.choice(_SIZES)

    def _say(self, talk: Talk, frames: list[bytearray], most: int) -> None:
        """Sends frames, so many bytes at once at most."""
        data = b"".join(frames)
        done = talk.wire.feed(data, max(most, len(data) // PIECES))
        if len(talk.heard) < 1 << 16:
            talk.heard += data
        at = 0
        for frame in frames:
            self.frames += at < done
            at += len(frame)

    def _flood(self, talk: Talk, frames: list[bytearray]) -> None:
        """The same few frames, again and again."""
        few = frames[: self.random.choice((1, 1, 1, 4))]
        size = sum(map(len, few))
        self._say(talk, few * min(FLOOD, FLOOD_BYTES // (size + 1)), self._size())

    def _open(self, voices: Voices) -> None:
        random = self.random
        role = random.choice(_ROLES)
        worker = random.choice((*HOSTILE, *HOSTILE, *HOSTILE, NOBODY))
        talk = Talk(self.core.open(reads=random.random() < 0.85), role, worker)
        self._talks.append(talk)
        self.connections += 1
        if self._before and random.random() < 0.05:  # somebody's words again, from the first to the last
            self._say(talk, [bytearray(random.choice(self._before))], self._size())
        else:
            self._say(talk, [voices.hello(role, worker)], self._size())

    def _end(self, talk: Talk) -> None:
        self._note(talk.wire)
        self._talks.remove(talk)
        self._before.append(bytes(talk.heard))
        del self._before[:-REMEMBERED]
