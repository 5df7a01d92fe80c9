"""The leading coordinator's loop: looks at the cluster, has the policy decide, and asks for one change at a time."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Protocol

from coordinator.core import fields
from coordinator.core.autoscale import AutoscalePolicy, Autoscaler
from coordinator.core.errors import CoordinationError
from coordinator.core.planner import Members
from coordinator.core.store import Store
from coordinator.core.view import ServerInfo
from elasticps.admin import fetch_status
from elasticps.autoscale.kubernetes import Replicas
from elasticps.errors import Error
from elasticps.system.coordination import read_state

if TYPE_CHECKING:
    from elasticps.security.credentials import Credentials

log = fields.logger(__name__)

LOOK_S = 10.0
_STATUS_S = 5.0  # for a server to say what it uses


class Scale(Protocol):
    """How many servers a platform runs. Calls block; they raise Error if the platform does not answer."""

    def read(self) -> Replicas:
        """How many it was asked for."""

    def write(self, count: int, seen: Replicas) -> bool:
        """Asks for so many. False if that number has changed since it was `seen`."""


class AutoscaleLoop:
    """Scales one cluster during a leader's term. dry_run: says what it would do, and does nothing; look_s: between two
    looks."""

    def __init__(
        self, store: Store, credentials: Credentials | None, policy: AutoscalePolicy, scale: Scale, *, dry_run: bool,
        look_s: float = LOOK_S,
    ) -> None:  # fmt: skip
        self._store = store
        self._credentials = credentials
        self._policy = policy
        self._scale = scale
        self._dry_run = dry_run
        self._look_s = look_s
        self._scaler: Autoscaler | None = None  # from the first view on: it has to know how many replicas there are
        self._logged = ""

    async def run(self) -> None:
        """Looks, decides and acts until cancelled."""
        while True:
            try:
                await self._look()
                self._logged = ""
            except (Error, CoordinationError) as error:
                if self._logged != str(error):
                    self._logged = str(error)
                    log.warning("cannot scale, trying on", error=error)
            await asyncio.sleep(self._look_s)

    async def _look(self) -> None:
        state = await read_state(self._store)
        if state.view is None or state.config is None:
            return
        if self._scaler is None:
            try:
                self._scaler = Autoscaler(self._policy, state.config.replicas)
            except ValueError as error:
                raise Error(f"--autoscale-servers: {error}") from None
        seen = await asyncio.to_thread(self._scale.read)
        here = {server.member for server in state.registered}
        members = Members(state.cluster, state.registered, state.draining & here, leaving=state.leaving & here)
        statuses = await self._statuses(state.registered)
        decision = self._scaler.step(seen.count, state.view, members, statuses, asyncio.get_running_loop().time())
        # One less at a time: those that drain at once could share ranges, and then each waits for a third.
        to = max(decision.servers, seen.count - 1)
        if to == seen.count:
            log.debug("keeps the number of servers", servers=to, reason=decision.reason)
        elif self._dry_run:
            log.info("would scale; --autoscale on does", servers=seen.count, to=to, reason=decision.reason)
        elif await asyncio.to_thread(self._scale.write, to, seen):
            log.info("scales", what=str(self._scale), servers=seen.count, to=to, reason=decision.reason)
        else:
            log.info("somebody else has scaled, looks again", what=str(self._scale))

    async def _statuses(self, servers: tuple[ServerInfo, ...]) -> dict[str, dict[str, Any]]:
        requests = (fetch_status(server.admin, _STATUS_S, self._credentials) for server in servers)
        answers = await asyncio.gather(*requests, return_exceptions=True)
        return {
            server.name: answer
            for server, answer in zip(servers, answers, strict=True)
            if not isinstance(answer, BaseException)
        }
