"""Failure detection faster than leases: which servers are gone, and whether the leader is gone. Pure.

`Detector` judges servers by what a coordinator hears from them. Each word below has one meaning here:

- *lost*: the connection to a server has ended. Alone it proves nothing: the next attempt shows more.
- *silent*: nothing has been heard of a server for SILENCE_S, with or without a connection.
- *ended*: the process is over, as far as is known. A connection was refused, or another process answered.
- *gone*: not counted on, until it is heard again. A server is gone when it has ended; when it is silent; and when it
  has no key in the store and has been lost for UNREGISTERED_S.
- *overdue*: gone for OVERDUE_S. The planner no longer keeps its late copies for it, and repairs their ranges.
- *unreachable*: a pair of servers that are both well, of which one has not reached the other for SUSPECTED_S.
- *stalled*: a pair of servers, one of which fills the other and makes no progress.
- *ill*: the coordinator itself, which hears badly. All servers fell silent within TOGETHER_S; or more than half of them
  did, and those that are silent have their keys, which only living servers renew. No server is gone for such a silence.
  A coordinator that was suspended (its tick came LATE_S too late) counts every server as heard just now.

docs/internals/failures.md has the same as a table. Leases are the backstop, and alone they prove nothing: after an
outage of the store all of them have run out, those of healthy servers too. A wrong verdict costs a repair, never
correctness.

`Succession` judges the leader by what its servers hear from it. The leader's lease says the same, seconds later;
servers notice at once that the leader's connections end, or that its beats do. So a standby listens to the servers, and
ends the term of a leader that at least half of them have lost and none still has. A wrong judgement costs an election:
the key of the office is deleted at its own revision, and a deposed leader cannot write.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeAlias

from coordinator.core.capacities import RowCount
from coordinator.core.clocks import UNKNOWN, ClusterTime
from coordinator.core.planner import Health
from coordinator.core.repair import Capacity
from coordinator.core.view import ServerInfo, View
from replication.chain import Member
from replication.effects import CaughtUp

# Of servers. They report ten times a second.
SILENCE_S = 0.7  # a server of which nothing is heard for so long is silent
TOGETHER_S = 0.3  # silences that begin within this time have one cause
UNREGISTERED_S = 0.1  # a server without a key and, for so long, without a connection is gone
WELL_S = 0.25  # a server that was heard within this time is well
SUSPECTED_S = 1.0  # a pair of servers is unreachable if one has not reached the other for so long
OVERDUE_S = 3.0  # a server that is gone for so long is overdue
STALLED_S = 30.0  # for so long a server does not fill again a joiner that it could not fill
UNREACHABLE_S = 10.0  # for so long an unreachable pair is remembered: former neighbours do not report it again
TICK_S = 0.05  # how often `tick` is to be called
LATE_S = 0.2  # a tick that comes this much later than planned: the leader was suspended, and heard nobody
STALE_S = 0.5  # for so long after a suspension reports may be old: they waited to be read

# Of the leader.
BEAT_S = 0.1  # how often a leader speaks to each server
LOST_S = 0.05  # without a connection for so long a leader is lost: one that lives connects again much sooner
SILENT_S = 2.0  # a leader silent for so long on open connections is lost; plans of large views take a while
FRESH_S = 0.3  # reports that are older say nothing of the leader now

_STEPS = 50  # in which a server's memory is measured, for `Load.step`


class Tenure(NamedTuple):
    """What a server knows of the leader.

    term       of the newest leader that has spoken to the server, 0 for none
    connected  whether that leader has a connection to it
    silent_s   for how long the leader has said nothing there, or has had no connection
    """

    term: int = 0
    connected: bool = False
    silent_s: float = 0.0


class Memory(NamedTuple):
    """The memory of a server, in bytes: used; mark, up to which ranges may move to it; full, up to which repairs may
    fill it. All are 0 for a server without a limit."""

    used: int = 0
    mark: int = 0
    full: int = 0

    def capacity(self, range_bytes: float) -> Capacity:
        """Returns for how many more ranges of that size the server has memory."""
        size = max(1.0, range_bytes)
        return Capacity(int((self.full - self.used) / size), int((self.mark - self.used) / size))


_NO_LIMIT = Memory()
_NO_LEADER = Tenure()


@dataclass(frozen=True)
class Report:
    """The state of a server, which it reports to every coordinator ten times a second; a missing report is a sign, too.

    epoch     of the view that it follows
    levels    joining replicas that are level, as this server finds as their tail; repeated in every report
    suspects  members that it has not been able to reach, and for how many seconds
    stalled   joining replicas that it fills and that have made no progress for too long
    tenure    what it knows of the leader
    nbytes    of the rows stored there; requests: done since it started
    memory    what it uses of what it may use
    alone     it has been, for a while, the only replica beside retained copies, of ranges since up to this epoch
    spent     (range, fill) of late copies whose missing operations it no longer has; repeated in every report
    headed    ranges that it heads; counts: its rows there of tables with a bound on them
    seconds   the time by its wall clock, since 1970; 0 if it does not tell
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
    headed: int = 0
    counts: tuple[RowCount, ...] = ()
    seconds: float = 0.0


class ServerLink(Protocol):
    """A coordinator's connection to one server. No method but `reports` waits."""

    def reports(self) -> AsyncIterator[Report | View]:
        """Yields the server's reports as they come, and the view that `ask_view` asked for. Ends, or raises OSError,
        when the connection ends."""

    def beat(
        self, term: int, epoch: int = 0, allowances: Sequence[RowCount] = (), cluster_time: ClusterTime = UNKNOWN
    ) -> None:
        """Tells the server that the leader of that term is there, how many rows it may keep, under the view of `epoch`,
        of tables that are above their capacity, and what time it is."""

    def send_view(self, view: View, difference: bytes | None = None) -> None:
        """Sends a view, which a server that has it ignores; or only its encoded difference from the view that the
        server has."""

    def ask_view(self) -> None:
        """Asks for the view that the server follows."""


Dial: TypeAlias = Callable[[ServerInfo, str], AbstractAsyncContextManager[ServerLink]]
"""Connects to a server of the cluster with that identity.

Raises ConnectionRefusedError if nobody listens there, PermissionError if another incarnation answers, or a server of
another cluster, and any other OSError if a later attempt may succeed."""


class Gone(NamedTuple):
    """Why a member is not counted on, and since when, on the clock of the events. ended: its process has ended, as far
    as is known; otherwise it may be heard again."""

    why: str
    at: float
    ended: bool = False


class Load(NamedTuple):
    """The bytes stored at a server, the requests done since it started, and its memory."""

    nbytes: int
    requests: int
    memory: Memory = _NO_LIMIT

    @property
    def step(self) -> int:
        """The memory in use in coarse steps: the planner looks again when it changes."""
        return _STEPS * self.memory.used // max(1, self.memory.full)


@dataclass(eq=False)
class _Peer:
    """What was heard of one member.

    heard       when it last gave a sign of life; at first, when this coordinator began to listen
    registered  its key is in the store
    met         it has reported
    lost        when its connection ended; None while there is one, or if there never was one
    gone        why it is not counted on; None if it is
    load        its bytes, requests and memory, as reported last
    alone       as reported last; 0 once the connection is lost, because the process may have ended with it
    epoch       of the view that it follows, as reported last; 0 for none
    back        when it was last heard again after it had been gone
    overdue     it has been gone for so long that it is no longer expected back
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
    """Takes events, each with its time, and says which members are gone. An event returns whether the planner should
    look again. ill: this coordinator hears so few servers that it must be what is ill, and not they."""

    def __init__(self) -> None:
        self.ill = False
        self._peers: dict[Member, _Peer] = {}
        self._levels: dict[int, CaughtUp] = {}
        self._spent: dict[int, int] = {}  # range -> fill
        self._unreachable: dict[tuple[Member, Member], float] = {}  # until when
        self._stalled: dict[tuple[Member, Member], float] = {}  # until when
        self._ticked: float | None = None
        self._late = -STALE_S  # when the leader was last found to have been suspended

    # -- events -----------------------------------------------------------------------------------------------------

    def watch(self, members: Mapping[Member, bool], now: float) -> None:
        """Judges these members from now on, and forgets all others. members: whether each has its key in the store."""
        for member, registered in members.items():
            self.note(member, registered, now)
        for member in self._peers.keys() - members.keys():
            self.forget(member)

    def note(self, member: Member, registered: bool, now: float) -> None:
        """Judges this member, too, from now on. registered: whether it has its key in the store."""
        peer = self._peers.get(member)
        if peer is None:
            self._peers[member] = _Peer(now, registered)
        else:
            peer.registered = registered

    def forget(self, member: Member) -> None:
        """Judges this member no more."""
        self._peers.pop(member, None)

    def reset_epochs(self) -> None:
        """Forgets all epochs: the servers are another cluster's from now on, whose epochs begin at 1 again."""
        self._levels.clear()
        self._spent.clear()
        for peer in self._peers.values():
            peer.epoch = 0

    def connected(self, member: Member, now: float) -> None:
        """The member answered a call. Only its reports show that it works."""
        peer = self._peers.get(member)
        if peer is not None:
            peer.heard, peer.lost = now, None

    def heard(self, member: Member, report: Report, now: float) -> bool:
        """The member has reported."""
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
        """The connection ended; the next attempt will show whether the member is gone."""
        peer = self._peers.get(member)
        if peer is not None and peer.lost is None:
            peer.lost, peer.alone = now, 0
        return False

    def refused(self, member: Member, why: str, now: float) -> bool:
        """Nobody listens at the member's address, or another server does."""
        peer = self._peers.get(member)
        if peer is None:
            return False
        return self._give_up(peer, why if peer.lost is None else f"connection lost, then {why}", now, ended=True)

    def tick(self, now: float) -> bool:
        """Time has passed. To be called every TICK_S; a late call means that nothing could be heard meanwhile."""
        late = self._is_late(now)
        self._ticked = now
        if late:
            self._late = now
            self._listen_afresh(now)
        expired = False
        for pairs in (self._unreachable, self._stalled):
            for pair in [pair for pair, until in pairs.items() if until <= now]:
                del pairs[pair]
                expired = True
        for peer in self._peers.values():
            if peer.gone is not None and not peer.overdue and now - peer.gone.at > OVERDUE_S:
                peer.overdue = expired = True
        return self._judge_silence(now) or expired

    # -- state ------------------------------------------------------------------------------------------------------

    @property
    def awaited(self) -> bool:
        """Whether a member that is not gone has yet to report."""
        return any(not peer.met and peer.gone is None for peer in self._peers.values())

    @property
    def gone(self) -> dict[Member, Gone]:
        """The members that must not be counted on, and why."""
        return {member: peer.gone for member, peer in self._peers.items() if peer.gone is not None}

    @property
    def loads(self) -> dict[Member, Load]:
        """The newest load of each server that has reported."""
        return {member: peer.load for member, peer in self._peers.items() if peer.load is not None}

    def heard_at(self, member: Member) -> float:
        """Returns when a member was last heard."""
        return self._peers[member].heard

    def health(self, view: View | None) -> Health:
        """Returns what the planner needs to know of the servers of this view.

        A joiner stays level even if the server that reported it dies, because acknowledgements wait for the joiner
        until a view ends that. So a report of a level joiner counts as long as the filling that it names is the present
        one.
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
            cut=frozenset(self._unreachable),
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
        """Notes that two members cannot reach each other. Returns whether that is new.

        Only if both are well: a suspect that is silent towards this coordinator, too, is judged by its silence a little
        later. Otherwise a frozen server that has not been known for long would cost its healthy neighbours their
        ranges; so would one that died while this coordinator was suspended, and whose last reports are read only now.
        A member that has just come back, and any that cannot reach it, report on the time before."""
        if self._is_late(now) or now - self._late < STALE_S:
            return False
        peer = self._peers.get(suspect)
        if peer is None or by not in self._peers or peer.gone is not None or peer.lost is not None or by == suspect:
            return False
        if not peer.met or now - peer.heard > WELL_S or now - max(peer.back, self._peers[by].back) < SUSPECTED_S:
            return False
        pair = (min(by, suspect), max(by, suspect))
        fresh = pair not in self._unreachable
        self._unreachable[pair] = now + UNREACHABLE_S
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
        # A member that still spoke when others had been silent for a while shows that this coordinator can hear.
        newest = max((peer.heard for peer in present), default=now)
        doubtful = [peer for peer in silent if len(present) > 1 and newest - peer.heard <= TOGETHER_S]
        many = self._with_most([peer for peer in silent if peer.registered])
        self.ill = bool(many) or (bool(doubtful) and len(silent) == len(present))
        spared = {*doubtful, *many}
        changed = False
        for peer in present:
            if not peer.registered and self._unheard(peer, now):
                changed |= self._give_up(peer, "not registered and not heard", now)
        for peer in silent:
            if peer not in spared:
                changed |= self._give_up(peer, f"silent for {now - peer.heard:.1f} s", now)
        return changed

    def _with_most(self, silent: list[_Peer]) -> list[_Peer]:
        """Returns those of these members that fell silent together with more than half of the members that were present
        then. It counts members that were given up since because their leases ran out."""
        if not silent:
            return []
        peers = self._peers.values()
        present = sorted(peer.heard for peer in peers if peer.gone is None)
        counted = sorted(peer.heard for peer in peers if peer.gone is None or not peer.registered)

        def together(heard: list[float], at: float) -> int:
            return bisect_right(heard, at + TOGETHER_S) - bisect_left(heard, at - TOGETHER_S)

        return [peer for peer in silent if together(counted, peer.heard) + together(present, peer.heard) > len(present)]

    def _unheard(self, peer: _Peer, now: float) -> bool:
        """Whether a member without a lease is without a connection, too. The two fail for different reasons, so that no
        third sign is needed."""
        return now - peer.heard > SILENCE_S or (peer.lost is not None and now - peer.lost > UNREGISTERED_S)

    def _listen_afresh(self, now: float) -> None:
        for peer in self._peers.values():
            peer.heard = max(peer.heard, now)
            if peer.lost is not None:
                peer.lost = now


class Succession:
    """What the servers report of the leader, as a standby hears it."""

    def __init__(self) -> None:
        self._reports: dict[Member, tuple[Tenure, float]] = {}

    def heard(self, member: Member, tenure: Tenure, now: float) -> None:
        """The member has reported what it knows of the leader."""
        self._reports[member] = tenure, now

    def lost_term(self, servers: Collection[Member], now: float) -> int:
        """Returns the term of the leader if at least half of these servers have lost it and none still has it; else
        0."""
        self._reports = {member: reports for member, reports in self._reports.items() if member in servers}
        fresh = [(tenure, now - at) for tenure, at in self._reports.values() if now - at <= FRESH_S]
        term = max((tenure.term for tenure, _ in fresh), default=0)
        lost = [
            tenure.silent_s + since > (SILENT_S if tenure.connected else LOST_S)
            for tenure, since in fresh
            if tenure.term == term
        ]
        return term if lost and all(lost) and 2 * len(lost) >= len(servers) else 0
