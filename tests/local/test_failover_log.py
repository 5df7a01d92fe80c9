from __future__ import annotations

from elasticps.local.failover_log import Failover, adoption, failover

LEADER = """\
ts=2026-11-21T07:27:25.8Z level=warning process=c0 logger=coordinator.leader event=failover epoch=11 gone=s0#1 \
detected=1795246045.101 written=1795246045.113 reason="s0 lost"
ts=2026-11-21T07:27:26.8Z level=warning process=c0 logger=coordinator.leader event=failover epoch=12 gone=s1#3,s2#4 \
detected=1795246046.101 written=1795246046.113 reason="s1, s2 lost: 9 ranges promoted"
"""
SERVER = """\
ts=2026-11-21T07:27:25.105Z level=info process=s0 epoch=11 logger=elasticps.server event=adopted headed=3 reason=x
ts=2026-11-21T07:27:26.125Z level=info process=s0 epoch=13 logger=elasticps.server event=adopted headed=3 reason=x
"""


def test_a_failover_is_found_by_the_lost_incarnation() -> None:
    assert failover(LEADER, "s2#4") == Failover(12, 1795246046.101, 1795246046.113)
    assert failover(LEADER, "s2#3") is None


def test_a_skipped_view_counts_as_adopted_with_the_next() -> None:
    assert adoption(SERVER, 12) == 1795246046.125
    assert adoption(SERVER, 14) is None
