"""What a worker asks, and in which order, to take part in synchronous rounds (BSP;
`elasticps.server.core.barrier_state` has the whole story). Pure; `fan_out` says what a script is.
"""

from __future__ import annotations

import json

from elasticps.client.core.fan_out import Request, Script, of_group
from elasticps.errors import LeftOut
from elasticps.wire.headers import BarrierArriveHeader, BarrierJoinHeader, BarrierLeaveHeader

EXTRA_S = 1.0  # the server, which knows whom it waits for, gives up first


def entering(app: str, worker: int, predecessor: int, timeout_s: float) -> Script[tuple[int, int]]:
    """Becomes a member; returns the last decided round, above which this worker starts, and the last one that its
    predecessor (0 for none) was in. That round is closed everywhere."""
    header = BarrierJoinHeader(worker, predecessor).header()
    (answer,) = yield Request(of_group(app, header), timeout_s, f"entering the rounds of {app!r}")
    joined = json.loads(answer.body)
    return joined["base"], joined["last"]


def leaving(app: str, worker: int, timeout_s: float) -> Script[None]:
    """Is in no further round, until it enters again."""
    yield Request(of_group(app, BarrierLeaveHeader(worker).header()), timeout_s, f"leaving the rounds of {app!r}")


def settling(app: str, worker: int, clock: int, timeout_s: float) -> Script[None]:
    """Has the round of a step that is committed everywhere decided, and waits until every head has closed it. `LeftOut`
    if it was closed without this worker."""
    header = BarrierArriveHeader(worker, clock, int(timeout_s * 1000)).header()
    (answer,) = yield Request(of_group(app, header), timeout_s + EXTRA_S, f"round {clock} of {app!r}")
    if json.loads(answer.body)["round"] != clock:
        raise LeftOut(f"round {clock} of {app!r} was closed without this worker")
