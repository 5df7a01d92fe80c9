"""A server that was suspended delays pushes until it has read newer views."""

from __future__ import annotations

from elasticps.server.fast.path import FastPath
from elasticps.server.roles.executor import Executor
from elasticps.server.roles.stall_detector import DOUBT_S, STOPPED_S, StallDetector
from replication.chain import Chains, Member
from tests.replication.views import form

RANGES = 4
ME = Member("s0", 1)


def test_pushes_wait_after_a_stop_until_there_was_time_to_read_a_view() -> None:
    now = [10.0]
    executor = Executor(ME, RANGES, 1 << 20, FastPath(RANGES, 1 << 20))
    view: Chains = form([ME], RANGES, 1)
    executor.perform(executor.replica.adopt, view)
    detector = StallDetector(lambda: now[0], executor)

    def doubtful() -> bool:
        return executor.replica.careful

    now[0] += 10 * STOPPED_S
    detector.look()
    assert not doubtful(), "nobody has begun to beat"
    detector.beat()
    now[0] += STOPPED_S / 2
    detector.look()
    assert not doubtful()
    now[0] += STOPPED_S
    detector.look()
    assert doubtful()
    detector.beat()
    assert doubtful()
    now[0] += 2 * DOUBT_S
    detector.beat()
    assert not doubtful()
