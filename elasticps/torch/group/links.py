"""Messages between the ranks of a group: rank 0 has a Unix socket to each of the others.

All ranks do the same operations in the same order. In each, a rank sends rank 0 a request, the operation's name and
some words, and rank 0 sends all of them an answer. So the end of a socket shows at once that a rank has died, and names
that differ show that ranks do different things. Messages are small: rows and gradients pass through memory
(`memory.py`).
"""

from __future__ import annotations

import json
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

from elasticps import errors
from elasticps.errors import Error, GroupLost, Refused
from elasticps.torch.group.memory import SharedMemory, new

Words = NDArray[np.int64]
_REQUEST = struct.Struct("<IQ")  # bytes of the operation's name, and how many words follow it
_ANSWER = struct.Struct("<QqQ")  # number of the operation, which memory comes with it (-1: none), words; or an error
_ERROR = 1 << 63
MAX_NAME = 1024
MAX_WORDS = 1 << 27
MAX_LATER = 32  # operations whose requests rank 0 has not read
MAX_OUTBOX_BYTES = 16 << 20
NOTHING: Words = np.empty(0, np.int64)


class Links:
    """The sockets of one rank: at rank 0 to each other rank, by rank; elsewhere the one to rank 0."""

    def __init__(self, rank: int, size: int, sockets: dict[int, socket.socket], timeout_s: float) -> None:
        self.rank = rank
        self.size = size
        self._sockets = sockets
        self._timeout_s = timeout_s
        self._operation = ""
        self._operations = 0  # operations so far
        self._answers: dict[int, tuple[Words, Error | None]] = {}  # by operation, not waited for so far
        self._unwanted: dict[int, Callable[[Words], None]] = {}  # by operation, not waited for
        self._memory: dict[int, SharedMemory] = {}  # by number
        self._later: deque[tuple[str, Words, Callable[[list[Words]], None]]] = deque()
        self._outbox = bytearray()
        self._over: Error | None = None
        _live.add(self)
        for each in sockets.values():
            each.settimeout(timeout_s)

    # -- every rank

    def ask(self, operation: str, words: Words = NOTHING) -> tuple[int, list[Words]]:
        """Begins an operation; words: this rank's request, int64 [n]. Returns the number of the operation and, at rank
        0, which waits for all ranks, the words of each; elsewhere no words."""
        self.catch_up()
        self._check()
        self._operation = operation
        self._operations += 1
        if self.rank:
            self._request(operation.encode()[:MAX_NAME], words)
            return self._operations, []
        return self._operations, self._collect(operation, words)

    def ask_later(self, operation: str, words: Words, then: Callable[[list[Words]], None]) -> int:
        """Begins an operation for which rank 0 does not wait: `then` gets the words of each rank before rank 0's next
        operation, or when it catches up. Returns the number of the operation."""
        if self.rank:
            return self.ask(operation, words)[0]
        self._check()
        if len(self._later) >= MAX_LATER:
            self.catch_up()
        self._operations += 1
        self._later.append((operation, words, then))
        return self._operations

    def catch_up(self) -> None:
        """At rank 0: waits for the requests of all operations that were begun with `ask_later`."""
        while self._later:
            operation, words, then = self._later.popleft()
            self._operation = operation
            then(self._collect(operation, words))

    def answer(self, number: int, words: Words = NOTHING) -> Words:
        """Ends an operation: rank 0 sends its result, int64 [n], and the others wait for it. Returns the result. Raises
        the error that rank 0 has raised within the operation."""
        if self.rank == 0:
            self._check()
            self._answer_all(number, words)
            return words
        self._flush()
        while number not in self._answers:
            self._check()
            self._read_answer()
        answer, error = self._answers.pop(number)
        if error is not None:
            raise error
        return answer

    def exchange(self, operation: str, words: Words) -> list[Words]:
        """An operation whose result is the words of each rank; all ranks give the same number of words."""
        number, requests = self.ask(operation, words)
        with self.leading(number):
            if len({len(each) for each in requests}) > 1:
                self._end(f"{operation}: ranks give {[len(each) for each in requests]} words")
            answer = self.answer(number, np.concatenate(requests) if self.rank == 0 else NOTHING)
        return list(answer.reshape(self.size, -1))

    @contextmanager
    def leading(self, number: int) -> Iterator[None]:
        """Around the part of an operation that rank 0 does for all: when it raises, all ranks raise the same."""
        try:
            yield
        except BaseException as error:
            if self.rank == 0 and self._over is None:
                self._refuse(number, error)
                if not isinstance(error, Error):  # a message may have been cut in two
                    self._over = GroupLost(f"rank 0 of the group failed before: {error!r}")
            raise

    def agree(self, requests: list[Words], what: str) -> None:
        """Ends the group if the ranks' words are not the same."""
        if not all(np.array_equal(each, requests[0]) for each in requests[1:]):
            self._end(f"{self._operation!r} is not of the same {what} at all ranks")

    def forget(self, number: int, unwanted: Callable[[Words], None]) -> None:
        """Notes that this rank will not wait for an answer; `unwanted` is called with it, if it comes."""
        answer = self._answers.pop(number, None)
        if answer is None:
            self._unwanted[number] = unwanted
        elif answer[1] is None:
            unwanted(answer[0])

    def memory(self, number: int) -> SharedMemory:
        """The shared memory of a number that rank 0 has given."""
        return self._memory[number]

    def shared(self, number: int) -> int:
        """The size in bytes of the memory of a number; 0 if there is none."""
        known = self._memory.get(number)
        return 0 if known is None else known.nbytes

    def share(self, number: int, nbytes: int) -> None:
        """At rank 0: has the memory of this number hold at least so many bytes. If that takes new memory, the others
        get it before the next answer; arrays in the old memory stay as they are."""
        known = self._memory.get(number)
        if known is not None and known.nbytes >= nbytes:
            return
        descriptor = new(nbytes)
        try:
            self._memory[number] = SharedMemory(descriptor)
            for rank, each in self._sockets.items():
                try:
                    socket.send_fds(each, [_ANSWER.pack(0, number, 0)], [descriptor])
                except OSError as error:
                    self._end(f"rank {rank} of the group has ended ({error})")
        finally:
            os.close(descriptor)

    def unshare(self, number: int) -> None:
        """At rank 0: has the next `share` of this number make new memory; the old one lives while arrays refer to
        it."""
        self._memory.pop(number, None)

    def close(self) -> None:
        """Leaves the group; the others get `GroupLost` with their next operation."""
        self._over = self._over or GroupLost("the group was closed at this rank")
        self.disown()

    def disown(self) -> None:
        """Closes this process's copies of the sockets, which must not keep them open."""
        for each in self._sockets.values():
            each.close()

    # -- rank 0

    def _collect(self, operation: str, own: Words) -> list[Words]:
        requests, waiting = {0: own}, dict(self._sockets)
        poll, ranks = select.poll(), {}
        for rank, each in waiting.items():
            poll.register(each, select.POLLIN | select.POLLRDHUP)
            ranks[each.fileno()] = rank
        deadline_s = time.monotonic() + self._timeout_s
        while waiting:
            ready = poll.poll(max(0.0, deadline_s - time.monotonic()) * 1e3)
            if not ready:
                self._end(f"{_ranks_in_words(waiting)} did not come to {operation!r} within {self._timeout_s:g} s")
            for descriptor, _ in ready:
                rank = ranks[descriptor]
                if rank not in waiting:  # its request has come, so this is its end
                    self._end(f"rank {rank} of the group has ended")
                name, requests[rank] = self._read_request(rank)
                if name != operation:
                    self._end(f"rank 0 does {operation!r} while rank {rank} does {name!r}: all ranks of a group must "
                              "do the same, in the same order")  # fmt: skip
                del waiting[rank]
                poll.modify(descriptor, select.POLLRDHUP)
        return [requests[rank] for rank in range(self.size)]

    def _read_request(self, rank: int) -> tuple[str, Words]:
        peer = self._sockets[rank]
        header = self._received(peer, _REQUEST.size, f"rank {rank}")
        length, count = _REQUEST.unpack(header)
        if length > MAX_NAME or count > MAX_WORDS:
            self._end(f"rank {rank} sent a request that makes no sense: {length} bytes of name, {count} words")
        name = bytes(self._received(peer, length, f"rank {rank}")).decode(errors="replace")
        words = np.frombuffer(self._received(peer, 8 * count, f"rank {rank}"), np.int64)
        return name, words

    def _answer_all(self, number: int, words: Words) -> None:
        message = _ANSWER.pack(number, -1, len(words)) + words.tobytes()
        for rank, each in self._sockets.items():
            self._send(each, message, f"rank {rank}")

    def _refuse(self, number: int, error: BaseException) -> None:
        """Has the other ranks raise the error that this one raises."""
        body = encode_error(error)
        for each in self._sockets.values():
            try:
                each.sendall(_ANSWER.pack(number | _ERROR, -1, len(body)) + body)
            except OSError:
                continue  # it has ended; rank 0 raises anyway

    # -- the others

    def _request(self, name: bytes, words: Words) -> None:
        """Sends a request: as much as the socket takes now, and the rest with the next operation that waits for rank 0.
        Until then rank 0 may be busy, and this rank has other things to do."""
        self._outbox += _REQUEST.pack(len(name), len(words)) + name
        self._outbox += np.ascontiguousarray(words, np.int64).data.cast("B")
        peer = self._sockets[0]
        room = select.poll()
        with self._sending("rank 0"):
            room.register(peer, select.POLLOUT)
            while self._outbox and room.poll(0):
                del self._outbox[: peer.send(self._outbox)]
        if len(self._outbox) > MAX_OUTBOX_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._outbox:
            outbox, self._outbox = self._outbox, bytearray()
            self._send(self._sockets[0], outbox, "rank 0")

    def _read_answer(self) -> None:
        """Reads one message of rank 0: memory, an error, or the answer to an operation."""
        peer = self._sockets[0]
        try:
            first, descriptors, _, _ = socket.recv_fds(peer, _ANSWER.size, 1)
        except TimeoutError:
            self._end(f"rank 0 of the group did not answer {self._operation!r} within {self._timeout_s:g} s")
        except OSError as error:
            self._end(f"rank 0 of the group has ended ({error})")
        if not first:
            self._end("rank 0 of the group has ended")
        header = first + bytes(self._received(peer, _ANSWER.size - len(first), "rank 0"))
        number, memory, length = _ANSWER.unpack(header)
        if descriptors:
            try:
                self._memory[memory] = SharedMemory(descriptors[0])
            finally:
                os.close(descriptors[0])
        elif number & _ERROR:
            failure = decode_error(bytes(self._received(peer, length, "rank 0")))
            if self._unwanted.pop(number ^ _ERROR, None) is None:
                self._answers[number ^ _ERROR] = NOTHING, failure
            if isinstance(failure, GroupLost):
                self._over = failure
        else:
            words = np.frombuffer(self._received(peer, 8 * length, "rank 0"), np.int64)
            unwanted = self._unwanted.pop(number, None)
            if unwanted is None:
                self._answers[number] = words, None
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
            with suppress(OSError):  # rank 0 may have sent the reason before it ended
                while self.rank and self._over is None:
                    self._read_answer()
            self._check()
            self._end(f"{who} of the group has ended ({error})")

    def _check(self) -> None:
        if self._over is not None:
            raise self._over

    def _end(self, text: str) -> NoReturn:
        """Ends the group at all ranks, with `GroupLost`."""
        error = GroupLost(f"{text}. The group ends with it: start all of its ranks again (torchrun does)")
        if self.rank == 0:
            self._refuse(self._operations, error)
        self._over = error
        raise error


def _disown() -> None:
    """Closes the sockets in a forked child, such as a DataLoader's worker: the others must notice when its parent, a
    rank, dies, even if the child lives on."""
    for links in list(_live):
        links.disown()


_live: weakref.WeakSet[Links] = weakref.WeakSet()
os.register_at_fork(after_in_child=_disown)


def _ranks_in_words(ranks: Iterable[int]) -> str:
    several = sorted(ranks)
    return f"rank{'s' * (len(several) > 1)} {', '.join(map(str, several))} of the group"


# -- errors of rank 0, which the other ranks raise too, with all that they say


def encode_error(error: BaseException) -> bytes:
    """An error as bytes: JSON, a zero byte, and the keys of refused rows, which the JSON counts. An error that is none
    of `elasticps.errors` becomes `GroupLost`."""
    if not isinstance(error, Error):
        error = GroupLost(f"rank 0 of the group failed: {error!r}")
    every = [error, *error.others] if isinstance(error, Refused) else [error]
    documents, keys = list[dict[str, object]](), list[bytes]()
    for each in every:
        refused = each.refused if isinstance(each, Refused) else {}
        more: list[object] = list(each.__reduce__()[1][1:])  # the constructor's arguments after the text
        try:
            json.dumps(more)
        except TypeError:  # it carries what only this process knows
            more = []
        counts = [[name, len(some)] for name, some in refused.items()]
        documents.append({"kind": type(each).__name__, "text": str(each), "more": more, "refused": counts})
        keys += [some.tobytes() for some in refused.values()]
    return b"\0".join([json.dumps(documents).encode(), b"".join(keys)])


def decode_error(body: bytes) -> Error:
    """The error of such bytes. If its kind cannot be made, the nearest base class that takes a text alone."""
    written, _, keys = body.partition(b"\0")
    every, at, made = np.frombuffer(keys, np.int64), 0, list[Error]()
    for document in json.loads(written):
        error = _made(document["kind"], document["text"], document["more"])
        made.append(error)
        found = {}
        for name, count in document["refused"]:
            found[name] = every[at : at + count]
            at += count
        if isinstance(error, Refused) and found:
            error.refused = found
    first, *others = made
    if isinstance(first, Refused) and others:
        first.others = others
    return first


def _made(kind: str, text: str, more: list[object]) -> Error:
    found = getattr(errors, kind, None)
    if isinstance(found, type) and issubclass(found, Error):
        for each, values in ((found, more), *((each, []) for each in found.__mro__)):
            with suppress(TypeError):
                made = each(text, *values)
                if isinstance(made, Error):
                    return made
    return GroupLost(text)
