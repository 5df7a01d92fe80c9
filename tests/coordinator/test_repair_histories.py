"""Plans under random histories: every view is safe, and chains become full."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from coordinator.core.planner import Health, Members, Plan, plan
from coordinator.core.repair import Limits
from coordinator.core.view import ClusterConfig, ServerInfo, View
from replication.chain import CopyState, Member, unsafe_transition
from tests.coordinator.plans import joiner, names, server


class Cluster:
    """A cluster under a random history, with the checks that every view must pass.

    present  who is registered, by name; lost: who is known to be gone; silent: who is suspected
    """

    def __init__(self, replicas: int, limits: Limits) -> None:
        self.config = ClusterConfig(ranges=8, replicas=replicas)
        self.limits = limits
        self.incarnations = dict.fromkeys("abcde", 0)
        self.present: dict[str, ServerInfo] = {}
        self.ever: set[Member] = set()
        self.lost: set[Member] = set()
        self.silent: set[Member] = set()
        self.cut: set[tuple[Member, Member]] = set()
        self.view: View | None = None

    def start(self, name: str) -> None:
        self.incarnations[name] += 1
        self.present[name] = server(name, self.incarnations[name])

    def kill(self, name: str) -> None:
        """Ends a server; its key stays until the lease runs out."""
        if name in self.present:
            self.lost.add(self.present[name].member)

    def stop(self, name: str) -> None:
        """The same, and the key goes."""
        self.kill(name)
        self.present.pop(name, None)

    def step(self, level: Callable[[int], bool] = lambda r: True, alone: bool = True) -> Plan | None:
        """One decision, with every range level that is being filled and that `level` picks. alone: who is left alone
        has lived on."""
        view = self.view
        ready: dict[int, int] = {}
        if view is not None:
            filling = np.flatnonzero(view.joining >= 0).tolist()
            ready = {r: int(view.since[r]) for r in filling if level(r) and not self._impossible(view, r)}
        gone = dict.fromkeys(self.silent, "silent") | dict.fromkeys(self.lost | self._unheard(), "killed")
        silent = frozenset(self.silent - self.lost - self._unheard())
        lived = {s.member: view.epoch for s in view.servers} if view is not None and alone else {}
        health = Health(gone, ready, frozenset(self.cut), silent=silent, alone=lived)
        members = Members("demo", tuple(self.present.values()))
        decision = plan(view, members, self.config, health, self.limits)
        if decision is not None and decision.view is not None:
            self._check(view, decision.view, ready)
            self.view = decision.view
        return decision

    def _unheard(self) -> set[Member]:
        """Listed, and of a name that nobody has registered: the detector finds such a one gone, also one whose
        successor came and went before anybody planned."""
        return set() if self.view is None else {s.member for s in self.view.servers if s.name not in self.present}

    def _impossible(self, view: View, r: int) -> bool:
        """Servers that are gone can no longer become level."""
        return view.as_chains.joiner_of(r) in self.lost | self.silent

    def _check(self, old: View | None, new: View, level: dict[int, int]) -> None:
        assert View.decode(new.encode()) == new
        for r in range(new.ranges):
            assert names(new, r)
        if old is None:
            assert new.epoch == 1
            return
        assert unsafe_transition(old.as_chains, new.as_chains, level) == ""
        filling = (new.joining >= 0) & (new.copy_state == CopyState.NONE)
        # Failover starts no filling; it may leave more on a source than repair would have started there.
        started = [r for r in np.flatnonzero(filling).tolist() if old.as_chains.joiner_of(r) != joiner(new, r)]
        if started:
            assert int(filling.sum()) <= self.limits.fills
            assert np.bincount(new.joining[filling]).max() <= self.limits.per_server
        assert not {joiner(new, r) for r in started} & (self.lost | self.silent)
        for r in np.flatnonzero((old.copy_state != CopyState.NONE) & (new.since == new.epoch)).tolist():
            here = {m for m in names(new, r) if m not in self.lost | self.silent and self._newest(m)}
            assert here, "only one that lives goes on without the other"

    def check_converged(self) -> None:
        """Deaths and joins have stopped: every range that has a living replica gets all it can have."""
        for _ in range(100):
            decision = self.step()
            if decision is None or decision.view is None:
                break
        else:
            raise AssertionError(f"no end of planning: {decision}")
        if self.view is None:
            return
        listed = {s.member for s in self.view.servers}
        living = len([m for m in listed if m not in self.lost and self._newest(m)])
        for r in range(self.view.ranges):
            members = names(self.view, r)
            if any(m not in self.lost and self._newest(m) for m in members):
                assert len(members) == min(self.config.replicas, living), (r, members)
                assert joiner(self.view, r) is None
            else:
                assert " wait" in self.view.reason

    def _newest(self, member: Member) -> bool:
        return self.incarnations[member.name] == member.incarnation


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["start", "stop", "kill", "restart", "silence", "speak"]), st.sampled_from("abcde")),
        st.tuples(st.sampled_from(["plan", "plan at once"]), st.sampled_from(["all", "none", "odd"])),
        st.tuples(st.just("cut"), st.sampled_from(["ab", "bc", "ad"])),
        st.tuples(st.just("mend"), st.just("")),
    ),
    max_size=40,
)
LEVELS: dict[str, Callable[[int], bool]] = {
    "all": lambda r: True,
    "none": lambda r: False,
    "odd": lambda r: r % 2 == 1,
}


def plays(events: str) -> list[tuple[str, str]]:
    """ "start c, plan all" as events."""
    return [(what, argument) for what, argument in (event.split() for event in events.split(", "))]


@settings(deadline=None)
@given(EVENTS, st.integers(1, 3), st.integers(1, 6), st.integers(1, 3))
# A name starts twice, and goes for good before the second plan, or after it; with its key, or without.
@example(plays("start c, plan all, start a, start c, stop c"), 2, 6, 3)
@example(plays("start b, plan all, start b, stop b"), 1, 6, 3)
@example(plays("start c, plan all, start a, start c, kill c"), 2, 6, 3)
@example(plays("start b, plan all, start b, kill b"), 1, 6, 3)
@example(plays("start c, plan all, start a, start c, plan all, kill c"), 2, 6, 3)
@example(plays("start c, plan all, start a, start c, plan all, stop c"), 2, 6, 3)
def test_every_step_is_safe_and_chains_become_full(
    events: Sequence[tuple[str, str]], replicas: int, fills: int, per_server: int
) -> None:
    cluster = Cluster(replicas, Limits(fills, per_server))
    for what, argument in events:
        if what.startswith("plan"):
            cluster.step(LEVELS[argument], alone=what == "plan")
        elif what in ("silence", "speak"):
            member = server(argument, cluster.incarnations[argument] or 1).member
            (cluster.silent.add if what == "silence" else cluster.silent.discard)(member)
        elif what == "cut":
            pair = [server(name, cluster.incarnations[name] or 1).member for name in argument]
            cluster.cut.add((pair[0], pair[1]))
        elif what == "mend":
            cluster.cut.clear()
        elif what == "kill":
            cluster.kill(argument)
        else:
            if what != "start":
                cluster.stop(argument)
            if what != "stop":
                cluster.start(argument)
    cluster.cut.clear()
    cluster.silent.clear()
    cluster.check_converged()


@settings(deadline=None)
@given(st.lists(st.sampled_from("abcde"), max_size=12))
def test_a_server_that_was_silent_for_a_while_is_used_again(names_: Sequence[str]) -> None:
    cluster = Cluster(2, Limits())
    for name in "abcde":
        cluster.start(name)
    cluster.step()
    for name in names_:
        member = cluster.present[name].member
        cluster.lost ^= {member}
        cluster.step()
    cluster.lost.clear()
    cluster.check_converged()
    assert cluster.view is not None
    assert cluster.view.chains.min() >= 0
    assert len(cluster.view.servers) == 5
