"""The timeline on a stage that only notes what it is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from chaos.live.nemesis import PATIENCE_S, Nemesis
from chaos.live.network import Loopback, Shape
from chaos.live.plan import Action
from chaos.live.targets import Situation
from tests.chaos.scenes import action_of, scene_of, view_of

VIEW = view_of([["s0", "s1"], ["s1", "s2"], ["s2", "s0"], ["s0", "s2"]])
RING = view_of([["s0", "s1"], ["s1", "s2"], ["s2", "s3"], ["s3", "s0"]])
ROLES = {"coordinator": ["c0"], "worker": ["w0"], "etcd": ["e0"]}


class FakeNetwork(Loopback):
    def __init__(self, story: list[str]) -> None:
        self._story = story

    def cut(self, pairs: Sequence[tuple[str, str]]) -> None:
        self._story.append("cut " + " ".join(f"{a}>{b}" for a, b in pairs))

    def mend(self, pairs: Sequence[tuple[str, str]]) -> None:
        self._story.append("mend " + " ".join(f"{a}>{b}" for a, b in pairs))

    def shape(self, name: str, shape: Shape) -> None:
        self._story.append(f"shape {name} {shape.ms:g}ms {shape.percent:g}% {shape.mbit:g}mbit")


class FakeStage:
    """Processes that start and end at once."""

    def __init__(self) -> None:
        self.story: list[str] = []
        self.network = FakeNetwork(self.story)
        self.dead: set[str] = set()
        self.starting: set[str] = set()
        self.draining: set[str] = set()
        self.codes: dict[str, int] = {}
        self.etcd_answers = True
        self.idle: set[str] = set()

    def names(self, role: str, *, paused: bool = True) -> list[str]:
        return [name for name in ROLES.get(role, ["s0", "s1", "s2"]) if name not in self.dead]

    def running(self, name: str) -> bool:
        return name not in self.dead

    def ready(self, name: str) -> bool:
        return name not in self.dead | self.starting

    def start(self, name: str) -> None:
        self.story.append(f"start {name}")
        self.dead.discard(name)

    def kill(self, name: str) -> None:
        self.story.append(f"kill {name}")
        self.dead.add(name)

    def terminate(self, name: str) -> None:
        self.story.append(f"terminate {name}")
        self.draining.add(name)

    def shrink(self, name: str) -> str:
        self.terminate(name)
        return name

    def pause(self, name: str) -> None:
        self.story.append(f"pause {name}")

    def resume(self, name: str) -> None:
        self.story.append(f"resume {name}")

    def grow(self) -> str:
        self.story.append("grow")
        return "s9"

    def cordon(self, name: str) -> str:
        self.story.append(f"cordon {name}")
        return f"node of {name}"

    def uncordon(self, node: str) -> None:
        self.story.append(f"uncordon {node}")

    def beside(self, do: str, count: int, seconds: float) -> list[str]:
        self.story.append(f"{do} {count} for {seconds:g}")
        return [f"{do}{i}" for i in range(count)]

    def worked(self, name: str) -> bool:
        return name not in self.idle

    def code(self, name: str) -> int | None:
        return self.codes.get(name)

    def fill_etcd(self, full: bool) -> bool:
        self.story.append(f"etcd full {full}")
        return self.etcd_answers

    def forget_etcd(self) -> None:
        self.story.append("forget etcd")

    def adopt(self) -> str:
        self.story.append("adopt")
        return "adopt0"


def nemesis_of(*actions: Action, scene: Situation | None = None) -> tuple[Nemesis, FakeStage]:
    stage = FakeStage()
    there = scene_of(VIEW, **ROLES) if scene is None else scene
    return Nemesis(stage, actions, lambda: there), stage


def test_a_kill_comes_at_its_time_and_the_process_comes_back() -> None:
    nemesis, stage = nemesis_of(action_of("kill", "s1", back=2))
    nemesis.step(0.5)
    assert stage.story == []
    nemesis.step(1.0)
    nemesis.step(1.1)
    nemesis.step(3.0)
    assert stage.story == ["kill s1"]
    nemesis.step(3.2)
    assert stage.story == ["kill s1", "start s1"]
    assert [(f.state, f.began, f.ended) for f in nemesis.faults] == [("over", 1.0, 3.2)]


def test_the_second_kill_waits_until_every_range_has_another_replica() -> None:
    scene = scene_of(VIEW, **ROLES)
    nemesis, stage = nemesis_of(action_of("kill", "s1"), action_of("kill", "s2", at=2.0), scene=scene)
    nemesis.step(2.0)
    assert stage.story == ["kill s1"]
    assert "only full replica" in nemesis.faults[1].note
    nemesis.step(2.0 + PATIENCE_S)
    assert stage.story == ["kill s1"]
    assert nemesis.faults[1].state == "skipped"


def test_a_paused_server_counts_as_a_replica_again_once_resumed() -> None:
    nemesis, stage = nemesis_of(action_of("pause", "s1", for_=3), action_of("kill", "s2", at=2.0))
    for now in (1.0, 2.0, 4.1):
        nemesis.step(now)
    assert stage.story == ["pause s1", "resume s1", "kill s2"]
    assert "put off by 2.1 s" in nemesis.faults[1].note


def test_a_server_counts_as_down_until_all_its_faults_are_over() -> None:
    scene = scene_of(RING, **ROLES)
    actions = action_of("pause", "s1", for_=3), action_of("cut", "s1", for_=10), action_of("kill", "s2", at=5.0)
    nemesis, stage = nemesis_of(*actions, scene=scene)
    for now in (1.0, 4.5, 5.0):
        nemesis.step(now)
    assert "kill s2" not in stage.story
    nemesis.step(11.5)
    assert "kill s2" in stage.story


def test_a_cut_blocks_one_direction_or_both() -> None:
    out, both = action_of("cut", "s1", for_=1), action_of("cut", "s1", for_=1)
    out = Action(0, 1.0, "cut", "s1", 0.0, out.values, "others", "out")
    both = Action(0, 1.0, "cut", "s1", 0.0, both.values, "c0", "both")
    nemesis, stage = nemesis_of(out, both, scene=scene_of(VIEW, **ROLES))
    nemesis.step(1.0)
    nemesis.step(2.5)
    assert stage.story == ["cut s1>s0 s1>s2", "cut s1>c0 c0>s1", "mend s1>s0 s1>s2", "mend s1>c0 c0>s1"]


def test_delays_and_losses_add_up_and_end_one_by_one() -> None:
    nemesis, stage = nemesis_of(
        action_of("delay", "s1", for_=5, ms=20), action_of("loss", "s1", for_=2, percent=3, at=2.0)
    )
    for now in (1.0, 2.0, 4.5, 6.5):
        nemesis.step(now)
    assert stage.story == [
        "shape s1 20ms 0% 0mbit", "shape s1 20ms 3% 0mbit", "shape s1 20ms 0% 0mbit", "shape s1 0ms 0% 0mbit"
    ]  # fmt: skip


def test_a_drain_needs_enough_others() -> None:
    nemesis, stage = nemesis_of(action_of("terminate", "s0"), action_of("terminate", "s1", at=2.0))
    nemesis.step(2.0)
    assert stage.story == ["terminate s0"]
    assert nemesis.faults[1].note


def test_an_outage_of_etcd_ends() -> None:
    nemesis, stage = nemesis_of(action_of("etcd-outage", for_=2))
    nemesis.step(1.0)
    nemesis.step(3.5)
    nemesis.step(3.6)
    assert stage.story == ["kill e0", "start e0"]
    assert not nemesis.busy


def test_the_end_of_a_run_ends_faults_under_way_and_drops_those_to_come() -> None:
    nemesis, stage = nemesis_of(
        action_of("pause", "s1", for_=100), action_of("kill", "s0", at=50.0), action_of("kill", "w0", back=100)
    )
    nemesis.step(1.0)
    nemesis.stop(10.0)
    assert stage.story == ["pause s1", "kill w0", "resume s1", "start w0"]
    assert [fault.state for fault in nemesis.faults] == ["over", "skipped", "over"]


def test_a_node_is_cordoned_for_a_while() -> None:
    nemesis, stage = nemesis_of(action_of("cordon", "s1", for_=2))
    nemesis.step(1.0)
    nemesis.step(3.5)
    assert stage.story == ["cordon s1", "uncordon node of s1"]


def test_a_replaced_etcd_is_empty_for_a_while_and_then_adopts_the_cluster() -> None:
    nemesis, stage = nemesis_of(action_of("etcd-new", for_=2), scene=scene_of(RING, **ROLES))
    for now in (1.0, 1.1, 2.9, 3.1):
        nemesis.step(now)
    assert stage.story == ["kill e0", "forget etcd", "start e0", "adopt"]
    nemesis.step(4.0)
    stage.codes["adopt0"] = 0
    nemesis.step(5.0)
    assert [(fault.state, fault.ended) for fault in nemesis.faults] == [("over", 5.0)]


def test_no_fault_hits_a_process_while_etcd_is_replaced() -> None:
    pause, renewed, kill = (
        action_of("pause", "s1", for_=3),
        action_of("etcd-new", for_=1, at=2.0),
        action_of("kill", "s2", at=3.0),
    )
    nemesis, stage = nemesis_of(
        pause, renewed, kill, action_of("hostile", for_=9, at=3.0), scene=scene_of(RING, **ROLES)
    )
    for now in (1.0, 2.0, 3.0):
        nemesis.step(now)
    assert stage.story == ["pause s1", "hostile 1 for 9"]
    assert "alone" in nemesis.faults[1].note
    for now in (4.1, 4.2, 4.3, 5.5, 3.0 + PATIENCE_S):
        nemesis.step(now)
    assert stage.story[2:] == ["resume s1", "kill e0", "forget etcd", "start e0", "adopt"]
    stage.codes["adopt0"] = 0
    nemesis.step(40.0)
    nemesis.step(40.1)
    assert stage.story[-1] == "kill s2"


def test_etcd_is_replaced_only_when_every_range_has_all_replicas() -> None:
    short = view_of([["s0", "s1"], ["s1"], ["s2", "s0"], ["s0", "s2"]])
    nemesis, stage = nemesis_of(action_of("etcd-new", for_=1), scene=scene_of(short, **ROLES))
    nemesis.step(1.0)
    assert stage.story == []
    assert "1 ranges have fewer than 2 replicas" in nemesis.faults[0].note


def test_a_full_etcd_begins_and_ends_when_etcd_answers() -> None:
    nemesis, stage = nemesis_of(action_of("etcd-full", for_=2))
    stage.etcd_answers = False
    nemesis.step(1.0)
    assert nemesis.faults[0].state == "waiting"
    stage.etcd_answers = True
    nemesis.step(1.1)
    stage.etcd_answers = False
    nemesis.step(3.2)
    stage.etcd_answers = True
    nemesis.step(3.3)
    assert not nemesis.busy
    assert stage.story == ["etcd full True"] * 2 + ["etcd full False"] * 2


def test_a_fault_of_helper_processes_is_over_when_they_have_ended() -> None:
    nemesis, stage = nemesis_of(action_of("hostile", for_=5, processes=2))
    for now in (1.0, 6.5):
        nemesis.step(now)
    stage.dead |= {"hostile0", "hostile1"}
    nemesis.step(7.0)
    assert [fault.ended for fault in nemesis.faults] == [7.0]
    assert stage.story == ["hostile 2 for 5"]


def test_hostile_peers_that_were_never_let_in_do_not_count_as_a_fault() -> None:
    nemesis, stage = nemesis_of(action_of("hostile", for_=5, processes=2))
    nemesis.step(1.0)
    stage.dead |= {"hostile0", "hostile1"}
    stage.idle |= {"hostile0", "hostile1"}
    (line,) = nemesis.step(7.0)
    (fault,) = nemesis.faults
    assert (fault.state, fault.began) == ("skipped", -1.0)
    assert fault.note == "hostile0, hostile1 came to nothing from 1.0 s to 7.0 s: never ready; the logs may say why"
    assert line == f"skipped {fault}: {fault.note}"
    assert stage.story[1:] == ["kill hostile0", "kill hostile1"]  # nobody is to start them again
    assert not nemesis.busy


def test_a_hostile_peer_that_was_never_let_in_is_noted() -> None:
    nemesis, stage = nemesis_of(action_of("hostile", for_=5, processes=2), action_of("hog", for_=5, processes=1))
    nemesis.step(1.0)
    stage.dead |= {"hostile0", "hostile1", "hog0"}
    stage.idle |= {"hostile1", "hog0"}
    nemesis.step(7.0)
    assert [fault.state for fault in nemesis.faults] == ["over", "over"]
    assert nemesis.faults[0].note.startswith("hostile1 came to nothing")
    assert nemesis.faults[1].note == ""  # hogs say nothing


def test_no_server_is_removed_if_the_others_could_not_hold_its_rows() -> None:
    stage, scene = FakeStage(), scene_of(RING, **ROLES)
    nemesis = Nemesis(stage, [action_of("shrink", "s1"), action_of("terminate", "s2")], lambda: scene, least=4)
    nemesis.step(1.0)
    assert stage.story == ["terminate s2"]
    assert nemesis.faults[0].note == "a drain needs 4 other servers, there are 3"


def test_a_server_that_is_leaving_does_not_count_after_a_restart() -> None:
    """Found in a run of `everything`: one that drained was left out of the view and began another life. Three were
    taken away where two could be spared, and the others had no memory for the replicas that were missing."""
    stage, scene = FakeStage(), scene_of(RING, **ROLES)
    actions = [action_of("shrink", "s1"), action_of("shrink", "s2", at=2.0)]
    nemesis = Nemesis(stage, actions, lambda: scene, least=3)
    nemesis.step(1.0)
    started_again = tuple(replace(s, incarnation=s.incarnation + (s.name == "s1")) for s in RING.servers)
    scene = scene_of(replace(RING, servers=started_again), **ROLES)
    nemesis.step(2.0)
    assert stage.story == ["terminate s1"]
    assert nemesis.faults[1].note == "a drain needs 3 other servers, there are 2"


def test_no_fault_waits_for_a_server_that_was_removed_meanwhile() -> None:
    nemesis, stage = nemesis_of(
        action_of("kill", "s1", back=2), action_of("shrink", "s1", at=3.5), scene=scene_of(RING, **ROLES)
    )
    for now in (1.0, 1.1):
        nemesis.step(now)
    stage.dead.discard("s1")
    stage.starting.add("s1")
    nemesis.step(3.5)
    stage.dead.add("s1")
    nemesis.step(4.0)
    assert not nemesis.busy
    assert "start s1" not in stage.story
