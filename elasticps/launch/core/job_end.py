"""When a job is over: a task that has done its work stays, with its servers, until all others have. Pure."""

from __future__ import annotations

from collections.abc import Mapping

RUNNING, DONE, LEFT = "running", "done", "left"
"""The states of a task: its command runs, has ended well, and the task has seen that all have. One without a state has
died, or has not begun yet."""


class JobEnd:
    """Decides when a job is over. patience_s: how long a task that is gone is waited for: it may be started again."""

    def __init__(self, tasks: int, patience_s: float) -> None:
        self._tasks = tasks
        self._patience_s = patience_s
        self._absent_since: dict[int, float] = {}

    def waits_for(self, states: Mapping[int, str], now: float) -> list[int]:
        """Returns the tasks whose work is not done. states: of the tasks that there are; now: in seconds."""
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
