"""Lost ranges are recovered only if no replica can come back, and served only once restored."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from coordinator.core.data_loss import find_loss
from coordinator.core.keys import known_key, merge_losses
from coordinator.core.planner import Health, Members, Plan, plan
from coordinator.core.view import ClusterConfig, ServerInfo, View
from replication.chain import Chains, CopyState, Member, unsafe_transition

RANGES = 8
CONFIG = ClusterConfig(ranges=RANGES, replicas=1)
A, B, AGAIN = (ServerInfo(name, number, f"127.0.0.1:{number}") for name, number in (("a", 1), ("b", 2), ("a", 3)))
ALL = frozenset(range(RANGES))
GONE = {A.member: "refused"}


def first() -> tuple[View, list[int]]:
    """A view of two servers, and the ranges of the first one."""
    decision = plan(None, Members("c", (A, B)), CONFIG)
    assert decision is not None
    assert decision.view is not None
    return decision.view, np.flatnonzero(decision.view.heads == decision.view.index("a")).tolist()


def step(
    view: View, *servers: ServerInfo, gone: Mapping[Member, str] = GONE, silent: bool = False, given_up: bool = False,
    recoverable: frozenset[int] = ALL, level: Mapping[int, int] | None = None,
) -> Plan | None:  # fmt: skip
    quiet = frozenset(gone) if silent else frozenset()
    members = Members("c", servers, recoverable=recoverable, given_up=frozenset({A.member} if given_up else ()))
    return plan(view, members, CONFIG, Health(gone=gone, silent=quiet, level=level or {}))


def changed(decision: Plan | None) -> View:
    assert decision is not None
    assert decision.view is not None
    return decision.view


def test_a_lost_range_is_served_once_a_server_has_restored_it() -> None:
    view, lost = first()
    emptied = changed(step(view, B))
    assert (emptied.heads[lost] == -1).all()
    assert (emptied.recovery_epoch[lost] == emptied.epoch).all()
    assert "begin anew: nobody is left" in emptied.reason
    assert find_loss(emptied, (B,)).lines == [f"{len(lost)} ranges (0, 2, 4-5) come back from a checkpoint"]
    filling = changed(step(emptied, B))
    assert (filling.copy_state[lost] == CopyState.RECOVERING).all()
    assert (filling.heads[lost] == -1).all()
    assert View.decode(filling.encode()) == filling
    back = changed(step(filling, B, level={lost[0]: int(filling.since[lost[0]])}))
    assert np.flatnonzero(back.heads < 0).tolist() == lost[1:]
    assert back.recovery_epoch[lost[0]] == emptied.epoch
    assert back.heads[lost[0]] == back.index("b")


@pytest.mark.parametrize("case", ["silent", "registered", "not asked for"])
def test_a_server_that_may_come_back_is_not_given_up(case: str) -> None:
    view, _ = first()
    servers = (A, B) if case == "registered" else (B,)
    decision = step(
        view, *servers, silent=case == "silent", recoverable=frozenset() if case == "not asked for" else ALL
    )
    assert decision is not None
    assert decision.view is None or (decision.view.heads >= 0).all()
    if case == "silent":
        assert (changed(step(view, B, silent=True, given_up=True)).heads < 0).any()


def test_the_only_server_comes_back_empty_and_recovers_every_range() -> None:
    decision = plan(None, Members("c", (A,)), CONFIG)
    assert decision is not None
    view = changed(step(changed(decision), AGAIN, gone={}))
    assert (view.heads < 0).all()
    assert [server.member for server in view.servers] == [AGAIN.member]
    view = changed(step(view, AGAIN, gone={}))
    level = {r: int(view.since[r]) for r in range(RANGES)}
    assert (changed(step(view, AGAIN, gone={}, level=level)).heads == 0).all()


def test_a_server_that_recovers_a_range_may_die_too() -> None:
    view, lost = first()
    c = ServerInfo("c", 4, "127.0.0.1:4")
    filling = changed(step(changed(step(view, B, c)), B, c))
    assert {filling.servers[i].name for i in filling.joining[lost]} == {"c"}  # which has nothing yet
    died = changed(step(filling, B, gone=GONE | {c.member: "refused"}))
    assert (died.heads[lost] == -1).all()
    assert {*died.joining[lost].tolist()} == {-1}
    assert (changed(step(died, B, gone={c.member: "refused"})).joining[lost] >= 0).all()


def chains(epoch: int, chain: int, joining: int, since: int, copy_state: int = 0, recovery_epoch: int = 0) -> Chains:
    one = np.array([[chain]], np.int32), np.array([joining], np.int32), np.array([since])
    return Chains(epoch, (A.member, B.member), *one, np.array([copy_state], np.int32), np.array([recovery_epoch]))


def test_transitions_of_range_recovery_are_checked() -> None:
    old, ended = chains(4, 0, -1, 2), {A.member}
    emptied = chains(5, -1, -1, 5, recovery_epoch=5)
    assert unsafe_transition(old, emptied, {}, ended) == ""
    assert "may come back" in unsafe_transition(old, emptied, {}, {B.member})
    assert "given up" in unsafe_transition(old, replace(emptied, recovery_epoch=old.recovery_epoch), {}, ended)
    assert "does not begin anew" in unsafe_transition(old, chains(5, 1, -1, 5, recovery_epoch=5), {}, ended)
    assert "not lost" in unsafe_transition(old, chains(5, 0, 1, 5, CopyState.RECOVERING), {}, ended)
    filling = chains(6, -1, 1, 6, CopyState.RECOVERING, 5)
    assert unsafe_transition(emptied, filling, {}) == ""
    assert "nobody has brought back" in unsafe_transition(emptied, chains(6, 1, -1, 6, recovery_epoch=5), {})
    full = chains(7, 1, -1, 7, recovery_epoch=5)
    assert unsafe_transition(filling, full, {0: 6}) == ""
    assert "nobody has brought back" in unsafe_transition(filling, full, {0: 5})
    assert "nobody has brought back" in unsafe_transition(filling, chains(7, 0, -1, 7, recovery_epoch=5), {0: 6})


def test_a_workers_own_report_corrects_its_lost_steps() -> None:
    workers = [{"id": 3, "name": "v", "have": 5, "to": 8}, {"id": 4, "name": "w", "have": 5, "to": 6}]
    found = json.dumps({"epoch": 7, "workers": workers}).encode()
    (loss,) = merge_losses({"losses/000000000007": found, known_key(7, 3, "v"): b'{"committed": 9}'})
    assert [worker["to"] for worker in loss["workers"]] == [9, 6]
