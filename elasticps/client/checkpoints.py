"""A checkpoint that a worker asks for."""

from __future__ import annotations

from elasticps.client.registry import Registry
from elasticps.errors import Timeout

_POLL_S, _POLL_MOST_S = 0.05, 0.5


class CheckpointRequest:
    """One that was asked for: the coordinator has it made, while training goes on."""

    def __init__(self, registry: Registry, full: bool, timeout_s: float) -> None:
        self._registry = registry
        self._timeout_s = timeout_s
        self._key = registry.want_checkpoint(full, timeout_s)
        self._cut = 0

    def done(self) -> bool:
        """Whether it is made. Raises `CheckpointError` if it cannot be."""
        if not self._cut:
            self._cut = self._registry.checkpoint_made(self._key, self._timeout_s)
        return self._cut > 0

    def result(self, timeout: float | None = None) -> int:
        """Waits until it is made, and returns its number. Raises `CheckpointError` that says why it could not be made,
        `Timeout` when `timeout` seconds (default: the client's) were not enough; it may still be made then.

        Under `BSP` not between two steps of which others have pushed the second: they wait for this worker's share.
        """
        runtime = self._registry.runtime
        timeout_s = self._timeout_s if timeout is None else timeout
        until_s, pause_s = runtime.monotonic() + timeout_s, _POLL_S
        while not self.done():
            if runtime.monotonic() >= until_s:
                raise Timeout(f"a checkpoint took longer than {timeout_s:.1f} s")
            runtime.sleep(pause_s)
            pause_s = min(2 * pause_s, _POLL_MOST_S)
        return self._cut
