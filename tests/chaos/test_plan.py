"""Plans as data: what is read, what is refused with which words, and what timeline a seed makes of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from chaos.live.cli import find_plan, ready_plans
from chaos.live.plan import VERBS, Plan, PlanError, expand, parse
from chaos.live.runner import changed

READY = (
    "etcd-outage",
    "everything",
    "frozen-without-leader",
    "grow-and-shrink-under-fire",
    "kill-each-role",
    "partition",
    "random-day",
    "rolling-restart",
    "zombie",
)


def plan_of(*faults: dict[str, object], **more: object) -> Plan:
    document = {"about": "a test", "duration": 60, "faults": list(faults), **more}
    return parse(yaml.safe_dump(document), "tested", "tested.yaml")


def test_the_ready_plans_are_there_and_can_be_read() -> None:
    assert tuple(ready_plans()) == READY
    for name in READY:
        plan = find_plan(name)
        assert plan.about
        assert expand(plan, seed=1, duration=min(plan.duration, 300.0))


def test_every_fault_can_be_named_in_a_plan() -> None:
    values = {"for": 1, "ms": 5, "percent": 1, "mbit": 10}
    for do, verb in VERBS.items():
        fault = {"at": 1, "do": do, **{key: values[key] for key in verb.needs}}
        if verb.roles:
            fault["target"] = "random"
        pods = {"kind": "kubernetes", "url": "etcd://e/c"}
        plan = plan_of(fault, cluster=pods if do == "cordon" else {"kind": "local", "proxy": True})
        assert [action.do for action in expand(plan, 0)] == [do]


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ("a: [", "tested.yaml: not YAML"),
        ("[]", "the plan: must be a mapping"),
        ("about: x", "the plan: duration, faults must be given"),
        ("{about: x, duration: 5, faults: [], speed: 3}", "unknown 'speed'; allowed are about, duration"),
        ("{about: x, duration: soon, faults: []}", "duration: must be a number from 1 to 604800, not 'soon'"),
        (
            "{about: x, duration: 5, faults: [], cluster: {kind: cloud}}",
            "cluster.kind: must be one of local, netns, kube",
        ),
        (
            "{about: x, duration: 5, faults: [], cluster: {ranges: 33}}",
            "cluster.ranges: must be a power of two, not 33",
        ),
        (
            "{about: x, duration: 5, faults: [], cluster: {servers: 1}}",
            "cluster: 2 replicas need as many servers, not 1",
        ),
        ("{about: x, duration: 5, faults: [], cluster: {kind: kubernetes}}", "kubernetes needs the cluster's url"),
        ("{about: x, duration: 5, faults: [], cluster: {kind: netns, proxy: true}}", "proxy goes with kind local"),
        ("{about: x, duration: 5, faults: [], cluster: {proxy: 1}}", "cluster.proxy: must be true or false, not 1"),
        ("{about: x, duration: 5, faults: [], cluster: {memory: lots}}", "cluster.memory: 'lots' is no size of memory"),
        (
            "{about: x, duration: 5, faults: [], cluster: {kind: kubernetes, url: 'etcd://e/c', tls: true}}",
            "not for one that is there already",
        ),
        (
            "{about: x, duration: 5, faults: [{at: 1, do: etcd-new, for: 1}], "
            "cluster: {kind: kubernetes, url: 'etcd://e/c'}}",
            "etcd-new is not possible on Kubernetes",
        ),
        (
            "{about: x, duration: 5, faults: [{at: 1, do: pause, target: etcd, for: 1}], "
            "cluster: {kind: kubernetes, url: 'etcd://e/c'}}",
            "faults[0]: etcd cannot be paused on Kubernetes",
        ),
        (
            "{about: x, duration: 5, faults: [{at: 1, do: pause, target: elasticps-etcd-0, for: 1}], "
            "cluster: {kind: kubernetes, url: 'etcd://e/c'}}",
            "faults[0]: etcd cannot be paused on Kubernetes",
        ),
        ("{about: x, duration: 5, faults: {at: 1}}", "faults: must be a list"),
        ("{about: x, duration: 5, faults: [{at: 1}]}", "faults[0]: must say what to `do`: one of kill, terminate"),
        ("{about: x, duration: 5, faults: [{at: 1, do: nuke}]}", "faults[0].do: must be one of kill, terminate"),
        ("{about: x, duration: 5, faults: [{at: 1, do: disk-full}]}", "servers write no checkpoints to a disk"),
        ("{about: x, duration: 5, faults: [{at: 1, do: kill}]}", "faults[0]: kill needs target"),
        ("{about: x, duration: 5, faults: [{at: 1, do: pause, target: s1}]}", "faults[0]: pause needs for"),
        ("{about: x, duration: 5, faults: [{do: kill, target: s1}]}", "must have one of at, every and times"),
        ("{about: x, duration: 5, faults: [{at: 1, every: 2, do: kill, target: s1}]}", "must have one of at, every"),
        ("{about: x, duration: 5, faults: [{at: 1, from: 2, do: kill, target: s1}]}", "not with at"),
        (
            "{about: x, duration: 5, faults: [{at: 1, do: kill, target: s1, for: 3}]}",
            "unknown 'for'; allowed are do, at",
        ),
        (
            "{about: x, duration: 5, faults: [{at: 1, do: kill, target: bob}]}",
            "faults[0].target: must be a name such as",
        ),
        ("{about: x, duration: 5, faults: [{at: 1, do: shrink, target: leader}]}", "leader is a coordinator"),
        ("{about: x, duration: 5, faults: [{at: [3, 1], do: kill, target: s1}]}", "faults[0].at: must be [low, high]"),
        ("{about: x, duration: 5, faults: [{at: 1, do: cut, target: s1, for: 1}]}", "cut needs a network"),
        ("{about: x, duration: 5, faults: [{at: 1, do: cordon, target: s1, for: 1}]}", "cordon needs nodes"),
    ],
)
def test_an_error_names_its_place_in_the_plan_and_the_allowed_values(document: str, words: str) -> None:
    with pytest.raises(PlanError) as raised:
        parse(document, "tested", "tested.yaml")
    assert str(raised.value).startswith("tested.yaml: ")
    assert words in str(raised.value)


def test_a_plan_that_is_neither_ready_nor_a_file_is_refused_with_the_names_there_are(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"no ready plan is called 'nothing'.*kill-each-role.*No such file"):
        find_plan("nothing")
    path = tmp_path / "mine.yaml"
    path.write_text("{about: mine, duration: 5, faults: []}")
    assert find_plan(str(path)).name == "mine"


@given(st.integers(0, 1 << 32), st.floats(20, 2000))
def test_a_seed_gives_the_same_timeline_and_a_shorter_run_its_beginning(seed: int, duration: float) -> None:
    plan = find_plan("random-day")
    actions = expand(plan, seed, duration)
    assert actions == expand(plan, seed, duration)
    assert all(0 <= action.at <= duration - plan.calm for action in actions)
    assert [action.at for action in actions] == sorted(action.at for action in actions)
    longer = expand(plan, seed, duration + 100)
    beginning = [action for action in longer if action.at <= duration - plan.calm]
    assert [(a.at, a.do, a.draw, a.values) for a in beginning] == [(a.at, a.do, a.draw, a.values) for a in actions]


@given(st.integers(0, 1000))
def test_drawn_values_and_times_stay_in_their_bounds(seed: int) -> None:
    plan = plan_of(
        {"times": 5, "from": 10, "until": 20, "do": "pause", "target": "random", "for": [0.5, 2]},
        {"at": [1, 4], "do": "kill", "target": "tail", "back": [0, 1]},
    )
    actions = expand(plan, seed)
    pauses = [action for action in actions if action.do == "pause"]
    assert len(pauses) == 5
    assert all(10 <= action.at <= 20 and 0.5 <= action.value("for") <= 2 for action in pauses)
    (kill,) = (action for action in actions if action.do == "kill")
    assert 1 <= kill.at <= 4
    assert 0 <= kill.value("back") <= 1


def test_adding_an_entry_does_not_change_the_others() -> None:
    first = {"every": 3, "do": "kill", "target": "random"}
    alone = expand(plan_of(first), 7)
    both = expand(plan_of(first, {"every": 5, "do": "grow"}), 7)
    assert [(a.at, a.draw) for a in both if a.do == "kill"] == [(a.at, a.draw) for a in alone]


def test_a_plan_that_would_never_end_is_refused() -> None:
    plan = plan_of({"every": 0.05, "do": "grow"}, duration=86400)
    with pytest.raises(PlanError, match="more than 100,000 faults"):
        expand(plan, 0)


def test_even_a_short_run_of_everything_has_every_great_fault() -> None:
    plan = find_plan("everything")
    great = {"hoard", "hostile", "etcd-new", "etcd-full", "grow", "kill", "pause"}
    for seed in range(20):
        assert great <= {action.do for action in expand(plan, seed, 60.0)}


def test_the_command_line_changes_a_plan() -> None:
    plan = find_plan("everything")
    assert changed(plan, tls=True, replicas=3).cluster == replace(plan.cluster, tls=True, replicas=3)
    assert changed(plan, proxy=True).cluster.proxy
    with pytest.raises(PlanError, match="6 replicas need as many servers, not 5"):
        changed(plan, replicas=6)
    pods = plan_of(cluster={"kind": "kubernetes", "url": "etcd://e/c"})
    with pytest.raises(PlanError, match="is there already"):
        changed(pods, tls=True)
