"""Sockets whose bytes travel over links that are slow, cut bytes anywhere, stall, lose one way, and break.

As TCP: bytes arrive in order or not at all; what an end has not read fills up and pushes back; a connection to a host
that cannot be reached opens late or never; the end of a process closes its sockets, the end of a host tells nobody.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

from chaos.sim.clock import Clock, Process

Address = tuple[str, int]
RETRY_S = 0.2  # how soon what was lost is sent again: a round trip and the timer of the first repetition
BACKLOG = 64
HEAD_BYTES = 64  # a cut often falls within a header
MOST_CUTS = 4


@dataclass(frozen=True)
class Weather:
    """How bad all links and machines are. short: how often a socket takes or gives less than it could; cut: how often
    bytes that were sent together arrive in several pieces; preempted: how often a thread is stopped at a lock."""

    latency_s: float = 0.0003
    bytes_per_s: float = 200e6
    buffer_bytes: int = 64 << 10
    short: float = 0.1
    cut: float = 0.3
    preempted: float = 0.1


class Network:
    """All hosts, their sockets, and which host reaches which."""

    def __init__(self, clock: Clock, weather: Weather) -> None:
        self.clock = clock
        self.weather = weather
        self.sockets: dict[Socket, None] = {}  # open ones
        self.sent_bytes = 0
        self.tap: Callable[[Socket, Socket, bytes], None] = lambda source, target, data: None  # sees all that is sent
        self._lost: dict[tuple[str, str], int] = {}  # (from, to) -> how many faults lose what is sent there
        self._dark: set[str] = set()  # hosts without power
        self._listeners: dict[Address, Listener] = {}
        self._numbers = itertools.count(3)
        self._held: deque[_Pipe] = deque()

    # --- faults -----------------------------------------------------------------------------------------------------

    def lose(self, source: str, target: str) -> None:
        """Loses everything that `source` sends to `target`, until `heal`."""
        self._lost[source, target] = self._lost.get((source, target), 0) + 1

    def heal(self, source: str, target: str) -> None:
        """Lets it arrive again; what was sent meanwhile is sent again."""
        left = self._lost.pop((source, target)) - 1
        if left:
            self._lost[source, target] = left
            return
        self._resume()

    def darken(self, host: str) -> None:
        """Takes a host's power: it sends and receives nothing, its peers are not told, and unsent bytes are gone."""
        self._dark.add(host)
        for sock in [s for s in self.sockets if s.process.host == host]:
            sock.vanish()

    def lighten(self, host: str) -> None:
        """Gives a host power again; the connections that its processes had open are closed."""
        self._dark.discard(host)
        self._resume()

    def _resume(self) -> None:
        held, self._held = self._held, deque()
        for pipe in held:
            pipe.resume()

    @property
    def troubled(self) -> bool:
        """Whether some host cannot reach another."""
        return bool(self._dark or self._lost)

    def reaches(self, source: str, target: str) -> bool:
        """Whether what one host sends arrives at another one."""
        if source in self._dark or target in self._dark:
            return False
        return source == target or (source, target) not in self._lost

    def reset(self, sock: Socket) -> None:
        """Breaks a connection: both ends learn of it, each in its time; bytes under way are lost."""
        for end in (sock, sock.peer):
            if end is not None:
                self.clock.after(self.delay(end.random), end.broken)

    def tear(self, sock: Socket, late_s: float) -> None:
        """Breaks a connection at one end. The bytes which that end has sent still arrive, late, and only then does the
        other end learn of it: so a peer may be back on a new connection before the old one is read to its end."""
        sock.torn(late_s)

    def delay(self, random: Random) -> float:
        """Draws how long a message travels, in seconds."""
        return self.weather.latency_s * (0.5 + random.random())

    # --- sockets ----------------------------------------------------------------------------------------------------

    def listen(self, process: Process, port: int, limit: int = BACKLOG) -> Listener:
        """Opens a port: others may connect to it, also before somebody accepts."""
        listener = Listener(self, process, (process.host, port), limit)
        self._listeners[process.host, port] = listener
        process.on_death[listener.shut] = None
        return listener

    def connect(self, process: Process, host: str, port: int) -> Socket:
        """Begins to open a connection."""
        sock = self.socket(process)
        self.clock.after(self.delay(sock.random), self._arrive, sock, (host, port))
        return sock

    def socket(self, process: Process) -> Socket:
        """A new socket of a process."""
        number = next(self._numbers)
        sock = Socket(self, process, number)
        self.sockets[sock] = None
        return sock

    def forget(self, listener: Listener) -> None:
        """Removes a port: connections to it are refused."""
        if self._listeners.get(listener.address) is listener:
            del self._listeners[listener.address]

    def _arrive(self, sock: Socket, address: Address) -> None:
        """A request to connect has arrived at `address`."""
        if sock.closed:
            return
        host = address[0]
        listener = self._listeners.get(address)
        there = self.reaches(sock.process.host, host) and self.reaches(host, sock.process.host)
        if not there or (listener is not None and listener.full):
            self.clock.after(RETRY_S, self._arrive, sock, address)
        elif listener is None:
            self.clock.after(self.delay(sock.random), sock.refused)
        else:
            other = self.socket(listener.process)
            sock.join(other)
            listener.arrived(other)
            self.clock.after(self.delay(sock.random), sock.opened)

    def hold(self, pipe: _Pipe) -> None:
        """Keeps the bytes of a pipe until a fault has gone."""
        self._held.append(pipe)


class Listener:
    """A listening socket. Connections wait in it, also while nobody accepts. `dup` is one more name for it."""

    def __init__(self, network: Network, process: Process, address: Address, limit: int) -> None:
        self.process = process
        self.address = address
        self.serving = False
        self._network = network
        self._limit = limit
        self._waiting: deque[Socket] = deque()
        self._notify: Callable[[], object] = lambda: None

    @property
    def full(self) -> bool:
        return len(self._waiting) >= self._limit

    def dup(self) -> Listener:
        return self

    def serve(self, notify: Callable[[], object]) -> None:
        """Begins to accept, until `close`; `notify` is called when there is a connection to accept."""
        self.serving, self._notify = True, notify
        notify()

    def arrived(self, sock: Socket) -> None:
        """Takes a connection, which is complete as far as its other end knows."""
        self._waiting.append(sock)
        if self.serving:
            self._notify()

    def accept(self) -> Socket | None:
        """Accepts the next connection."""
        while self._waiting:
            sock = self._waiting.popleft()
            if not sock.closed:
                return sock
        return None

    def close(self) -> None:
        """Ceases to accept; connections wait."""
        self.serving = False

    def shut(self) -> None:
        """Closes the port."""
        self.serving = False
        self._network.forget(self)
        while (sock := self.accept()) is not None:
            sock.close()


class _Pipe:
    """One direction of a connection: bytes of `source` on their way to `target`."""

    def __init__(self, network: Network, source: Socket, target: Socket) -> None:
        self.network = network
        self.source = source
        self.target = target
        self._under_way: deque[tuple[float, bytes]] = deque()  # b"": the end
        self._buffer_bytes = network.weather.buffer_bytes
        self._flying = 0
        self._last_s = 0.0
        self._moving = False

    @property
    def room(self) -> int:
        return self._buffer_bytes - self._flying - len(self.target.arrived)

    def send(self, data: bytes) -> None:
        """Sends bytes, in pieces; b"" marks the end of the stream."""
        network, random = self.network, self.source.random
        weather, now = network.weather, network.clock.now
        self._flying += len(data)
        network.sent_bytes += len(data)
        network.tap(self.source, self.target, data)
        whole = len(data) < 2 or random.random() >= weather.cut
        for piece in (data,) if whole else _pieces(data, random):
            due = now + weather.latency_s * (0.5 + random.random()) + len(piece) / weather.bytes_per_s
            if due > self._last_s:
                self._last_s = due
            self._under_way.append((self._last_s, piece))
        if not self._moving:
            self._next()

    def resume(self) -> None:
        """Sends lost bytes again."""
        random = self.source.random
        self._last_s = max(self._last_s, self.network.clock.now + RETRY_S * random.uniform(0.1, 1))
        self.network.clock.at(self._last_s, self._deliver)

    def _next(self) -> None:
        if self._under_way and not self._moving:
            self._moving = True
            self.network.clock.at(self._under_way[0][0], self._deliver)

    def _deliver(self) -> None:
        network, under_way = self.network, self._under_way
        if network.troubled and not network.reaches(self.source.process.host, self.target.process.host):
            network.hold(self)
            return
        self._moving = False
        if under_way and under_way[0][0] <= network.clock.now:  # else dropped, or made late
            data = under_way.popleft()[1]
            self._flying -= len(data)
            self.target.receive(data)
        self._next()

    def delay(self, late_s: float) -> float:
        """Delays the bytes under way; returns when all of them have arrived."""
        self._under_way = deque((due + late_s, data) for due, data in self._under_way)
        self._last_s = max(self._last_s, self.network.clock.now) + late_s
        return self._last_s

    def drop(self) -> None:
        """Drops the bytes under way."""
        self._under_way.clear()
        self._flying = 0


class Socket:
    """One end of a connection, non-blocking. `notify` is called whenever it may be readable, writable or broken."""

    def __init__(self, network: Network, process: Process, number: int) -> None:
        self.process = process
        self.number = number
        self.random = network.clock.chance(f"socket {number}")
        self.peer: Socket | None = None
        self.arrived = bytearray()
        self.notify: Callable[[], object] = lambda: None
        self.connected = False
        self.closed = False
        self._network = network
        self._clock = network.clock
        self._out: _Pipe | None = None
        self._ended = False  # the other end sends no more
        self._error: OSError | None = None
        self._starved = False  # a writer waits for room
        process.on_death[self.close] = None

    def __repr__(self) -> str:
        return f"{self.process}#{self.number}"

    def fileno(self) -> int:
        return self.number

    def join(self, other: Socket) -> None:
        """Connects two sockets, the ends of one connection."""
        self.peer, other.peer = other, self
        self._out, other._out = _Pipe(self._network, self, other), _Pipe(self._network, other, self)
        other.connected = True

    # --- what the network does --------------------------------------------------------------------------------------

    def opened(self) -> None:
        if not self.closed:
            self.connected = True
            self.notify()

    def refused(self) -> None:
        self._fail(ConnectionRefusedError(111, "Connection refused"))

    def broken(self) -> None:
        self._fail(ConnectionResetError(104, "Connection reset by peer"))

    def _fail(self, error: OSError) -> None:
        if self.closed or self._error is not None:
            return
        self._network.clock.note(f"{self}: {error.strerror}")
        self._error = error  # what has arrived can still be read
        if self._out is not None:
            self._out.drop()
        self.notify()

    def torn(self, late_s: float) -> None:
        """Breaks this end; the other end learns of it late, after all bytes that were sent."""
        if self.closed or self._error is not None or self._out is None or self.peer is None:
            return
        self._network.clock.at(self._out.delay(late_s), self.peer.broken)
        self._error = ConnectionResetError(104, "Connection reset by peer")
        self.notify()

    def vanish(self) -> None:
        """The host has lost its power: of the bytes sent nothing arrives, and the end only when the host is back."""
        if self._out is not None:
            self._out.drop()

    def receive(self, data: bytes) -> None:
        if self.closed:
            if self.peer is not None and data:
                self._network.clock.after(self._network.delay(self.random), self.peer.broken)
        elif self._error is None:
            if self._clock.trace is not None:
                self._clock.note(f"{self.peer} → {self}: {f'{len(data)} bytes' if data else 'the end'}")
            if data:
                self.arrived += data
            else:
                self._ended = True
            self.notify()

    def freed(self) -> None:
        """The other end has read: there may be room to write."""
        if self._starved and self.writable:
            self._starved = False
            self.notify()

    # --- what its process does --------------------------------------------------------------------------------------

    @property
    def readable(self) -> bool:
        if self._error is not None:
            return True
        return (bool(self.arrived) or self._ended) and not self.process.deaf

    @property
    def writable(self) -> bool:
        if self._error is not None:
            return True
        return self.connected and self._out is not None and self._out.room > 0

    @property
    def broken_off(self) -> bool:
        """Whether the connection is broken: a poller reports that whatever it was asked for."""
        return self._error is not None

    def check(self) -> None:
        """Raises the error that has broken the connection, if one has."""
        if self._error is not None:
            raise self._error

    def sendmsg(self, buffers: Sequence[memoryview], /) -> int:
        """Sends as much as there is room for, and sometimes less. Raises BlockingIOError if there is no room."""
        self._check_open()
        out = self._out
        if not self.connected or out is None or (most := out.room) <= 0:
            self._starved = True
            raise BlockingIOError(11, "Resource temporarily unavailable")
        data = b"".join(buffers)
        total = len(data)
        if total > 1 and self.random.random() < self._network.weather.short:
            most = min(most, self.random.randint(1, total - 1))
        if total > most:
            data = data[:most]
        if data:
            out.send(data)
        self._starved = len(data) < total
        if self._starved and out.room > 0:  # it took less for no reason: it is writable at once
            self._network.clock.after(0.0, self.freed)
        return len(data)

    def recv_into(self, buffer: memoryview, /) -> int:
        """Reads what has arrived, sometimes less; returns 0 at the end of the stream. Raises BlockingIOError if nothing
        has arrived."""
        arrived, peer = self.arrived, self.peer
        n = min(len(arrived), len(buffer))
        if not n or self.closed:
            self._check_open()
            if self._ended:
                return 0
            raise BlockingIOError(11, "Resource temporarily unavailable")
        if n > 1 and self.random.random() < self._network.weather.short:
            n = self.random.randint(1, n)
        if n == len(arrived):
            buffer[:n] = arrived
            arrived.clear()
        else:
            buffer[:n] = arrived[:n]
            del arrived[:n]
        if peer is not None and peer._starved:
            peer.freed()
        return n

    def close(self) -> None:
        """Closes this end. The other end learns of it after the bytes that were sent, or at once if bytes that arrived
        here were not read."""
        if self.closed:
            return
        self.closed = True
        self._network.sockets.pop(self, None)
        self.process.on_death.pop(self.close, None)
        if self._out is None or self.peer is None or self._error is not None:
            return
        if self.arrived:  # as TCP does when something is thrown away unread
            self._out.drop()
            self._network.clock.after(self._network.delay(self.random), self.peer.broken)
        else:
            self._out.send(b"")

    def _check_open(self) -> None:
        if self.closed:
            raise OSError(9, "Bad file descriptor")
        if self._error is not None:
            raise self._error


def _pieces(data: bytes, random: Random) -> Iterator[bytes]:
    most = len(data) - 1
    cuts = {
        random.randint(1, most if random.random() < 0.5 else min(most, HEAD_BYTES))
        for _ in range(random.randint(1, MOST_CUTS))
    }
    at = 0
    for cut in sorted(cuts):
        yield data[at:cut]
        at = cut
    yield data[at:]
