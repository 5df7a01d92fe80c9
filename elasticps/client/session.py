"""The session: which steps are outstanding, and what must be sent again after a connection was lost. Pure.

A step leaves as frames, each to one head and each judged there on its own by the worker's vector clock, so sending a
frame twice is always safe. Frames for one server are kept, sent and resent in one order: clock, then part.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from elasticps.wire.frames import Buffer

MAX_FAILURES = 64  # the first ones are kept


@dataclass(eq=False)
class PushFrame:
    """A PUSH on its way: immutable buffers, header first, until the server has answered."""

    clock: int
    server: str
    request: int
    buffers: Sequence[Buffer]


@dataclass(eq=False)
class StepState:
    """One step: `closed` once its last part was handed over, done when all its frames are answered."""

    clock: int
    closed: bool = False
    waiting: dict[int, PushFrame] = field(default_factory=dict)  # by request
    error: Exception | None = None
    parts: int = 0
    sent_parts: dict[str, int] = field(default_factory=dict)  # server -> first part that it has not been sent yet

    @property
    def done(self) -> bool:
        return self.closed and not self.waiting


class Session:
    """Outstanding steps in clock order. `base` is the worker's clock before its first step."""

    def __init__(self, window: int, base: int = 0) -> None:
        self.window = window
        self.clock = base  # steps begun
        self.committed = base  # every step up to here is done
        self.failures: dict[int, Exception] = {}  # by clock: steps that a server refused, until somebody was told
        self._steps: OrderedDict[int, StepState] = OrderedDict()
        self._by_request: dict[int, StepState] = {}

    @property
    def full(self) -> bool:
        """Whether the window has no room for another step."""
        return len(self._steps) >= self.window

    @property
    def outstanding(self) -> int:
        return len(self._steps)

    def start_at(self, base: int) -> None:
        """Sets the base clock; only before the first step."""
        assert not self._steps
        assert self.clock == self.committed
        self.clock = self.committed = base

    def begin(self) -> StepState:
        """The next step; the window must have room."""
        assert not self.full, "the window is full"
        self.clock += 1
        step = self._steps[self.clock] = StepState(self.clock)
        return step

    def add(self, step: StepState, frame: PushFrame) -> None:
        """A frame of the step is about to be sent."""
        step.waiting[frame.request] = frame
        self._by_request[frame.request] = step

    def close(self, step: StepState) -> None:
        """The step's last part has been added."""
        step.closed = True
        self._retire()

    def answered(self, request: int, error: Exception | None = None) -> bool:
        """A server answered a frame: applied, or refused for good. True if the request was one of ours."""
        step = self._by_request.pop(request, None)
        if step is None:
            return False
        del step.waiting[request]
        step.error = step.error or error
        self._retire()
        return True

    def unanswered(self, server: str) -> list[PushFrame]:
        """What a server must be sent again, in order, after its connection was lost."""
        return [f for step in self._steps.values() for f in step.waiting.values() if f.server == server]

    def fail(self, error: Exception) -> None:
        """Ends every outstanding step with an error: nobody will answer any more."""
        for step in self._steps.values():
            step.error = step.error or error
            step.closed = True
            step.waiting.clear()
        self._by_request.clear()
        self._retire()

    def waiting_for(self) -> dict[str, int]:
        """Server -> the oldest clock that it has not answered."""
        oldest: dict[str, int] = {}
        for step in self._steps.values():
            for frame in step.waiting.values():
                oldest.setdefault(frame.server, frame.clock)
        return oldest

    def _retire(self) -> None:
        while self._steps:
            clock, step = next(iter(self._steps.items()))
            if not step.done:
                return
            del self._steps[clock]
            self.committed = clock
            if step.error is not None:
                self.failures[clock] = step.error
                if len(self.failures) > MAX_FAILURES:
                    del self.failures[max(self.failures)]
