"""The threads of one client process, and everything else that its `Runtime` provides, on virtual time.

A thread is a greenlet: it runs until it waits, so which thread goes on is the seed's choice, and the same each time.
Taking or giving back a lock is a place where another may go first, as the system's scheduler would have it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from itertools import count
from types import TracebackType
from typing import Any, TypeVar

from greenlet import GreenletExit, getcurrent, greenlet

from chaos.sim.clock import Process
from chaos.sim.loop import Loop
from chaos.sim.network import Network, Socket
from elasticps.client import runtime
from elasticps.client.runtime import READABLE, WRITABLE, Runtime, SocketPoller

T = TypeVar("T")
EVENTS_PER_POLL = 64


class Threads(Runtime):
    """A client's `Runtime`. Its `Process` takes turns: first the control loop, then each ready thread.

    preempted: how often a thread that takes or gives back a lock is stopped just then.
    """

    def __init__(self, process: Process, loop: Loop, network: Network, preempted: float) -> None:
        self.process = process
        self.loop = loop
        self.sockets: dict[int, Socket] = {}
        self.over = False
        self._network = network
        self._preempted = preempted
        self._random = process.clock.chance(f"threads of {process}")
        self._draw = self._random.random
        self._views = process.clock.chance(f"questions of {process}")
        self._ready: list[Thread] = []
        self._threads: list[Thread] = []
        self._pollers: dict[VirtualPoller, None] = {}
        process.turn = self._turn

    # --- turns ------------------------------------------------------------------------------------------------------

    def _turn(self) -> float | None:
        again = self.loop.turn()
        ready, self._ready = self._ready, []
        if len(ready) > 1:
            self._random.shuffle(ready)
        for thread in ready:
            thread.go_on()
        return self.process.clock.now if self._ready else again

    def park(self, deadline_s: float | None = None) -> None:
        """Suspends the running thread until `unpark` or the deadline, whichever comes first."""
        thread = getcurrent()
        assert isinstance(thread, Thread)
        if self.over:
            raise GreenletExit
        thread.parked = True
        thread.serial += 1
        if deadline_s is not None:
            self.process.clock.at(deadline_s, self._timed_out, thread, thread.serial)
        assert thread.parent is not None
        thread.parent.switch()
        if self.over:
            raise GreenletExit

    def unpark(self, thread: Thread) -> None:
        """Lets a thread go on."""
        if thread.parked:
            thread.parked = False
            self._ready.append(thread)
            self.process.wake()

    def _timed_out(self, thread: Thread, serial: int) -> None:
        if thread.serial == serial:
            self.unpark(thread)

    def preempt(self) -> None:
        """Lets another thread go first, sometimes."""
        if not self.over and self._draw() < self._preempted:
            self.park(self.process.clock.now)

    def end(self) -> None:
        """Ends all threads where they are."""
        self.over = True
        for thread in self._threads:
            if not thread.dead:
                thread.throw()

    # --- Runtime ----------------------------------------------------------------------------------------------------

    def monotonic(self) -> float:
        return self.process.clock.now

    def chance(self) -> float:
        return self._views.random()

    def sleep(self, seconds: float) -> None:
        self.park(self.process.clock.now + seconds)

    def idle(self, wake: runtime.Flag, poller: SocketPoller, timeout_s: float) -> None:
        wake.wait(timeout_s)

    def connect(self, host: str, port: int, attempt: int) -> Socket:
        sock = self._network.connect(self.process, host, port)
        self.sockets[sock.number] = sock
        sock.notify = partial(self._notified, sock.number)
        return sock

    def _notified(self, fd: int) -> None:
        for poller in self._pollers:
            poller.notified(fd)

    def poller(self) -> SocketPoller:
        poller = VirtualPoller(self)
        self._pollers[poller] = None
        return poller

    def lock(self) -> Lock:
        return Lock(self, again=False)

    def rlock(self) -> Lock:
        return Lock(self, again=True)

    def condition(self) -> Condition:
        return Condition(self)

    def event(self) -> Event:
        return Event(self)

    def spawn(self, name: str, target: Callable[[], None]) -> Thread:
        thread = Thread(self, name, target)
        self._threads.append(thread)
        self.unpark(thread)
        return thread

    def join(self, thread: object, timeout_s: float) -> None:
        assert isinstance(thread, Thread)
        until = self.process.clock.now + timeout_s
        while not thread.dead and thread is not getcurrent() and self.process.clock.now < until:
            thread.joiners.append(_me())
            self.park(until)

    def interruptible(self) -> bool:
        return False

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
        me = _me()
        until = self.process.clock.now + timeout_s
        task = self.loop.create_task(coroutine)
        task.add_done_callback(lambda _: self.unpark(me))
        try:
            while not task.done():
                if self.process.clock.now >= until:
                    raise TimeoutError(f"no answer within {timeout_s} s")
                self.park(until)
        except BaseException:
            task.cancel()
            raise
        return task.result()


class Thread(greenlet):
    """One thread of a process."""

    def __init__(self, threads: Threads, name: str, target: Callable[[], None]) -> None:
        super().__init__(self._main)
        self.name = name
        self.parked = True
        self.serial = 0  # of its waits
        self.joiners: list[Thread] = []
        self._threads = threads
        self._target = target

    def __str__(self) -> str:
        return f"{self._threads.process} {self.name}"

    def go_on(self) -> None:
        """Runs until it waits again, or ends."""
        self.parent = getcurrent()
        self.switch()

    def _main(self) -> None:
        try:
            self._target()
        except Exception as error:  # any: the handler breaks the promise that no thread of a process fails
            self._threads.loop.call_exception_handler({"message": f"thread {self.name}", "exception": error})
        for joiner in self.joiners:
            self._threads.unpark(joiner)


class Lock:
    """A lock. again: its holder may take it again."""

    def __init__(self, threads: Threads, again: bool) -> None:
        self._threads = threads
        self._again = again
        self._holder: Thread | None = None
        self._depth = 0
        self._waiting: deque[Thread] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        threads = self._threads
        threads.preempt()
        me = _me()
        if self._again and self._holder is me:
            self._depth += 1
            return True
        if self._holder is not None:
            until = None if timeout < 0 else threads.monotonic() + timeout
            while self._holder is not None:
                if not blocking or (until is not None and threads.monotonic() >= until):
                    return False
                self._waiting.append(me)
                threads.park(until)
                if me in self._waiting:  # its time is over: the thread that waits behind it is woken
                    self._waiting.remove(me)
        self._holder, self._depth = me, 1
        threads.preempt()
        return True

    def release(self) -> None:
        if self._holder is None:
            raise RuntimeError("release of a lock that nobody holds")
        if self._again and self._holder is not _me():
            raise RuntimeError("release of a lock that another thread holds")
        self._depth -= 1
        if self._depth:
            return
        self._holder = None
        if self._waiting:
            self._threads.unpark(self._waiting.popleft())
        if isinstance(getcurrent(), Thread):
            self._threads.preempt()

    def locked(self) -> bool:
        return self._holder is not None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        self.release()


class Condition(Lock):
    """A condition variable with a lock of its own."""

    def __init__(self, threads: Threads) -> None:
        super().__init__(threads, again=True)
        self._sleepers: list[Thread] = []

    def wait(self, timeout: float | None = None) -> bool:
        me = _me()
        self._sleepers.append(me)
        self.release()
        woken = False
        try:
            if me in self._sleepers:  # not notified while it was stopped on its way
                self._threads.park(None if timeout is None else self._threads.monotonic() + timeout)
            woken = me not in self._sleepers
            if not woken:
                self._sleepers.remove(me)
        finally:
            self.acquire()
        return woken

    def notify_all(self) -> None:
        sleepers, self._sleepers = self._sleepers, []
        for thread in sleepers:
            self._threads.unpark(thread)


class Event:
    """A flag to wait for."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._set = False
        self._waiting: list[Thread] = []

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        waiting, self._waiting = self._waiting, []
        for thread in waiting:
            self._threads.unpark(thread)

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self._set:
            me = _me()
            self._waiting.append(me)
            self._threads.park(None if timeout is None else self._threads.monotonic() + timeout)
            if me in self._waiting:
                self._waiting.remove(me)
        return self._set


class VirtualPoller(SocketPoller):
    """epoll over virtual sockets, level-triggered. As there, a poll looks only at sockets that may be ready."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._interest: dict[int, int] = {}
        self._waiting: list[Thread] = []
        self._serial = count()
        self._order: dict[int, int] = {}  # by descriptor: events come in the order of registration
        self._maybe: set[int] = set()  # descriptors that were notified and have not been found quiet since
        self._writers: set[int] = set()  # descriptors that wait for room, of which sockets do not always notify

    def register(self, fd: int, events: int) -> None:
        if fd in self._interest:
            raise FileExistsError(17, "File exists")
        self._find(fd)
        self._order[fd] = next(self._serial)
        self._take(fd, events)

    def modify(self, fd: int, events: int) -> None:
        self._find(fd)
        if fd not in self._interest:
            raise FileNotFoundError(2, "No such file or directory")
        self._take(fd, events)

    def unregister(self, fd: int) -> None:
        self._find(fd)
        if fd not in self._interest:
            raise FileNotFoundError(2, "No such file or directory")
        self._forget(fd)

    def _take(self, fd: int, events: int) -> None:
        self._interest[fd] = events
        (self._writers.add if events & WRITABLE else self._writers.discard)(fd)
        self.notified(fd)

    def _forget(self, fd: int) -> None:
        del self._interest[fd], self._order[fd]
        self._maybe.discard(fd)
        self._writers.discard(fd)

    def _find(self, fd: int) -> Socket:
        sock = self._threads.sockets.get(fd)
        if sock is None or sock.closed:
            raise OSError(9, "Bad file descriptor")
        return sock

    def poll(self, timeout_s: float) -> list[tuple[int, int]]:
        until = self._threads.monotonic() + timeout_s
        while not (events := self._events()):
            if self._threads.monotonic() >= until:
                break
            self._waiting.append(_me())
            self._threads.park(until)
        return events

    def notified(self, fd: int) -> None:
        """Wakes the threads that poll: a socket may have changed."""
        if fd in self._interest:
            self._maybe.add(fd)
        waiting, self._waiting = self._waiting, []
        for thread in waiting:
            self._threads.unpark(thread)

    def _events(self) -> list[tuple[int, int]]:
        found = []
        for fd in sorted(self._maybe | self._writers, key=self._order.__getitem__):
            sock, interest = self._threads.sockets[fd], self._interest[fd]
            if sock.closed:  # the system forgets what is closed
                self._forget(fd)
                del self._threads.sockets[fd]
                continue
            state = (READABLE if sock.readable else 0) | (WRITABLE if sock.writable else 0)
            if state & interest or sock.broken_off:
                found.append((fd, state & interest or READABLE))
            elif not state & READABLE:
                self._maybe.discard(fd)
        return found[:EVENTS_PER_POLL]

    def close(self) -> None:
        self._threads._pollers.pop(self, None)


def _me() -> Thread:
    me = getcurrent()
    assert isinstance(me, Thread)
    return me
