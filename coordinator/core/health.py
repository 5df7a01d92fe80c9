"""Failure detection faster than leases: what a leader hears from servers, and what it makes of that. Pure.

A connection that ends and is refused when made again: dead, now. Silence: suspect, and treated as gone until it is
heard again. Silence of all at the same time, or of more than half of them while they renew their leases: it is the
leader that is ill, and nobody is gone for it. Leases are the backstop, and alone they prove nothing: after an outage of
the store they have all run out, of healthy servers too. So a server without its key is gone only if it is not heard
either. A wrong suspicion costs a repair, never correctness.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeAlias

from coordinator.core.planner import Health
from coordinator.core.repair import Capacity
from coordinator.core.succession import Tenure
from coordinator.core.view import ServerInfo, View
from replication.chain import Member
from replication.effects import CaughtUp

SILENCE_S = 0.7  # without a word: suspect
TOGETHER_S = 0.3  # silences that begin within this time have one cause
UNREGISTERED_S = 0.1  # without a connection and without a key: gone; the connection may just be made again
WELL_S = 0.25  # reports come ten times a second
SUSPECTED_S = 1.0  # a peer has not been reached by another for so long: the two are cut off from each other
OVERDUE_S = 3.0  # so long after it was given up nobody waits any more for one that may be heard again
STALLED_S = 30.0  # who could not be filled by a server is not filled by it again for so long
CUT_S = 10.0  # a cut is remembered after it was last reported: nobody reports on a peer that is no neighbour any more
TICK_S = 0.05  # how often `tick` is to be called
LATE_S = 0.2  # a tick that comes this much later than planned: the leader was suspended, and heard nobody
_STEPS = 50
STALE_S = 0.5  # so long after that a report may be an old one, which waited to be read


class Memory(NamedTuple):
    """Bytes that a server uses; up to where ranges may move to it, and up to where it may be filled in a repair. All 0:
    it has no limit."""

    used: int = 0
    mark: int = 0
    full: int = 0

    def capacity(self, range_bytes: float) -> Capacity:
        """How many more ranges of that size it has memory for."""
        size = max(1.0, range_bytes)
        return Capacity(int((self.full - self.used) / size), int((self.mark - self.used) / size))


_NO_LIMIT = Memory()
_NO_LEADER = Tenure()


@dataclass(frozen=True)
class Report:
    """What a server tells a leader, many times a second: its silence is news too.

    epoch     of the view that it acts under
    levels    joining replicas that are level, as its tails found: state, told again in every report
    suspects  members that it has not been able to reach, and for how many seconds
    stalled   joining replicas that have not got on with what it fills them with, for longer than is bearable
    tenure    what it knows of the leader
    nbytes    stored there; requests: done since it started
    memory    what it uses of what it may
    alone     it has lived on for a while as the single replica, beside kept copies, of ranges since up to this epoch
    spent     (range, fill) of late copies for which it no longer has what they lack: state, told again as levels are
    """

    epoch: int
    levels: tuple[CaughtUp, ...] = ()
    suspects: dict[Member, float] = field(default_factory=dict)
    stalled: frozenset[Member] = frozenset()
    nbytes: int = 0
    requests: int = 0
    memory: Memory = _NO_LIMIT
    tenure: Tenure = _NO_LEADER
    alone: int = 0
    spent: tuple[tuple[int, int], ...] = ()


class ServerLink(Protocol):
    """A coordinator's connection to one server. Reports end, or raise OSError, when the connection does."""

    def reports(self) -> AsyncIterator[Report | View]:
        """What the server says, as it comes; a view, where it was asked for it."""

    def beat(self, term: int) -> None:
        """Tells it, without waiting, that the leader of that term is there."""

    def send_view(self, view: View) -> None:
        """Gives it a view without waiting; it ignores one that it has."""

    def ask_view(self) -> None:
        """Asks for the view that it follows, without waiting."""


Dial: TypeAlias = Callable[[ServerInfo, str], AbstractAsyncContextManager[ServerLink]]
"""Connects to a server, of a cluster with that identity. ConnectionRefusedError: nobody listens there. ConnectionError
or another OSError: try again.
PermissionError: it is another incarnation, or another cluster's, that answers there."""


class Gone(NamedTuple):
    """Why a member is not counted on, and since when (on the clock of the events). ended: it has, for all we know; else
    it may be heard again."""

    why: str
    at: float
    ended: bool = False


class Load(NamedTuple):
    """Bytes stored at a server, requests done since it started, and its memory."""

    nbytes: int
    requests: int
    memory: Memory = _NO_LIMIT

    @property
    def step(self) -> int:
        """Changes when the memory in use has changed so much that the planner should look again."""
        return _STEPS * self.memory.used // max(1, self.memory.full)


@dataclass(eq=False)
class _Peer:
    """What was heard of one member.

    heard    last sign of life; at first, when we began to listen
    met      it has reported; load: what it said last of its bytes and requests
    lost     when its connection ended, None while there is one or it was never made
    alone    as it reported last, on the connection that there is: with that it may have ended
    epoch    of the view that it follows, as it reported last; 0 for none
    back     since when it has been there, after it had not
    overdue  it has been gone for so long that nobody waits for it
    """

    heard: float
    registered: bool
    met: bool = False
    lost: float | None = None
    gone: Gone | None = None
    load: Load | None = None
    alone: int = 0
    epoch: int = 0
    back: float = float("-inf")
    overdue: bool = False


class Detector:
    """Events in, with the time; who is gone out. Each event returns whether anything changed for the planner."""

    def __init__(self) -> None:
        self.ill = False
        self._peers: dict[Member, _Peer] = {}
        self._levels: dict[int, CaughtUp] = {}
        self._spent: dict[int, int] = {}  # range -> fill
        self._cuts: dict[tuple[Member, Member], float] = {}
        self._stalled: dict[tuple[Member, Member], float] = {}  # until when
        self._ticked: float | None = None
        self._late = -STALE_S  # when the leader was last found to have been suspended

    # -- events -----------------------------------------------------------------------------------------------------

    def watch(self, members: Mapping[Member, bool], now: float) -> None:
        """These are the members to judge, all others are forgotten; True: its key is in the store."""
        for member, registered in members.items():
            peer = self._peers.setdefault(member, _Peer(now, registered))
            peer.registered = registered
        for member in self._peers.keys() - members.keys():
            del self._peers[member]

    def reset_epochs(self) -> None:
        """The servers are another cluster's from now on, whose epochs begin at 1 again."""
        self._levels.clear()
        self._spent.clear()
        for peer in self._peers.values():
            peer.epoch = 0

    def connected(self, member: Member, now: float) -> None:
        """It answered, and it is the incarnation that was called. Only its reports show that it does its work."""
        peer = self._peers.get(member)
        if peer is not None:
            peer.heard, peer.lost = now, None

    def heard(self, member: Member, report: Report, now: float) -> bool:
        """It told how it is."""
        changed = self._alive(member, now)
        if member in self._peers:
            before = self._peers[member].load
            load = self._peers[member].load = Load(report.nbytes, report.requests, report.memory)
            changed |= before is not None and before.step != load.step
            changed |= self._peers[member].alone < report.alone
            self._peers[member].alone = report.alone
            self._peers[member].epoch = report.epoch
        for level in report.levels:
            known = self._levels.get(level.range)
            if known is None or known.fill < level.fill:
                self._levels[level.range] = level
                changed = True
        for r, fill in report.spent:
            if self._spent.get(r, 0) < fill:
                self._spent[r] = fill
                changed = True
        for suspect, seconds in report.suspects.items():
            changed |= seconds > SUSPECTED_S and self._suspected(member, suspect, now)
        for joiner in report.stalled:
            pair = min(member, joiner), max(member, joiner)
            changed |= pair not in self._stalled
            self._stalled[pair] = now + STALLED_S
        return changed

    def lost(self, member: Member, now: float) -> bool:
        """The connection ended. Nothing is known yet: the next attempt tells."""
        peer = self._peers.get(member)
        if peer is not None and peer.lost is None:
            peer.lost, peer.alone = now, 0
        return False

    def refused(self, member: Member, why: str, now: float) -> bool:
        """Nobody listens at its address, or somebody else does."""
        peer = self._peers.get(member)
        if peer is None:
            return False
        return self._give_up(peer, why if peer.lost is None else f"connection lost, then {why}", now, ended=True)

    def tick(self, now: float) -> bool:
        """Time has passed. To be called every TICK_S, and late only if nothing could be heard meanwhile."""
        late = self._is_late(now)
        self._ticked = now
        if late:
            self._late = now
            self._listen_afresh(now)
        expired = False
        for pairs in (self._cuts, self._stalled):
            for pair in [pair for pair, until in pairs.items() if until <= now]:
                del pairs[pair]
                expired = True
        for peer in self._peers.values():
            if peer.gone is not None and not peer.overdue and now - peer.gone.at > OVERDUE_S:
                peer.overdue = expired = True
        return self._judge_silence(now) or expired

    # -- state ------------------------------------------------------------------------------------------------------

    @property
    def gone(self) -> dict[Member, Gone]:
        """The members that must not be counted on."""
        return {member: peer.gone for member, peer in self._peers.items() if peer.gone is not None}

    @property
    def loads(self) -> dict[Member, Load]:
        """What each server that has reported said last."""
        return {member: peer.load for member, peer in self._peers.items() if peer.load is not None}

    def heard_at(self, member: Member) -> float:
        """When it was last heard."""
        return self._peers[member].heard

    def health(self, view: View | None) -> Health:
        """What the planner needs, of this view.

        A level joiner stays level whatever becomes of who reported it, because acknowledgements wait for it until a
        view ends that; so a report is good for as long as the filling that it speaks of is the present one.
        """
        level: dict[int, int] = {}
        if view is not None:
            chains = view.as_chains
            for r, (_, fill, joiner) in list(self._levels.items()):
                if not 0 <= r < view.ranges or fill < view.since[r]:
                    del self._levels[r]
                elif fill == view.since[r] and chains.joiner_of(r) == joiner:
                    level[r] = fill
            self._spent = {r: f for r, f in self._spent.items() if 0 <= r < view.ranges and f >= view.since[r]}
        held = 0 if view is None else int((view.chains >= 0).sum())
        size = sum(load.nbytes for load in self.loads.values()) / max(1, held)
        return Health(
            gone={member: gone.why for member, gone in self.gone.items()},
            level=level,
            cut=frozenset(self._cuts),
            stalled=frozenset(self._stalled),
            pending=frozenset(member for member, peer in self._peers.items() if not peer.met),
            silent=frozenset(member for member, gone in self.gone.items() if not gone.ended),
            overdue=frozenset(member for member, peer in self._peers.items() if peer.overdue),
            spent=dict(self._spent),
            alone={member: peer.alone for member, peer in self._peers.items() if peer.alone},
            epochs={m: peer.epoch for m, peer in self._peers.items() if peer.met and peer.gone is None},
            capacity={m: load.memory.capacity(size) for m, load in self.loads.items() if load.memory.full},
        )

    # -- judgement --------------------------------------------------------------------------------------------------

    def _alive(self, member: Member, now: float) -> bool:
        peer = self._peers.get(member)
        if peer is None:
            return False
        changed = peer.gone is not None or not peer.met
        if peer.gone is not None:
            peer.back = now
        peer.heard, peer.met, peer.lost, peer.gone, peer.overdue = now, True, None, None, False
        return changed

    def _suspected(self, by: Member, suspect: Member, now: float) -> bool:
        """Only where both are well: who is silent towards us too is judged by that, a little later. Else a frozen
        server that we have not known for long would cost its healthy neighbours their ranges; so would one that died
        while we were suspended, and whose last reports we read only now. Who has just come back, and whoever cannot
        reach it, speak of the time before."""
        if self._is_late(now) or now - self._late < STALE_S:
            return False
        peer = self._peers.get(suspect)
        if peer is None or by not in self._peers or peer.gone is not None or peer.lost is not None or by == suspect:
            return False
        if not peer.met or now - peer.heard > WELL_S or now - max(peer.back, self._peers[by].back) < SUSPECTED_S:
            return False
        pair = (min(by, suspect), max(by, suspect))
        fresh = pair not in self._cuts
        self._cuts[pair] = now + CUT_S
        return fresh

    def _is_late(self, now: float) -> bool:
        return self._ticked is not None and now - self._ticked > TICK_S + LATE_S

    def _give_up(self, peer: _Peer, why: str, now: float, ended: bool = False) -> bool:
        if peer.gone is not None and peer.gone.ended >= ended:
            return False
        peer.gone = Gone(why, now if peer.gone is None else peer.gone.at, ended)
        return True

    def _judge_silence(self, now: float) -> bool:
        present = [peer for peer in self._peers.values() if peer.gone is None]
        silent = [peer for peer in present if now - peer.heard > SILENCE_S]
        # Whoever still spoke when others had been silent for a while shows that our ears are in order.
        newest = max((peer.heard for peer in present), default=now)
        doubtful = [peer for peer in silent if len(present) > 1 and newest - peer.heard <= TOGETHER_S]
        many = [peer for peer in silent if peer.registered and self._with_most(peer)]
        self.ill = bool(many) or (bool(doubtful) and len(silent) == len(present))
        changed = False
        for peer in present:
            if not peer.registered and self._unheard(peer, now):
                changed |= self._give_up(peer, "not registered and not heard", now)
        for peer in silent:
            if peer not in doubtful and peer not in many:
                changed |= self._give_up(peer, f"silent for {now - peer.heard:.1f} s", now)
        return changed

    def _with_most(self, silent: _Peer) -> bool:
        """Whether more than half fell silent together with it, of those that were present then: leases of some may have
        run out since."""
        together = others = 0
        for peer in self._peers.values():
            if abs(peer.heard - silent.heard) <= TOGETHER_S:
                together += peer.gone is None or not peer.registered
            else:
                others += peer.gone is None
        return together > others

    def _unheard(self, peer: _Peer, now: float) -> bool:
        """Lease and connection say the same, and they fail for different reasons: no need for a third sign."""
        return now - peer.heard > SILENCE_S or (peer.lost is not None and now - peer.lost > UNREGISTERED_S)

    def _listen_afresh(self, now: float) -> None:
        for peer in self._peers.values():
            peer.heard = max(peer.heard, now)
            if peer.lost is not None:
                peer.lost = now
