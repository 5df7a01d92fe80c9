"""When a job is over: a task that has done its work stays, with its servers, until all others have. Pure."""

from __future__ import annotations

from collections.abc import Mapping

RUNNING, DONE, LEFT = "running", "done", "left"
"""The states of a task: its command runs, has ended well, and the task has seen that all have. One without a state has
died, or has not begun yet."""


_SILENCE = 10.0  # times the patience
_SILENCE_MIN_S = 60.0


class JobEnd:
    """Decides when a job is over. patience_s: how long a task that is gone is waited for: it may be started again.

    Where etcd does not answer nobody knows whether others still work: they count as they did when it last answered, for
    ten times the patience, and a minute at least. `gave_up` says that it took longer.
    """

    def __init__(self, tasks: int, patience_s: float) -> None:
        self._tasks = tasks
        self._patience_s = patience_s
        self._absent_since: dict[int, float] = {}
        self._silent_since: float | None = None
        self._last: Mapping[int, str] = {}
        self.gave_up = False

    def waits_for(self, states: Mapping[int, str] | None, now: float) -> list[int]:
        """Returns the tasks whose work is not done. states: of the tasks that there are, None: no answer; now: in
        seconds."""
        if states is None:
            self._silent_since = now if self._silent_since is None else self._silent_since
            self.gave_up = now - self._silent_since >= max(_SILENCE * self._patience_s, _SILENCE_MIN_S)
            unfinished = [task for task in range(self._tasks) if self._last.get(task) not in (DONE, LEFT)]
            return [] if self.gave_up else unfinished
        if self._silent_since is not None:  # meanwhile nobody could say that he is there
            self._silent_since = None
            self._absent_since.clear()
        self._last = states
        for task in range(self._tasks):
            if task in states:
                self._absent_since.pop(task, None)
            else:
                self._absent_since.setdefault(task, now)
        return [task for task in range(self._tasks) if states.get(task) not in (DONE, LEFT)
                and now - self._absent_since.get(task, now) < self._patience_s]  # fmt: skip


def staying(states: Mapping[int, str]) -> list[int]:
    """Returns the tasks, beside the first, that still need etcd."""
    return sorted(task for task, state in states.items() if task and state != LEFT)
