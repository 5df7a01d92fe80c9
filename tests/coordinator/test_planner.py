"""What the planner decides, and the reason it gives."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from coordinator.planner import Members, Plan, plan, plan_roster
from coordinator.view import ClusterConfig, Roster, ServerInfo, View, WorkerInfo

CONFIG = ClusterConfig(ranges=16, replicas=2, min_servers=3)


def server(name: str, incarnation: int = 1) -> ServerInfo:
    return ServerInfo(name, incarnation, "h:1")


def decide(view: View | None, *servers: ServerInfo, config: ClusterConfig = CONFIG) -> Plan | None:
    return plan(view, Members("demo", servers), config)


def written(view: View | None, *servers: ServerInfo, config: ClusterConfig = CONFIG) -> View:
    decision = decide(view, *servers, config=config)
    assert decision is not None
    assert decision.view is not None
    assert decision.view.reason == decision.reason
    return decision.view


FIRST = written(None, server("a"), server("b"), server("c"))


def test_the_first_view_waits_for_enough_servers() -> None:
    assert decide(None) == Plan(None, "waiting for servers: 0 of 3 registered")
    assert decide(None, server("a"), server("b")) == Plan(None, "waiting for servers: 2 of 3 registered")


def test_the_first_view_is_whole_and_does_not_depend_on_who_came_first() -> None:
    assert FIRST.epoch == 1
    assert (FIRST.cluster, FIRST.ranges, FIRST.replicas) == ("demo", 16, 2)
    assert [member.name for member in FIRST.servers] == ["a", "b", "c"]
    assert FIRST.chains.min() >= 0
    assert FIRST.since.tolist() == [1] * 16
    assert FIRST.joining.tolist() == [-1] * 16
    assert FIRST.reason == "first view: 16 ranges on 3 servers, 2 replicas each"
    assert written(None, server("c"), server("a"), server("b")) == FIRST


def test_fewer_servers_than_replicas_make_short_chains() -> None:
    config = ClusterConfig(ranges=4, replicas=3, min_servers=1)
    view = written(None, server("a"), config=config)
    assert view.chains.tolist() == [[0, -1, -1]] * 4
    assert "1 possible" in view.reason


def test_all_well_means_no_plan() -> None:
    assert decide(FIRST, *FIRST.servers) is None


def test_ranges_of_a_server_that_is_gone_wait_for_it() -> None:
    held = int((FIRST.chains == 1).any(axis=1).sum())
    assert decide(FIRST, server("a"), server("c")) == Plan(None, f"b is gone: {held} ranges wait for it")
    assert decide(FIRST, *FIRST.servers) is None


def test_a_server_that_is_back_without_its_data_gets_nothing() -> None:
    decision = decide(FIRST, server("a"), server("b", 2), server("c"))
    assert decision is not None
    assert decision.view is None
    assert decision.reason.startswith("b came back as incarnation 2 without the data of incarnation 1")


def test_a_new_server_is_listed_as_a_spare_and_owns_nothing() -> None:
    view = written(FIRST, *FIRST.servers, server("aa"))
    assert view.epoch == 2
    assert [member.name for member in view.servers] == ["a", "b", "c", "aa"]
    assert np.array_equal(view.chains, FIRST.chains)
    assert np.array_equal(view.since, FIRST.since)
    assert view.reason == "aa joined as spare"
    again = written(view, *FIRST.servers, server("aa", 2))
    assert again.servers[3] == server("aa", 2)
    assert again.reason == "aa came back, spare"
    gone = written(again, *FIRST.servers)
    assert gone.servers == FIRST.servers
    assert gone.reason == "aa left, spare"
    assert gone.epoch == 4


def test_the_reason_tells_of_spares_and_of_who_is_waited_for() -> None:
    view = written(FIRST, server("a"), server("b"), server("d"))
    assert view.reason.startswith("d joined as spare; c is gone: ")


def test_reasons_stay_short() -> None:
    config = ClusterConfig(ranges=1024, replicas=1, min_servers=1)
    many = [server(f"server-with-a-long-name-{i}") for i in range(300)]
    view = written(None, *many, config=config)
    assert len(written(view, server("new"), config=config).reason) <= 1000
    spares = [server(f"spare-{i}") for i in range(300)]
    assert written(view, *many, *spares, config=config).reason.endswith("and 295 more joined as spare")


STEPS = st.lists(st.dictionaries(st.sampled_from("abcdefg"), st.integers(1, 3)), min_size=1, max_size=8)


@given(STEPS, st.integers(1, 3), st.integers(1, 4))
def test_whatever_happens_chains_stand_and_epochs_count_up(
    steps: Sequence[dict[str, int]], replicas: int, min_servers: int
) -> None:
    config = ClusterConfig(ranges=8, replicas=replicas, min_servers=min_servers)
    view: View | None = None
    owners: list[list[tuple[str, int]]] = []
    for present in steps:
        members = [server(name, incarnation) for name, incarnation in present.items()]
        decision = decide(view, *members, config=config)
        if decision is None or decision.view is None:
            assert view is None or {m.name for m in members} >= {m.name for m in view.servers} or decision is not None
            continue
        new = decision.view
        named = [
            [(new.servers[i].name, new.servers[i].incarnation) for i in chain if i >= 0]
            for chain in new.chains.tolist()
        ]
        assert new.epoch == (1 if view is None else view.epoch + 1)
        assert not owners or named == owners
        assert decide(new, *members, config=config) in (None, Plan(None, decision.reason.rpartition("spare; ")[2]))
        assert View.decode(new.encode()) == new
        view, owners = new, named


def worker(number: int, name: str, incarnation: int = 1) -> WorkerInfo:
    return WorkerInfo(number, name, incarnation, "app")


def test_the_roster_follows_the_workers() -> None:
    assert plan_roster(None, []) is None
    first = plan_roster(None, [worker(2, "b"), worker(1, "a")])
    assert first is not None
    assert first.roster == Roster(1, (worker(1, "a"), worker(2, "b")))
    assert first.reason == "a, b joined"
    assert plan_roster(first.roster, [worker(1, "a"), worker(2, "b")]) is None
    second = plan_roster(first.roster, [worker(1, "a"), worker(3, "b", 2)])
    assert second is not None
    assert second.roster == Roster(2, (worker(1, "a"), worker(3, "b", 2)))
    assert second.reason == "b joined; b left"
    last = plan_roster(second.roster, [])
    assert last is not None
    assert last.roster == Roster(3, ())
