"""Keeps a place of checkpoints in order: long chains are merged, and what is not to be kept goes. In processes of their
own, which have to wait for others: whoever leads a cluster answers at once."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import suppress

from coordinator.core import fields
from elasticps.checkpoint import catalog
from elasticps.checkpoint.manifest import Manifest
from elasticps.checkpoint.storage import Storage
from elasticps.errors import CheckpointError

log = fields.logger(__name__)

MERGE_AFTER = 8  # increments
_NICE = 10


class Tidier:
    """keep: as `elasticps checkpoint delete --keep` takes it, "" for all."""

    def __init__(self, url: str, keep: str) -> None:
        self._url = url
        self._keep = keep

    async def tidy(self, made: Manifest) -> None:
        """What is to be done when a checkpoint was made. What fails is tried after the next one."""
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
        """`elasticps checkpoint`."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "elasticps", "checkpoint", what, *arguments, stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        try:
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, process.pid, _NICE)
            said = (await process.communicate())[0].decode(errors="replace").strip()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        tell = log.warning if process.returncode else log.info
        tell("tidied checkpoints" if not process.returncode else "cannot tidy checkpoints", what=what, said=said)
