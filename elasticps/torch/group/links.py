"""How the ranks of a group speak with each other: rank 0 with each of the others, through Unix sockets.

Every operation is one of all ranks, in the same order: each says to rank 0 what it does, and what it has, and is told
what came of it. So a socket that ends tells at once of a rank that has died, and ranks that do different things are
told which. What is said is small, rows and gradients pass through memory (`memory.py`).
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from elasticps.errors import Error, GroupLost
from elasticps.torch.group.failures import decode_error, encode_error
from elasticps.torch.group.memory import Shared, new

Words = NDArray[np.int64]
_ASKED = struct.Struct("<IQ")  # bytes of the operation's name, words behind it
_TOLD = struct.Struct("<QqQ")  # number of the operation, which memory comes with it (-1: none), words; or an error
_ERROR = 1 << 63
MAX_NAME = 1024
MAX_WORDS = 1 << 27
MAX_LATER = 32  # operations
MAX_UNSAID = 16 << 20
NOTHING: Words = np.empty(0, np.int64)


class Links:
    """The sockets of one rank: at rank 0 to each other rank, by rank; elsewhere the one to rank 0."""

    def __init__(self, rank: int, size: int, sockets: dict[int, socket.socket], timeout_s: float) -> None:
        self.rank = rank
        self.size = size
        self._sockets = sockets
        self._timeout_s = timeout_s
        self._operation = ""
        self._asked = 0  # operations so far
        self._told: dict[int, tuple[Words, Error | None]] = {}  # answers that nobody has waited for yet, by operation
        self._unwanted: dict[int, Callable[[Words], None]] = {}  # answers that nobody will wait for, by operation
        self._memory: dict[int, Shared] = {}  # by number
        self._later: deque[tuple[str, Words, Callable[[list[Words]], None]]] = deque()
        self._unsaid = bytearray()
        self._over: Error | None = None
        _live.add(self)
        for each in sockets.values():
            each.settimeout(timeout_s)

    # -- every rank

    def ask(self, operation: str, words: Words = NOTHING) -> tuple[int, list[Words]]:
        """Says what this rank does, and int64 [n] that rank 0 is to know. The number of the operation; and at rank 0,
        which waits for all ranks, what each has said, elsewhere nothing."""
        self.catch_up()
        self._check()
        self._operation = operation
        self._asked += 1
        if self.rank:
            self._say(operation.encode()[:MAX_NAME], words)
            return self._asked, []
        return self._asked, self._hear_all(operation, words)

    def ask_later(self, operation: str, words: Words, then: Callable[[list[Words]], None]) -> int:
        """The same, but rank 0 goes on at once: `then` gets what each has said before rank 0's next operation, or when
        it catches up. The number of the operation."""
        if self.rank:
            return self.ask(operation, words)[0]
        self._check()
        if len(self._later) >= MAX_LATER:
            self.catch_up()
        self._asked += 1
        self._later.append((operation, words, then))
        return self._asked

    def catch_up(self) -> None:
        """At rank 0: hears what all ranks have said of what was asked for later."""
        while self._later:
            operation, words, then = self._later.popleft()
            self._operation = operation
            then(self._hear_all(operation, words))

    def answer(self, number: int, words: Words = NOTHING) -> Words:
        """What came of an operation: rank 0 says it, int64 [n], and the others wait for it."""
        if self.rank == 0:
            self._check()
            self._tell_all(number, words)
            return words
        self._say_all()
        while number not in self._told:
            self._check()
            self._listen()
        told, error = self._told.pop(number)
        if error is not None:
            raise error
        return told

    def exchange(self, operation: str, words: Words) -> list[Words]:
        """What each rank has said, to all of them. Ranks say as many words each."""
        number, said = self.ask(operation, words)
        with self.leading(number):
            if len({len(each) for each in said}) > 1:
                self._end(f"{operation}: ranks say {[len(each) for each in said]} words")
            told = self.answer(number, np.concatenate(said) if self.rank == 0 else NOTHING)
        return list(told.reshape(self.size, -1))

    @contextmanager
    def leading(self, number: int) -> Iterator[None]:
        """Around what rank 0 does for all: when it raises, all ranks raise the same."""
        try:
            yield
        except BaseException as error:
            if self.rank == 0 and self._over is None:
                self._refuse(number, error)
                if not isinstance(error, Error):  # a message may have been cut in two
                    self._over = GroupLost(f"rank 0 of the group failed before: {error!r}")
            raise

    def agree(self, said: list[Words], what: str) -> None:
        """Ends the group if ranks do not say the same."""
        if not all(np.array_equal(each, said[0]) for each in said[1:]):
            self._end(f"{self._operation!r} is not of the same {what} at all ranks")

    def forget(self, number: int, unwanted: Callable[[Words], None]) -> None:
        """Nobody waits for an answer any more; `unwanted` gets it, if one comes."""
        told = self._told.pop(number, None)
        if told is None:
            self._unwanted[number] = unwanted
        elif told[1] is None:
            unwanted(told[0])

    def memory(self, number: int) -> Shared:
        """Memory that rank 0 has given a number."""
        return self._memory[number]

    def shared(self, number: int) -> int:
        """How many bytes it has; 0 before there is any."""
        known = self._memory.get(number)
        return 0 if known is None else known.nbytes

    def share(self, number: int, nbytes: int) -> None:
        """At rank 0: sees to it that memory of this number has so many bytes. The others have it before the next
        answer; arrays in what it was before stay what they are."""
        known = self._memory.get(number)
        if known is not None and known.nbytes >= nbytes:
            return
        descriptor = new(nbytes)
        try:
            self._memory[number] = Shared(descriptor)
            for rank, each in self._sockets.items():
                try:
                    socket.send_fds(each, [_TOLD.pack(0, number, 0)], [descriptor])
                except OSError as error:
                    self._end(f"rank {rank} of the group has ended ({error})")
        finally:
            os.close(descriptor)

    def unshare(self, number: int) -> None:
        """At rank 0: memory of this number is new when it is shared next; who has the old one keeps it."""
        self._memory.pop(number, None)

    def close(self) -> None:
        """Ends; the others find out with their next operation."""
        self._over = self._over or GroupLost("the group was closed at this rank")
        self.disown()

    def disown(self) -> None:
        """This process has no part of it: its copies of the sockets must not keep them open."""
        for each in self._sockets.values():
            each.close()

    # -- rank 0

    def _hear_all(self, operation: str, own: Words) -> list[Words]:
        said, waiting = {0: own}, dict(self._sockets)
        poll, ranks = select.poll(), {}
        for rank, each in waiting.items():
            poll.register(each, select.POLLIN | select.POLLRDHUP)
            ranks[each.fileno()] = rank
        deadline_s = time.monotonic() + self._timeout_s
        while waiting:
            ready = poll.poll(max(0.0, deadline_s - time.monotonic()) * 1e3)
            if not ready:
                self._end(f"{_named(waiting)} did not come to {operation!r} within {self._timeout_s:g} s")
            for descriptor, _ in ready:
                rank = ranks[descriptor]
                if rank not in waiting:  # it has said its part, so this is its end
                    self._end(f"rank {rank} of the group has ended")
                name, said[rank] = self._hear(rank)
                if name != operation:
                    self._end(f"rank 0 does {operation!r} while rank {rank} does {name!r}: all ranks of a group must "
                              "do the same, in the same order")  # fmt: skip
                del waiting[rank]
                poll.modify(descriptor, select.POLLRDHUP)
        return [said[rank] for rank in range(self.size)]

    def _hear(self, rank: int) -> tuple[str, Words]:
        peer = self._sockets[rank]
        header = self._received(peer, _ASKED.size, f"rank {rank}")
        length, count = _ASKED.unpack(header)
        if length > MAX_NAME or count > MAX_WORDS:
            self._end(f"rank {rank} says what makes no sense: {length} bytes of name, {count} words")
        name = bytes(self._received(peer, length, f"rank {rank}")).decode(errors="replace")
        words = np.frombuffer(self._received(peer, 8 * count, f"rank {rank}"), np.int64)
        return name, words

    def _tell_all(self, number: int, words: Words) -> None:
        message = _TOLD.pack(number, -1, len(words)) + words.tobytes()
        for rank, each in self._sockets.items():
            self._send(each, message, f"rank {rank}")

    def _refuse(self, number: int, error: BaseException) -> None:
        """Has the other ranks raise what this one raises."""
        body = encode_error(error)
        for each in self._sockets.values():
            try:
                each.sendall(_TOLD.pack(number | _ERROR, -1, len(body)) + body)
            except OSError:
                continue  # it has ended; rank 0 raises anyway

    # -- the others

    def _say(self, name: bytes, words: Words) -> None:
        """Says what its socket takes now, and the rest with the next operation that waits for rank 0: until then nobody
        may be there to hear it, and this rank has other things to do."""
        self._unsaid += _ASKED.pack(len(name), len(words)) + name
        self._unsaid += np.ascontiguousarray(words, np.int64).data.cast("B")
        peer = self._sockets[0]
        room = select.poll()
        with self._sending("rank 0"):
            room.register(peer, select.POLLOUT)
            while self._unsaid and room.poll(0):
                del self._unsaid[: peer.send(self._unsaid)]
        if len(self._unsaid) > MAX_UNSAID:
            self._say_all()

    def _say_all(self) -> None:
        if self._unsaid:
            unsaid, self._unsaid = self._unsaid, bytearray()
            self._send(self._sockets[0], unsaid, "rank 0")

    def _listen(self) -> None:
        """Takes one message of rank 0."""
        peer = self._sockets[0]
        try:
            first, descriptors, _, _ = socket.recv_fds(peer, _TOLD.size, 1)
        except TimeoutError:
            self._end(f"rank 0 of the group did not answer {self._operation!r} within {self._timeout_s:g} s")
        except OSError as error:
            self._end(f"rank 0 of the group has ended ({error})")
        if not first:
            self._end("rank 0 of the group has ended")
        header = first + bytes(self._received(peer, _TOLD.size - len(first), "rank 0"))
        number, memory, length = _TOLD.unpack(header)
        if descriptors:
            try:
                self._memory[memory] = Shared(descriptors[0])
            finally:
                os.close(descriptors[0])
        elif number & _ERROR:
            failure = decode_error(bytes(self._received(peer, length, "rank 0")))
            if self._unwanted.pop(number ^ _ERROR, None) is None:
                self._told[number ^ _ERROR] = NOTHING, failure
            if isinstance(failure, GroupLost):
                self._over = failure
        else:
            words = np.frombuffer(self._received(peer, 8 * length, "rank 0"), np.int64)
            unwanted = self._unwanted.pop(number, None)
            if unwanted is None:
                self._told[number] = words, None
            else:
                unwanted(words)

    # -- sockets

    def _received(self, peer: socket.socket, count: int, who: str) -> bytearray:
        into = bytearray(count)
        view, at = memoryview(into), 0
        while at < count:
            try:
                n = peer.recv_into(view[at:])
            except TimeoutError:
                self._end(f"{who} of the group fell silent within {self._operation!r}")
            except OSError as error:
                self._end(f"{who} of the group has ended ({error})")
            if not n:
                self._end(f"{who} of the group has ended, within {self._operation!r}")
            at += n
        return into

    def _send(self, peer: socket.socket, data: bytes | bytearray, who: str) -> None:
        with self._sending(who):
            peer.sendall(data)

    @contextmanager
    def _sending(self, who: str) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:  # ValueError: it is closed
            with suppress(OSError):  # rank 0 may have said why it ends
                while self.rank and self._over is None:
                    self._listen()
            self._check()
            self._end(f"{who} of the group has ended ({error})")

    def _check(self) -> None:
        if self._over is not None:
            raise self._over

    def _end(self, text: str) -> NoReturn:
        """Nothing can be done together any more."""
        error = GroupLost(f"{text}. The group ends with it: start all of its ranks again (torchrun does)")
        if self.rank == 0:
            self._refuse(self._asked, error)
        self._over = error
        raise error


def _disown() -> None:
    """In a forked child, such as a DataLoader's worker: a rank that dies must be missed even if that lives on."""
    for links in list(_live):
        links.disown()


_live: weakref.WeakSet[Links] = weakref.WeakSet()
os.register_at_fork(after_in_child=_disown)


def _named(ranks: Iterable[int]) -> str:
    several = sorted(ranks)
    return f"rank{'s' * (len(several) > 1)} {', '.join(map(str, several))} of the group"
