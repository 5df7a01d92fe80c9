"""Servers that come, drain and die together: every step is safe, and moving comes to an end."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.core.planner import Health, Members, plan
from coordinator.core.repair import Limits
from coordinator.core.view import ClusterConfig, ServerInfo
from replication.chain import Member, unsafe_transition
from tests.coordinator.checked_plans import LIMITS, first, server, spread

EVENTS = st.lists(
    st.tuples(st.sampled_from(["start", "kill", "drain", "cancel", "step", "step", "some"]), st.integers(0, 6)),
    max_size=30,
)


class History:
    """A cluster in which servers come, drain and die, with every step checked."""

    def __init__(self, ranges: int, replicas: int, limits: Limits) -> None:
        self.config = ClusterConfig(ranges, replicas)
        self.limits = limits
        self.present = {f"s{i}": server(i) for i in range(3)}
        self.gone: dict[Member, str] = {}
        self.draining: set[Member] = set()
        self.view = first(list(self.present.values()), self.config)

    def happen(self, what: str, i: int) -> None:
        name = f"s{i}"
        if what == "start" and name not in self.present:
            number = 1 + sum(m.name == name for m in self.gone)
            self.present[name] = ServerInfo(name, number, "h:1", zone="ab"[i % 2] if i > 4 else "")
        elif what == "kill" and name in self.present and len(self.present) > 1:
            self.gone[self.present.pop(name).member] = "killed"
        elif what in ("drain", "cancel") and name in self.present:
            (self.draining.add if what == "drain" else self.draining.discard)(self.present[name].member)
        elif what in ("step", "some"):
            self.step(every=what == "step", salt=i)

    def step(self, every: bool = True, salt: int = 0) -> bool:
        """Makes one decision; returns whether there was one."""
        view = self.view
        filling = np.flatnonzero(view.joining >= 0).tolist()
        alive = [r for r in filling if view.servers[view.joining[r]].member not in self.gone]
        level = {r: int(view.since[r]) for r in alive if every or (r + salt) % 3 == 0}
        of = Members("c", tuple(self.present.values()), frozenset(self.draining))
        decision = plan(view, of, self.config, Health(self.gone, level), self.limits)
        if decision is None or decision.view is None:
            return False
        new = decision.view
        assert unsafe_transition(view.as_chains, new.as_chains, level) == ""
        assert new.heads.min() >= 0
        started = (new.joining >= 0) & (new.since == new.epoch) & np.array(new.chains >= 0).any(axis=1)
        for r in np.flatnonzero(started).tolist():
            target = new.servers[new.joining[r]].member
            if view.as_chains.joiner_of(r) != target:
                assert target not in self.draining or len(self.draining) >= len(self.present)
                assert target not in self.gone
        self.view = new
        return True

    def finish(self) -> None:
        for _ in range(40 + self.config.ranges * self.config.replicas):
            if not self.step():
                break
        else:
            raise AssertionError(f"no end: {self.view.reason}")
        staying = [s for s in self.present.values() if s.member not in self.draining]
        expected = min(self.config.replicas, max(1, len(staying)))
        view = self.view
        living = {s.member for s in self.present.values()}
        for r in range(view.ranges):
            chain = view.as_chains.members_of(r)
            if living & set(chain):
                assert len(chain) == expected, (r, chain, view.reason)
                assert len(set(chain) & self.draining) == (0 if staying else 1)
        if staying and not any(m in self.gone for m in view.as_chains.members):
            assert {s.name for s in view.servers} == {s.name for s in staying}


@settings(deadline=None, max_examples=80)
@given(EVENTS, st.sampled_from([8, 32]), st.integers(1, 3), st.integers(1, 8), st.integers(1, 4))
def test_any_mix_of_joins_drains_and_deaths_comes_to_an_end(
    events: Sequence[tuple[str, int]], ranges: int, replicas: int, fills: int, per_server: int
) -> None:
    history = History(ranges, replicas, Limits(fills, per_server))
    for what, i in events:
        history.happen(what, i)
    history.finish()


def test_two_servers_join_while_another_drains_and_a_third_dies() -> None:
    history = History(64, 2, Limits(16, 4))
    for what, i in [("start", 3), ("start", 4), ("drain", 0), ("some", 0), ("kill", 1), ("some", 1), ("step", 0)]:
        history.happen(what, i)
    history.finish()
    assert {s.name for s in history.view.servers} == {"s2", "s3", "s4"}
    assert spread(history.view.chains, history.view) <= 1.15


def test_a_move_whose_target_or_source_dies_is_dropped_or_redone() -> None:
    for victim in (0, 3):
        history = History(64, 2, LIMITS)
        history.happen("start", 3)
        history.step()
        assert (history.view.joining >= 0).any()
        history.happen("kill", victim)
        history.finish()
        assert history.view.chains.min() >= 0
        assert (history.view.leaving == -1).all()
