"""Takes checkpoints on a schedule and when a worker asks for one, and cleans up after each: a leading coordinator does.

A request is a key in the store, and so is its answer, in the same place: the next leader goes on with it. Workers do
not choose the place: servers write only where the coordinator's operator wants them to.

Cleaning up means to merge a long chain, and to delete checkpoints that are not to be kept. Both wait for the storage,
so they run in processes of their own: a leading coordinator answers at once.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

from coordinator.core import fields
from coordinator.core.errors import CoordinationError
from coordinator.core.keys import CHECKPOINT_REQUESTS, NEWEST_CHECKPOINT
from coordinator.core.records import read
from coordinator.core.store import Entry, Store
from elasticps.checkpoint import catalog
from elasticps.checkpoint.create import newest
from elasticps.checkpoint.manifest import Manifest
from elasticps.checkpoint.storage import Storage
from elasticps.errors import CheckpointError, Error

log = fields.logger(__name__)

_LOOK_S = 0.5
_ANSWER_LIFE_S = 600.0  # an answer that nobody has taken
_AGAIN_S = 5.0  # after one that came to nothing

Take = Callable[[bool, bool], Awaitable[Manifest]]
"""Takes a checkpoint. Arguments: whether it must be full, and whether to take none where nothing has changed."""
Cleanup = Callable[[Manifest], Coroutine[Any, Any, None]]
"""Runs in the background after a checkpoint was made."""


class CheckpointSchedule:
    """every_s: between two checkpoints, 0 for requests alone; take: None if this coordinator has no place for them."""

    def __init__(self, store: Store, take: Take | None, every_s: float, cleanup: Cleanup | None = None) -> None:
        self._store = store
        self._take = take
        self._every_s = every_s
        self._cleanup = cleanup
        self._cleaning: asyncio.Task[None] | None = None
        self._answered: dict[str, float] = {}  # answers, and since when they are known
        self._newest = 0  # the last that this coordinator has taken

    async def run(self) -> None:
        """Runs as long as this coordinator leads; never returns."""
        try:
            await self._run()
        finally:
            if self._cleaning is not None:
                self._cleaning.cancel()
                await asyncio.gather(self._cleaning, return_exceptions=True)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        due_s = loop.time() + self._every_s
        with suppress(CoordinationError):  # or nobody would ever hear that not even the first one came about
            if self._every_s:
                await self._store.compare_and_set(NEWEST_CHECKPOINT, newest(0, time.time()), expect=0)
        while True:
            try:
                requests = await self._requests()
            except CoordinationError as error:
                log.info("cannot look for requests for checkpoints", error=error)
                requests = []
            due = self._take is not None and self._every_s > 0 and loop.time() >= due_s
            if requests or due:
                done = await self._serve(requests)
                due_s = loop.time() + (self._every_s if done else min(_AGAIN_S, self._every_s))
            await asyncio.sleep(_LOOK_S)

    async def _requests(self) -> list[tuple[Entry, dict[str, Any]]]:
        """Lists requests without an answer, and deletes old answers."""
        now, found = asyncio.get_running_loop().time(), []
        entries = (await self._store.list(CHECKPOINT_REQUESTS)).entries
        there = {entry.key for entry in entries}
        self._answered = {key: since for key, since in self._answered.items() if key in there}  # others were taken
        for entry in entries:
            try:
                request = read(entry.key, entry.value, full=bool)
            except ValueError:
                request = {"error": "not a request"}
            if "cut" not in request and "error" not in request:
                found.append((entry, request))
            elif now - self._answered.setdefault(entry.key, now) > _ANSWER_LIFE_S:
                await self._store.delete(entry.key, expect=entry.revision)
                del self._answered[entry.key]
        return found

    async def _serve(self, requests: list[tuple[Entry, dict[str, Any]]]) -> bool:
        """Takes one checkpoint for all requests and answers them; returns whether it succeeded."""
        answer: dict[str, Any]
        try:
            if self._take is None:
                raise CheckpointError("the coordinator has no --checkpoint-url, so it knows no place for checkpoints")
            manifest = await self._take(any(request["full"] for _, request in requests), not requests)
            answer = {"cut": manifest.cut}
            if manifest.cut == self._newest:
                log.debug("no checkpoint is due: nothing has changed", cut=manifest.cut)
                return True
            self._newest = manifest.cut
            log.info("checkpoint", cut=manifest.cut, since=manifest.since, rows=manifest.rows, nbytes=manifest.nbytes)
            if self._cleanup is not None and (self._cleaning is None or self._cleaning.done()):
                self._cleaning = asyncio.create_task(self._cleanup(manifest))
        except (Error, CoordinationError) as error:
            log.warning("no checkpoint", error=error)
            answer = {"error": str(error)}
        except Exception as error:  # whoever leads goes on leading
            log.exception("no checkpoint")
            answer = {"error": repr(error)}
        for entry, request in requests:
            try:
                value = json.dumps({"full": request["full"]} | answer).encode()  # of all else it may be too large
                await self._store.compare_and_set(entry.key, value, expect=entry.revision)
            except CoordinationError as error:
                log.warning("cannot answer who asked for a checkpoint", error=error)
        return "cut" in answer


log = fields.logger(__name__)

MERGE_AFTER = 8  # increments
_NICE = 10


class Cleaner:
    """Merges long chains and deletes old checkpoints. keep: as in `elasticps checkpoint delete --keep`, "" for all."""

    def __init__(self, url: str, keep: str) -> None:
        self._url = url
        self._keep = keep

    async def clean_up(self, made: Manifest) -> None:
        """Cleans up after a checkpoint was made. A failure is tried again after the next one."""
        try:
            chain = await asyncio.to_thread(catalog.chain, Storage(self._url), made.cut)
        except CheckpointError as error:
            log.warning("cannot look at checkpoints", error=error)
            return
        if len(chain) > MERGE_AFTER:
            await self._run("merge", self._url, str(made.cut))
        if self._keep:
            await self._run("delete", self._url, "--keep", self._keep)

    async def _run(self, what: str, *arguments: str) -> None:
        """Runs `elasticps checkpoint` in a process of its own."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "elasticps", "checkpoint", what, *arguments, stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        try:
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, process.pid, _NICE)
            output = (await process.communicate())[0].decode(errors="replace").strip()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        tell = log.warning if process.returncode else log.info
        tell("tidied checkpoints" if not process.returncode else "cannot tidy checkpoints", what=what, output=output)
