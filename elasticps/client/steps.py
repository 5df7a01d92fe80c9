"""Steps as a training loop holds them: ticks of the worker's clock."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING

from elasticps.client.pushes import StepState
from elasticps.client.tables import Handle
from elasticps.errors import InputError

if TYPE_CHECKING:
    from elasticps.client.client import Client

Pushes = Mapping[Handle, object]
Rates = float | Mapping[Handle, float] | None


class Step:
    """One tick of the worker's clock on its way to the servers."""

    def __init__(self, client: Client, state: StepState) -> None:
        self._client = client
        self._state = state

    @property
    def clock(self) -> int:
        """The clock that this step ticked to."""
        return self._state.clock

    def done(self) -> bool:
        """Whether the step is committed."""
        return self._state.done

    def result(self, timeout: float | None = None) -> None:
        """Waits until the step is committed. Raises `ServerError` if a server refused a part of it, `Timeout` when
        `timeout` seconds (default: the client's) were not enough; the step goes on being sent then."""
        self._client.finish_step(self._state, timeout)


class OpenStep:
    """A step that is sent in parts, for instance layer by layer while the backward pass still runs.

    Each part is applied when it arrives, and the last one ticks the clock; so a row belongs into one part only.
    As a context manager it commits at the end, also after an exception: what was sent cannot be taken back.
    """

    def __init__(self, client: Client, rates: Rates) -> None:
        self.state: StepState | None = None  # None before the first part is outstanding
        self._client = client
        self._rates = rates

    def push(self, values: Pushes, *, copy: bool = True) -> None:
        """Sends gradients, as `Client.push` does, without ending the step."""
        if self._closed:
            assert self.state is not None
            raise InputError(f"step {self.state.clock} is committed already; begin another one")
        self._client.push_part(self, values, self._rates, last=False, copy=copy)

    def commit(self) -> Step:
        """Ends the step: one tick. Again: the same step."""
        if not self._closed:
            self._client.push_part(self, {}, self._rates, last=True, copy=True)
        assert self.state is not None
        return Step(self._client, self.state)

    @property
    def _closed(self) -> bool:
        """Whether its last part is outstanding, or more than that. Of an interrupted `commit`, the client knows."""
        return self.state is not None and self._client.is_closed(self.state)

    def __enter__(self) -> OpenStep:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.state is not None or error is None:
            self.commit()
