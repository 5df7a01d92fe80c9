"""The leader's lines to its servers: kept open, listened to, and used to tell views. The only I/O of failure detection.

One task per incarnation of a server calls it, again at once when the connection ends; what happens goes to the pure
`Detector`. A line that stays silent is given up after a while and called anew: packets held back by a network that was
cut come seconds after it is whole again, a new connection at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

from coordinator import fields
from coordinator.health import TICK_S, Detector, Dial, Gone, Line, Load, Report
from coordinator.planner import Health
from coordinator.view import ServerInfo, View
from replication.chain import Member

log = fields.logger(__name__)

_SECOND_TRY_S = 0.003  # between the two refusals that mean death
_RETRY_S = 0.25  # between attempts to reach one that is dead
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.1  # doubled between attempts that end at once and tell nothing
_LASTING_S = 0.02  # an attempt that lasted this long is made again at once
_REDIAL_S = 2.0  # a line or an attempt from which nothing comes for so long is made anew
_VIEW_LAG_S = 0.1  # a report this soon after a view may have been sent before the view came


@dataclass
class _Open:
    """A line in use. told: when the last view was sent; repeated: the last epoch that was sent twice."""

    line: Line
    told: float = 0.0
    repeated: int = 0


class Lines:
    """Lines to the servers that `follow` names, while `run` runs.

    on_change  called when the planner should look again; its argument says that a member is newly gone
    """

    def __init__(self, dial: Dial, on_change: Callable[[bool], None]) -> None:
        self._dial = dial
        self._on_change = on_change
        self._detector = Detector()
        self._calls: dict[Member, tuple[ServerInfo, float, asyncio.Task[None]]] = {}  # when each task began
        self._ending: set[asyncio.Task[None]] = set()
        self._open: dict[Member, _Open] = {}
        self._view: View | None = None
        self._cluster = ""

    async def run(self) -> None:
        """Judges silence until cancelled; then closes all lines."""
        loop, ill = asyncio.get_running_loop(), False
        try:
            while True:
                before = self._detector.gone
                if self._detector.tick(loop.time()):
                    self._tell(before)
                if self._detector.ill and not ill:
                    log.warning("no server is heard any more: the trouble is taken to be here, and nobody for dead")
                ill = self._detector.ill
                self._call_silent_ones_anew(loop.time())
                await asyncio.sleep(TICK_S)
        finally:
            for member in list(self._calls):
                self._hang_up(member)
            await asyncio.gather(*self._ending, return_exceptions=True)

    def follow(self, cluster: str, listed: Iterable[ServerInfo], registered: Iterable[ServerInfo]) -> None:
        """These are the servers of the view and those whose keys are in the store: keeps a line to each. `cluster`: the
        identity of theirs."""
        self._cluster = cluster
        servers = {server.member: server for server in listed}
        keys = {server.member: server for server in registered}
        servers.update(keys)
        self._detector.watch({member: member in keys for member in servers}, _now())
        for member in sorted(self._calls.keys() - servers.keys()):
            self._hang_up(member)
        for member in sorted(servers.keys() - self._calls.keys()):
            self._call(servers[member])

    def announce(self, view: View) -> None:
        """Tells a newer view to every server that is connected, and later to each that connects."""
        if self._view is not None and view.epoch <= self._view.epoch:
            return
        self._view = view
        for opened in self._open.values():
            self._send(opened, view)

    def health(self) -> Health:
        """What the planner needs to know of the servers, in the view announced last."""
        return self._detector.health(self._view)

    def gone(self) -> dict[Member, Gone]:
        """Who is gone, why, and since when, in the time of the event loop."""
        return self._detector.gone

    def loads(self) -> dict[Member, Load]:
        """What servers said last of their bytes and requests."""
        return self._detector.loads

    # -- one line ---------------------------------------------------------------------------------------------------

    def _call(self, server: ServerInfo) -> None:
        task = asyncio.create_task(self._keep(server), name=f"line to {server.member}")
        self._calls[server.member] = (server, _now(), task)

    def _hang_up(self, member: Member) -> None:
        _, _, task = self._calls.pop(member)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        task.cancel()

    def _call_silent_ones_anew(self, now: float) -> None:
        for member, (server, since, _) in list(self._calls.items()):
            if now - max(since, self._detector.heard_at(member)) > _REDIAL_S:
                self._hang_up(member)
                self._call(server)

    async def _keep(self, server: ServerInfo) -> None:
        member, refusals, failures = server.member, 0, 0
        pause = 0.0
        while True:
            began = _now()
            try:
                async with self._dial(server, self._cluster) as line:
                    refusals = 0
                    await self._listen(member, line)
            except PermissionError:
                self._refused(member, "another answers in its place")
                pause = _RETRY_S
            except ConnectionRefusedError:
                refusals += 1
                pause = _SECOND_TRY_S if refusals == 1 else _RETRY_S
                if refusals > 1:
                    self._refused(member, "connection refused")
            except (TimeoutError, OSError) as error:
                log.debug("a line ended", member=member, error=error)
                failures = 0 if _now() - began > _LASTING_S else failures + 1
                pause = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(failures, 10)) if failures else 0.0
            except Exception:  # a server that talks nonsense is as good as silent; the others are still heard
                log.exception("a line failed", member=member)
                pause = _RETRY_S
            await asyncio.sleep(pause)

    async def _listen(self, member: Member, line: Line) -> None:
        opened = self._open[member] = _Open(line)
        self._detector.connected(member, _now())
        if self._view is not None:
            self._send(opened, self._view)
        try:
            async for report in line.reports():
                self._change(self._detector.heard(member, report, _now()))
                self._repeat_view(opened, report)
            raise ConnectionResetError("its reports ended")
        finally:
            if self._open.get(member) is opened:
                del self._open[member]
                self._detector.lost(member, _now())

    def _repeat_view(self, opened: _Open, report: Report) -> None:
        """It may have missed a view, by whatever accident: told once more."""
        view = self._view
        if view is None or report.epoch >= view.epoch or opened.repeated >= view.epoch:
            return
        if _now() - opened.told > _VIEW_LAG_S:
            opened.repeated = view.epoch
            self._send(opened, view)

    def _send(self, opened: _Open, view: View) -> None:
        opened.told = _now()
        with suppress(OSError):  # the reports end too, and that is where it is noticed
            opened.line.send_view(view)

    def _refused(self, member: Member, why: str) -> None:
        before = self._detector.gone
        if self._detector.refused(member, why, _now()):
            self._tell(before)

    def _change(self, changed: bool) -> None:
        if changed:
            self._on_change(False)

    def _tell(self, before: dict[Member, Gone]) -> None:
        gone = self._detector.gone
        new = gone.keys() - before.keys()
        self._on_change(bool(new))
        for member in sorted(new):
            log.warning("taken to be gone", member=member, reason=gone[member].why)


def _now() -> float:
    return asyncio.get_running_loop().time()
