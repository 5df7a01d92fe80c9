"""One server: what it is made of, and what a new view or roster changes. Opens no socket but those to other replicas.

Single-threaded: everything runs in the server's event loop, so a frame is judged, applied and answered without a lock,
and no other frame can come in between. A connection gives its frames to its role: a worker's to pushes, pulls, barrier
and data shards, a replica's to the links. They ask `serving` what may be done here, and have the executor do it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

from coordinator.core import fields
from coordinator.core.view import Roster, ServerInfo, View
from elasticps.checkpoint.row_writer import RowWriter, ThreadRowWriter
from elasticps.security.gate import Gate
from elasticps.server.admin import Subject
from elasticps.server.core.barrier import BarrierCoordinator
from elasticps.server.core.bounded_delay import BoundedDelay
from elasticps.server.core.data_shards import ShardDispenser
from elasticps.server.core.group_log import GroupLog
from elasticps.server.core.headroom import NO_LIMIT, Headroom, Memory
from elasticps.server.core.registered import Entry, Registered
from elasticps.server.core.serving import Serving
from elasticps.server.core.view_exchange import HeldFrames, Herald
from elasticps.server.fast.path import FastPath
from elasticps.server.network.busy_poll import Linger
from elasticps.server.network.connection import Connection, Role
from elasticps.server.network.streams import streams
from elasticps.server.roles.checkpoints import ASIDE_BYTES, WORKING_S, Checkpoints
from elasticps.server.roles.counts import Counts
from elasticps.server.roles.cuts import Cuts
from elasticps.server.roles.executor import Executor
from elasticps.server.roles.handshake import Handshake
from elasticps.server.roles.leaders import Leaders
from elasticps.server.roles.memory_limit import MemoryLimit
from elasticps.server.roles.pulls import Pulls
from elasticps.server.roles.pushes import Pushes
from elasticps.server.roles.reductions import Reductions
from elasticps.server.roles.replica_links import ReplicaLinks
from elasticps.server.roles.restoring import KEPT_BYTES, Restorer
from elasticps.server.roles.snapshots import SnapshotSender
from elasticps.server.roles.stall_detector import Standstill
from elasticps.server.roles.subscriptions import News
from elasticps.server.roles.worker_activity import Uses
from elasticps.system.descriptors import NO_LIMIT as MANY
from elasticps.system.descriptors import Connections
from replication.chain import Member
from replication.refusals import MOST_BYTES

log = fields.logger(__name__)

LOG_BUDGET_BYTES = 256 << 20


class Server:
    """State and behaviour of one server; `process.serve` connects it to sockets and to the coordination store.

    removed: done when a view has left this server out: its copy is void, and it may come back as a new incarnation.
    """

    def __init__(
        self, me: ServerInfo, cluster: str, ranges: int, loop: asyncio.AbstractEventLoop, *,
        log_budget_bytes: int = LOG_BUDGET_BYTES, clock: Callable[[], float] = time.monotonic,
        linger: Linger | None = None, memory: Memory = NO_LIMIT, gate: Gate | None = None,
        filing: RowWriter | None = None, allowed: Connections = MANY,
    ) -> None:  # fmt: skip
        self.me = me
        self.member = Member(me.name, me.incarnation)
        self.cluster = cluster
        self._loop = loop
        self.removed: asyncio.Future[None] = loop.create_future()
        self._left_out = False
        self._linger = linger or Linger(loop)
        self.headroom = Headroom(me.name, memory)
        log_budget_bytes = memory.share(log_budget_bytes)
        self.fast = FastPath(ranges, log_budget_bytes)
        self.counts = counts = Counts(self.fast)
        self.executor = executor = Executor(self.member, ranges, log_budget_bytes, self.fast)
        self.store, self.replica = executor.store, executor.replica
        self.replica.refusals.most_bytes = memory.share(MOST_BYTES)
        self.serving = serving = Serving(self.member, ranges, self.replica)
        self.herald = herald = Herald(loop.call_soon)
        self.news = news = News(loop, executor, serving, self.adopt)
        self.held = held = HeldFrames(serving, herald, clock, news.need_view, news.need)
        self.streams = streams(loop, Gate() if gate is None else gate, self.fast, self._linger)
        self.links = ReplicaLinks(cluster, ranges, executor, loop, self.streams.dial, self.connection, news)
        self.snapshots = SnapshotSender(loop, executor, serving, self.links)
        served = self.snapshots.served
        self.delay = BoundedDelay(ranges, self.replica.clocks, clock)
        self.registered = Registered(self.store, news.need, news.need_keys)
        self.pulls = Pulls(serving, held, herald, self.delay, self.store, self.registered, self.replica, counts, served)
        self.reductions = reductions = Reductions(loop, serving, held, herald, self.store, self.registered, self.pulls)
        self.memory = MemoryLimit(self.headroom, self.store, self.fast, self.links, me.name)
        self.pushes = Pushes(serving, held, herald, executor, self.memory, self.registered, counts, served)
        group = GroupLog(serving, held, herald, self.replica, executor.rounds, executor.perform)
        shards = ShardDispenser(group, executor.shards)
        self._barrier = BarrierCoordinator(group, clock)
        self.leaders = Leaders(loop, serving, executor, self.links, self.snapshots, self.headroom, counts)

        self.restoring = Restorer(loop, executor, serving, self.memory, self.fast.told, memory.share(KEPT_BYTES))
        self.checkpoints = Checkpoints(
            loop, executor, serving, filing or ThreadRowWriter(loop), (memory.share(ASIDE_BYTES), log_budget_bytes),
            lambda: self.snapshots.served_within(WORKING_S),
        )  # fmt: skip
        uses = Uses(serving, lambda: self.handshake.workers, clock)
        cuts = Cuts(serving, executor, lambda: self.handshake.workers, self.checkpoints.wait, clock)

        handlers = {
            **self.pushes.handlers, **self.pulls.handlers, **self._barrier.handlers, **shards.handlers,
            **cuts.handlers, **held.handlers, **reductions.handlers, **uses.handlers,
        }  # fmt: skip
        forgotten = self.pulls.forget, self.pushes.forget, reductions.forget, uses.forget
        self.worker = Role(handlers, *forgotten, rest=self.pulls.rest)
        handlers = {**self.links.handlers, **self.memory.handlers, **held.handlers, **news.handlers}
        self.peer = Role(handlers, self.links.lost)
        self.handshake = Handshake(
            cluster, serving, held, news, self.links, self.leaders, self.worker, self.peer, cuts.greet, allowed
        )
        self.subject = Subject(
            me, serving, executor, self.fast, counts, herald, self.delay, self.snapshots, self.headroom,
            self.handshake, cuts, uses, self.restoring, clock,
        )  # fmt: skip
        self.standstill = Standstill(clock, executor)
        self.fast.connect(self.links.link, self.pulls.changed, served, executor.note_shard, self.standstill.look)

    # --- connections ------------------------------------------------------------------------------------------------

    def connection(self) -> Connection:
        """A protocol object for a new connection, accepted or dialled."""
        return Connection(self.handshake.newcomer, self.herald, self._loop, self._linger, self.fast)

    def close(self) -> None:
        """Drops every connection, and gives up what is being written of a checkpoint, or read."""
        self.checkpoints.close()
        self.restoring.close()
        self.links.close()
        self.handshake.close()
        self.streams.close()

    # --- views and rosters ------------------------------------------------------------------------------------------

    def adopt(self, view: View) -> None:
        """Takes a newer view of our cluster; frames that waited for it go on. None after one that has left us out: what
        is void stays void, though a leader that has not heard of it yet may give us ranges again."""
        serving = self.serving
        if view.epoch <= serving.epoch or view.cluster != self.cluster or self._left_out:
            return
        listed = serving.adopt(view)
        self.herald.adopt(view)
        if not listed:
            log.warning("left out", epoch=view.epoch, reason=view.reason)
            self._left_out = True
            self.removed.set_result(None)
            return
        self.delay.serve(serving.tailed, serving.held)
        self.fast.serve(serving.tailed, serving.held, serving.tail_since, serving.full_since)
        self.links.adopt(view)
        self.headroom.adopt(view, self.member)
        self.executor.perform(self.replica.adopt, view.as_chains)
        self.leaders.adopt(view)
        log.info("adopted", epoch=view.epoch, headed=len(serving.headed), reason=view.reason)
        if serving.concerns_workers():
            self.herald.tell_all(self.handshake.workers)
        self._judge()

    def follow(self, roster: Roster) -> None:
        """Takes a newer roster: fences older incarnations, forgets who left, lets what waits be judged again."""
        if roster.version <= self.serving.roster_version or roster.cluster != self.cluster:
            return
        before = self.serving.workers
        self.serving.follow(roster)
        workers = self.serving.workers
        self.delay.follow(workers)
        self.pulls.came_back(c for c in self.handshake.workers if c.worker in workers.keys() - before.keys())
        self.handshake.follow()
        self.executor.perform(self.replica.adopt_roster, roster.version, frozenset(workers))
        self._judge()

    def know_tables(self, entries: Mapping[int, Entry]) -> None:
        """These tables are registered, by id."""
        self.registered.follow(entries)
        self.fast.sync()
        self._judge()

    def learn_tables(self, entries: Mapping[int, Entry]) -> None:
        """These tables are registered, too."""
        self.registered.learn(entries)
        self.fast.sync()
        self._judge()

    def tick(self) -> None:
        """Called a few times a second: ends waits that took too long, beats."""
        self.standstill.beat()
        self._judge()
        self.links.tick()
        self.registered.look_for_owners()
        self.handshake.tick()

    def _judge(self) -> None:
        self.held.release()
        self._barrier.judge()
        self.pulls.judge()
