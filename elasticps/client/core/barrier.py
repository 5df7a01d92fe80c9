"""What a worker asks, and in which order, to take part in synchronous rounds (BSP;
`elasticps.server.core.barrier_state` has the whole story). Pure; `fan_out` says what a script is.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from elasticps.client.core.fan_out import Request, Script, of_group, of_heads
from elasticps.errors import LeftOut
from elasticps.wire.frames import HEADER_BYTES, Kind, json_frame, unpack_header
from elasticps.wire.headers import BarrierArriveHeader, BarrierJoinHeader, BarrierLeaveHeader

EXTRA_S = 1.0  # the server, which knows whom it waits for, gives up first


def entering(app: str, worker: int, predecessor: int, timeout_s: float) -> Script[tuple[int, int]]:
    """Becomes a member; returns the last decided round, above which this worker starts, and the last one that its
    predecessor (0 for none) was in."""
    header = BarrierJoinHeader(worker, predecessor).header()
    (answer,) = yield Request(of_group(app, header), timeout_s, f"entering the rounds of {app!r}")
    decision = json.loads(answer.body)
    # whoever was in the last round may have died before closing it; what is closed already stays as it is
    yield from closing(app, decision["round"], decision["workers"], timeout_s)
    return decision["base"], decision["last"]


def leaving(app: str, worker: int, timeout_s: float) -> Script[None]:
    """Is in no further round, until it enters again."""
    yield Request(of_group(app, BarrierLeaveHeader(worker).header()), timeout_s, f"leaving the rounds of {app!r}")


def settling(app: str, worker: int, clock: int, timeout_s: float) -> Script[None]:
    """Closes the round of a step that is committed everywhere. `LeftOut` if it was closed without this worker."""
    header = BarrierArriveHeader(worker, clock, int(timeout_s * 1000)).header()
    (answer,) = yield Request(of_group(app, header), timeout_s + EXTRA_S, f"round {clock} of {app!r}")
    decision = json.loads(answer.body)
    if decision["round"] != clock:
        raise LeftOut(f"round {clock} of {app!r} was closed without this worker")
    yield from closing(app, clock, decision["workers"], timeout_s)


def closing(app: str, clock: int, workers: Sequence[int], timeout_s: float) -> Script[None]:
    """Has every head close a round that is decided."""
    if clock:
        frame = json_frame(Kind.BARRIER_CLOSE, {"round": clock, "workers": list(workers)})
        header, body = unpack_header(frame), frame[HEADER_BYTES:]
        yield Request(of_heads(header, body), timeout_s, f"closing round {clock} of {app!r}")
