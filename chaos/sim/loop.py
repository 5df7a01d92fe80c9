"""An asyncio event loop on virtual time, one per process: its handles run when its process has a turn."""

from __future__ import annotations

import asyncio
import itertools
from asyncio.events import _get_running_loop, _set_running_loop
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context
from heapq import heappop, heappush
from typing import Any, TypeVar, TypeVarTuple, Unpack

from chaos.sim.clock import Process
from chaos.sim.network import Listener, Network
from chaos.sim.transport import Transport

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
Failed = Callable[[Process, BaseException | None, str], None]


class Loop(asyncio.AbstractEventLoop):
    """As much of an event loop as servers, leaders and sessions use. `failed` gets exceptions that nobody caught."""

    def __init__(self, process: Process, network: Network, failed: Failed) -> None:
        self.process = process
        self._network = network
        self._failed = failed
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._serial = itertools.count()
        self.tasks: dict[asyncio.Task[Any], None] = {}
        self._unflushed: dict[Transport, None] = {}
        self.quiet = False  # the end: tasks that are cancelled now may fail

    def turn(self) -> float | None:
        """Runs the handles that are ready; returns when the next one will be."""
        now, timers, ready = self.process.clock.now, self._timers, self._ready
        while timers and timers[0][0] <= now:
            timer = heappop(timers)[2]
            if not timer._cancelled:
                ready.append(timer)
        if ready or self._unflushed:
            before = _get_running_loop()
            _set_running_loop(self)
            try:
                for _ in range(len(ready)):
                    handle = ready.popleft()
                    if not handle._cancelled:
                        handle._run()
                if self._unflushed:
                    unflushed, self._unflushed = self._unflushed, {}
                    for transport in unflushed:
                        transport.send_queued()
            finally:
                _set_running_loop(before)
            if ready:
                return now
        while timers and timers[0][2]._cancelled:
            heappop(timers)
        return timers[0][0] if timers else None

    def flush_later(self, transport: Transport) -> None:
        """Sends what a transport has written at the end of the turn."""
        self._unflushed[transport] = None
        self.process.wake()

    # --- asyncio's own ----------------------------------------------------------------------------------------------

    def time(self) -> float:
        return self.process.clock.now

    def call_soon(
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self.run_soon(handle)
        return handle

    def run_soon(self, handle: asyncio.Handle) -> None:
        """Runs a handle in the next turn: it may be used again when it has run."""
        self._ready.append(handle)
        self.process.wake()

    def call_soon_threadsafe(
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def call_later(
        self, delay: float, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        heappush(self._timers, (when, next(self._serial), handle))
        self.process.wake(when)
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass  # it is left out when its time comes

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self,
        coro: Generator[Any, None, T] | Coroutine[Any, Any, T],
        *,
        name: object = None,
        context: Context | None = None,
        **kwargs: Any,
    ) -> asyncio.Task[T]:
        task = asyncio.Task(coro, loop=self, name=name, context=context)  # type: ignore[arg-type]
        self.tasks[task] = None
        task.add_done_callback(self.tasks.pop)
        return task

    def run_in_executor(self, executor: object, func: Callable[[Unpack[Ts]], T], *args: *Ts) -> asyncio.Future[T]:
        """Runs `func` at once, in the caller: work of threads takes no virtual time."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # any: whoever waits for the future gets it, as with a real executor
            future.set_exception(error)
        return future

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if self.process.alive and not self.quiet:
            self._failed(self.process, context.get("exception"), str(context.get("message")))

    # --- connections ------------------------------------------------------------------------------------------------

    async def create_connection(  # type: ignore[override]
        self, protocol_factory: Callable[[], asyncio.BaseProtocol], host: str, port: int, **_: Any
    ) -> tuple[Transport, asyncio.BaseProtocol]:
        sock = self._network.connect(self.process, host, port)
        opened: asyncio.Future[None] = self.create_future()
        sock.notify = lambda: self.call_soon(_opened, opened)
        try:
            await opened
            sock.check()
        except BaseException:
            sock.close()
            raise
        protocol = protocol_factory()
        return Transport(self, sock, protocol), protocol

    async def create_server(  # type: ignore[override]
        self, protocol_factory: Callable[[], asyncio.BaseProtocol], *, sock: Listener, **_: Any
    ) -> Listener:
        def accept() -> None:
            while sock.serving and (accepted := sock.accept()) is not None:
                Transport(self, accepted, protocol_factory())

        sock.serve(lambda: self.call_soon(accept))
        return sock


def _opened(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
