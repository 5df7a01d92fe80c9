"""Carries out a timeline of faults on a stage: begins each when its time has come and the promises allow it, ends it
when its time is over, and records both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from chaos.live.network import ProcessNetwork, Shape
from chaos.live.plan import VERBS, Action
from chaos.live.targets import Situation, choose, group, whole

PATIENCE_S = 30.0  # how long a fault waits for a moment in which it may be done
DRAINS = ("terminate", "restart", "shrink")
ENDING = ("kill", *DRAINS)
PEERS = ("hoard", "hostile")  # peers of the cluster beside the load, which say when they are ready
BESIDE = ("hog", *PEERS)
ALONE_PATIENCE_S = 120.0  # with a fault that nothing else may go on beside
_ALONE = "alone:"


class Stage(Protocol):
    """The place where faults happen, as a nemesis uses it. Processes go by their names."""

    @property
    def network(self) -> ProcessNetwork: ...
    def names(self, role: str, *, paused: bool = True) -> list[str]: ...
    def running(self, name: str) -> bool: ...
    def ready(self, name: str) -> bool: ...
    def worked(self, name: str) -> bool: ...
    def code(self, name: str) -> int | None: ...
    def start(self, name: str) -> None: ...
    def kill(self, name: str) -> None: ...
    def terminate(self, name: str) -> None: ...
    def pause(self, name: str) -> None: ...
    def resume(self, name: str) -> None: ...
    def grow(self) -> str: ...
    def shrink(self, name: str) -> str: ...
    def beside(self, do: str, count: int, seconds: float) -> list[str]: ...
    def fill_etcd(self, full: bool) -> bool: ...
    def forget_etcd(self) -> None: ...
    def adopt(self) -> str: ...
    def cordon(self, name: str) -> str: ...
    def uncordon(self, node: str) -> None: ...


@dataclass
class FaultRecord:
    """One action and what became of it. Times are seconds since the start of the load; -1: not yet, or never.

    state   waiting, running, over, or skipped
    began   when it was done; `ended`: when its cause was gone (resumed, mended, the process ready again)
    note    why it was put off or skipped, or what else is to be known
    """

    action: Action
    state: str = "waiting"
    target: str = ""
    role: str = ""
    began: float = -1.0
    ended: float = -1.0
    note: str = ""
    stage: str = ""  # of a process that is started again: "ending", "dead", "starting"; of a new etcd: "adopting"
    until: float = -1.0
    member: tuple[str, int] | None = None
    pairs: list[tuple[str, str]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """The record as plain values, for the report in JSON."""
        action = self.action
        return {
            "number": action.number, "do": action.do, "target": self.target, "role": self.role, "planned_at": action.at,
            "asked": action.target, "values": dict(action.values), "state": self.state, "began": round(self.began, 4),
            "ended": round(self.ended, 4), "note": self.note,
        }  # fmt: skip

    def __str__(self) -> str:
        values = " ".join(f"{name} {value:g}" for name, value in self.action.values.items())
        who = self.target or self.action.target
        aim = f" ({self.action.target})" if self.target and self.action.target not in ("", self.target) else ""
        return " ".join(part for part in (self.action.do, f"{who}{aim}".strip(), values) if part)


class Nemesis:
    """All faults of a run. `step` is to be called again and again; it never waits.

    look   the scene as it is; who is `down` because of a fault is known here
    clock  seconds since the start of the load: doing something takes a moment, and a fault begins when it is done.
           None: the `now` that `step` is given
    least  servers that are left when some are taken away for good; 0: as many as replicas
    """

    def __init__(
        self,
        stage: Stage,
        actions: Sequence[Action],
        look: Callable[[], Situation],
        clock: Callable[[], float] | None = None,
        least: int = 0,
    ) -> None:
        self.faults = [FaultRecord(action) for action in actions]
        self._stage = stage
        self._look = look
        self._clock = clock
        self._least = least
        self._dead: set[tuple[str, int]] = set()  # incarnations that were killed, or are on their way out
        self._left: set[str] = set()  # servers taken away for good, perhaps while another fault is to restart them
        self._shapes: dict[str, list[FaultRecord]] = {}
        self._stopped = False

    @property
    def busy(self) -> bool:
        """Whether any fault is still to come, or goes on."""
        return any(fault.state in ("waiting", "running") for fault in self.faults)

    def step(self, now: float) -> list[str]:
        """Does what is due; returns what it did, a line each."""
        lines = []
        for fault in self.faults:
            if fault.state == "running":
                lines += self._continue(fault, now)
        due = [fault for fault in self.faults if fault.state == "waiting" and fault.action.at <= now]
        for fault in due:
            lines += self._try(fault, now, [other for other in due if other.state == "waiting"])
        return lines

    def stop(self, now: float) -> list[str]:
        """Ends every fault that goes on, and drops those that have not begun. Processes that are to come back are
        started by the next `step`s."""
        self._stopped = True
        for fault in self.faults:
            if fault.state == "waiting":
                fault.state, fault.note = "skipped", fault.note or "the run was over"
            elif fault.until > now:
                fault.until = now
        return self.step(now)

    # ----------------------------------------------------------------------------------------------------------- begin

    def _try(self, fault: FaultRecord, now: float, waiting: Sequence[FaultRecord]) -> list[str]:
        action, scene = fault.action, self._scene()
        why = self._in_the_way(fault, scene, waiting)
        if not why and action.target:
            choice = choose(action, scene)
            fault.target, why = choice.name, choice.why
            why = why or self._too_few(action, scene)
        if not why and action.do == "etcd-full" and not self._stage.fill_etcd(True):
            why = "etcd does not answer"
        if why:
            fault.note, fault.target = why, ""
            if now - action.at < (ALONE_PATIENCE_S if why.startswith(_ALONE) else PATIENCE_S):
                return []
            fault.state = "skipped"
            return [f"skipped {fault}: {why}"]
        fault.role = scene.role(fault.target)
        fault.state, fault.began = "running", now
        fault.note = f"put off by {now - action.at:.1f} s: {fault.note}" if fault.note else ""
        self._begin(fault, scene, now)
        if self._clock is not None and action.do == "cut":
            fault.began = self._clock()
        return [str(fault)]

    def _in_the_way(self, fault: FaultRecord, scene: Situation, waiting: Sequence[FaultRecord]) -> str:
        """Says why a fault must wait because it, or another one, has to be alone; "" if it may begin."""
        if fault.action.do in BESIDE:
            return ""
        at_work = [each for each in self.faults if each.state == "running" and each.action.do not in BESIDE]
        if not _alone(fault):
            others = [each for each in (*at_work, *waiting) if _alone(each)]
            return f"{_ALONE} {others[0]}" if others else ""
        if at_work:
            return f"{_ALONE} it waits for {at_work[0]}"
        view = scene.view
        missing = "there is no view yet" if view is None else whole(view, scene.running.get("server", ()))
        return f"{_ALONE} {missing}" if missing else ""

    def _too_few(self, action: Action, scene: Situation) -> str:
        """Says why a drain must not begin: it ends only if the other servers can hold all replicas; "" if it may."""
        view = scene.view
        if action.do not in DRAINS or view is None:
            return ""
        gone = {name for name, incarnation in scene.down if view.index(name) >= 0
                and view.servers[view.index(name)].incarnation == incarnation}  # fmt: skip
        left = len(set(scene.running.get("server", ())) - gone - self._left) - 1  # they may be back empty for a while
        needed = max(view.replicas, self._least if action.do == "shrink" else 0)
        return f"a drain needs {needed} other servers, there are {left}" if left < needed else ""

    def _begin(self, fault: FaultRecord, scene: Situation, now: float) -> None:
        action, stage, name = fault.action, self._stage, fault.target
        fault.until = now + action.value("for")
        if action.do in ENDING:
            if action.do == "shrink":
                fault.target = stage.shrink(name)
                self._left.add(fault.target)
            else:
                (stage.kill if action.do == "kill" else stage.terminate)(name)
            self._count_out(fault, scene)
            fault.stage = "ending"
        elif action.do == "pause":
            self._count_out(fault, scene)
            stage.pause(name)
        elif action.do == "cut":
            self._count_out(fault, scene)
            others = group(action.to, name, scene)
            out, back = [(name, other) for other in others], [(other, name) for other in others]
            fault.pairs = {"out": out, "in": back, "both": out + back}[action.way]
            stage.network.cut(fault.pairs)
        elif action.do in ("delay", "loss", "rate"):
            self._shapes.setdefault(name, []).append(fault)
            self._reshape(name)
        elif action.do in ("etcd-outage", "etcd-new"):
            fault.names = stage.names("etcd")
            for each in fault.names:
                stage.kill(each)
            if action.do == "etcd-new":
                fault.stage = "ending"
        elif action.do in BESIDE:
            count = int(action.value("processes", 2 if action.do == "hog" else 1))
            fault.names = stage.beside(action.do, count, action.value("for"))
            fault.target = ", ".join(fault.names)
        elif action.do == "cordon":
            fault.names = [stage.cordon(name)]
        elif action.do == "grow":
            fault.names = [stage.grow() for _ in range(int(action.value("count", 1)))]
            fault.target = ", ".join(fault.names)

    # ------------------------------------------------------------------------------------------------------- go on, end

    def _continue(self, fault: FaultRecord, now: float) -> list[str]:
        action, stage = fault.action, self._stage
        if action.do == "etcd-new":
            return self._renew(fault, now)
        if fault.stage:
            return self._come_back(fault, now)
        if action.do == "grow":
            return self._over(fault, now) if all(stage.ready(name) for name in fault.names) else []
        if now < fault.until:
            return []
        if action.do == "pause":
            stage.resume(fault.target)
        elif action.do == "cut":
            stage.network.mend(fault.pairs)
        elif action.do in ("delay", "loss", "rate"):
            self._shapes[fault.target].remove(fault)
            self._reshape(fault.target)
        elif action.do == "etcd-outage":
            for name in fault.names:
                if not stage.running(name):
                    stage.start(name)
            fault.stage = "starting"
            return []
        elif action.do == "cordon":
            stage.uncordon(fault.names[0])
        elif action.do == "etcd-full" and not stage.fill_etcd(False):
            return []
        elif action.do in BESIDE and any(stage.running(name) for name in fault.names):
            for name in fault.names:
                if action.do == "hog" or self._stopped:
                    stage.kill(name)
            return []
        elif action.do in PEERS and (idle := [name for name in fault.names if not stage.worked(name)]):
            return self._in_vain(fault, idle, now)
        return self._over(fault, now)

    def _in_vain(self, fault: FaultRecord, idle: Sequence[str], now: float) -> list[str]:
        """Ends a fault of processes beside the cluster, some of which did nothing. If none did anything, the fault was
        not done."""
        for name in idle:
            self._stage.kill(name)  # nor are they to be started again
        when = f"from {fault.began:.1f} s to {now:.1f} s"
        fault.note = f"{', '.join(idle)} came to nothing {when}: never ready; the logs may say why"
        if len(idle) < len(fault.names):
            return self._over(fault, now)
        fault.state, fault.began = "skipped", -1.0
        return [f"skipped {fault}: {fault.note}"]

    def _come_back(self, fault: FaultRecord, now: float) -> list[str]:
        """Follows a process that was killed or asked to end until it is dead, and ready again if the plan says so."""
        action, stage, name = fault.action, self._stage, fault.target
        if name in self._left and not stage.running(name):
            return self._over(fault, now)
        if fault.stage == "ending" and not stage.running(name):
            comes_back = action.do == "restart" or "back" in action.values
            if not comes_back:
                return self._over(fault, now)
            fault.stage, fault.until = "dead", now + (0.0 if self._stopped else action.value("back"))
        if fault.stage == "dead" and now >= fault.until:
            if not stage.running(name):
                stage.start(name)
            fault.stage = "starting"
        names = fault.names or [name]
        if fault.stage == "starting" and all(stage.ready(each) for each in names):
            return self._over(fault, now)
        return []

    def _renew(self, fault: FaultRecord, now: float) -> list[str]:
        """Follows an etcd that was killed: empties it, starts it, leaves it alone for a while, has it adopt the
        cluster."""
        stage, names = self._stage, fault.names
        if fault.stage == "ending" and not any(stage.running(name) for name in names):
            stage.forget_etcd()
            for name in names:
                stage.start(name)
            fault.stage = "starting"
        elif fault.stage == "starting" and now >= fault.until and all(stage.ready(name) for name in names):
            fault.names = [stage.adopt()]
            fault.stage = "adopting"
        elif fault.stage == "adopting" and stage.code(names[0]) == 0:
            return self._over(fault, now)
        return []

    def _over(self, fault: FaultRecord, now: float) -> list[str]:
        fault.state, fault.ended, fault.stage = "over", now, ""
        return [f"over: {fault}"] if now - fault.began > 0.05 else []

    # --------------------------------------------------------------------------------------------------------- plumbing

    def _scene(self) -> Situation:
        scene = self._look()
        down = self._dead | {fault.member for fault in self.faults if fault.state == "running" and fault.member}
        return replace(scene, down=scene.down | down)

    def _count_out(self, fault: FaultRecord, scene: Situation) -> None:
        """Notes which incarnation is not to be counted on while the fault goes on, or ever again if it ends it."""
        if fault.role == "server" and scene.view is not None and (index := scene.view.index(fault.target)) >= 0:
            fault.member = fault.target, scene.view.servers[index].incarnation
            if fault.action.do in ENDING:
                self._dead.add(fault.member)

    def _reshape(self, name: str) -> None:
        faults = [fault.action for fault in self._shapes[name]]
        self._stage.network.shape(
            name,
            Shape(
                sum(a.value("ms") for a in faults),
                sum(a.value("jitter") for a in faults),
                max((a.value("percent") for a in faults), default=0.0),
                min((a.value("mbit") for a in faults if a.value("mbit")), default=0.0),
            ),
        )


def _alone(fault: FaultRecord) -> bool:
    return VERBS[fault.action.do].alone
