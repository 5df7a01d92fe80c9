"""When a server reports its whole state to coordinators: with a thousand servers, ten reports of each in a second are
more than a coordinator reads. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

WHOLE_S = 1.0  # after so long a report has all that has changed in it
_OWN = frozenset(("leader", "seconds"))  # in every frame
_SLOW = frozenset(("bytes", "requests", "memory"))  # change with every push: they may be WHOLE_S old
_MEMORY_STEPS = 200  # parts of a server's memory: a planner looks at the memory that is left in coarser ones


class ReportPacing:
    """Compares the state of a server with the one that was reported last."""

    def __init__(self) -> None:
        self._last: Mapping[str, Any] = {}
        self._last_s = 0.0

    def forget(self) -> None:
        """Reports the whole state next time: some coordinator has another last report."""
        self._last = {}

    def says_more(self, state: Mapping[str, Any], now_s: float) -> bool:
        """Whether to report this state as a whole, at `now_s` seconds of any clock; if so, it has been. `state`: the
        document of a REPORT."""
        late = now_s - self._last_s >= WHOLE_S
        keys = (state.keys() | self._last.keys()) - _OWN
        changed = {key for key in keys if state.get(key) != self._last.get(key)}
        if not changed or (changed <= _SLOW and not late and not self._fills(state["memory"])):
            return False
        self._last, self._last_s = state, now_s
        return True

    def _fills(self, memory: list[int]) -> bool:
        """Whether the use of memory has changed by a step of its limit, or that limit has changed."""
        used, *limits = memory
        before, *limits_before = self._last["memory"]
        return limits != limits_before or (limits[-1] > 0 and _MEMORY_STEPS * abs(used - before) >= limits[-1])
