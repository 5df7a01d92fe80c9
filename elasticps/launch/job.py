"""A task's place in the roll of its job, which is kept in the cluster's etcd."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

from coordinator.connect import open_store
from coordinator.core.errors import CoordinationError, LeaseLost, StoreUnavailable
from coordinator.core.store import Store
from coordinator.membership import farewell
from elasticps.launch.core.job_end import DONE, LEFT, RUNNING, JobEnd, staying
from elasticps.launch.core.task import Task
from elasticps.system import background

_KEYS = "launch/tasks/"  # by number: the task's state
_DIGITS = 9  # of a number at most
_LEASE_S = 10.0
_RENEW_S = 2.0
_CALL_S = 2.0
LEAVE_S = 15.0  # how long the first task waits for others that have seen the end of the job


class JobMembership:
    """Tells the other tasks of a job how this one is, and asks how they are. Calls block. patience_s: as for
    `JobEnd`."""

    def __init__(self, url: str, task: Task, patience_s: float) -> None:
        self._url = url
        self._task = task
        self._end = JobEnd(task.count, patience_s)
        self._key = f"{_KEYS}{task.number}"
        self._store: Store | None = None
        self._lease = 0
        self._renewal: asyncio.Task[None] | None = None
        self._unsaid = ""  # a state that etcd has not taken yet
        self._last: dict[int, str] = {}  # the states of tasks when etcd last answered

    def begin(self, timeout_s: float) -> None:
        """Signs this task on. Raises StoreUnavailable if etcd does not answer in time."""
        background.run(self._begin(timeout_s))

    async def _begin(self, timeout_s: float) -> None:
        self._store = await open_store(self._url, timeout_s=timeout_s, call_timeout_s=_CALL_S)
        await self._sign_on(self._store)
        self._renewal = asyncio.create_task(self._renew(self._store))

    async def _sign_on(self, store: Store) -> None:
        self._lease = await store.grant(_LEASE_S)
        await store.put(self._key, RUNNING.encode(), lease=self._lease)

    async def _renew(self, store: Store) -> None:
        while True:
            await asyncio.sleep(_RENEW_S)
            with suppress(StoreUnavailable):  # etcd is away: the next renewal tells
                try:
                    await store.keep_alive(self._lease)
                except LeaseLost:
                    await self._sign_on(store)

    def done(self) -> None:
        """Says that this task's command has ended well; what it says lasts from now on."""
        background.run(self._say(DONE))

    def left(self) -> None:
        """Says that this task has seen the end of the job, and needs etcd no more."""
        background.run(self._say(LEFT))

    async def _say(self, state: str) -> None:
        await self._stop_renewing()
        assert self._store is not None
        self._unsaid = state
        with suppress(CoordinationError):  # etcd is away: said with the next question, unless nobody is left
            await self._say_again(self._store)

    async def _say_again(self, store: Store) -> None:
        if self._unsaid:
            await store.put(self._key, self._unsaid.encode())
            self._unsaid = ""

    async def _stop_renewing(self) -> None:
        if self._renewal is not None:
            self._renewal.cancel()
            await asyncio.gather(self._renewal, return_exceptions=True)
            self._renewal = None

    def waits_for(self) -> list[int]:
        """Returns the tasks whose work is not done, by the newest state that etcd has given; see `JobEnd`."""
        return self._end.waits_for(self._states(), time.monotonic())

    @property
    def gave_up(self) -> bool:
        """Whether etcd has been away for so long that `waits_for` returned none, though others may work still."""
        return self._end.gave_up

    def staying(self) -> list[int]:
        """Returns the other tasks that need etcd; where it does not answer, those that needed it when it last did."""
        self._states()
        return staying(self._last)

    def _states(self) -> dict[int, str] | None:
        """Returns the states of the tasks that there are; None where etcd does not answer."""

        async def states(store: Store) -> dict[int, str]:
            await self._say_again(store)
            entries = (await store.list(_KEYS)).entries
            found = {entry.key.removeprefix(_KEYS): entry.value.decode(errors="replace") for entry in entries}
            return {int(number): state for number, state in found.items()
                    if number.isascii() and number.isdecimal() and len(number) <= _DIGITS}  # fmt: skip

        assert self._store is not None
        try:
            self._last = background.run(states(self._store))
        except CoordinationError:
            return None
        return self._last

    def sign_off(self) -> None:
        """Ends this task's entry, unless it says that the task is done; others wait for a while then, as it may come
        back."""
        background.run(self._sign_off())

    async def _sign_off(self) -> None:
        await self._stop_renewing()
        if self._store is not None and self._lease:
            await farewell(self._store, self._lease)
            self._lease = 0

    def close(self) -> None:
        """Signs off, and frees the connection."""
        background.run(self._close())

    async def _close(self) -> None:
        await self._sign_off()
        if self._store is not None:
            await self._store.close()
            self._store = None
