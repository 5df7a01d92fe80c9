"""One server: what it is made of, and what a new view or roster changes. Opens no socket but those to other replicas.

Single-threaded: everything runs in the server's event loop, so a frame is judged, applied and answered without a lock,
and no other frame can come in between. A connection gives its frames to its role: a worker's to pushes, pulls, barrier
and data shards, a replica's to the links. They ask `serving` what may be done here, and have the executor do it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from coordinator.core import fields
from coordinator.core.view import Roster, ServerInfo, View
from elasticps.checkpoint.row_writer import ThreadRowWriter
from elasticps.server.admin import AdminRoles, ServerAdmin
from elasticps.server.core.active_workers import ActiveWorkers
from elasticps.server.core.barrier import BarrierCoordinator
from elasticps.server.core.data_shards import ShardDispenser
from elasticps.server.core.delay_coordinator import DelayCoordinator
from elasticps.server.core.group_log import GroupLog
from elasticps.server.core.headroom import Headroom
from elasticps.server.core.own_steps import OwnSteps
from elasticps.server.core.registered_tables import RegisteredTable, RegisteredTables
from elasticps.server.core.serving import Serving
from elasticps.server.core.view_exchange import HeldFrames, ViewNotifier
from elasticps.server.fast.path import FastPath
from elasticps.server.network.busy_poll import BusyPoll
from elasticps.server.network.connection import Connection, PeerKind
from elasticps.server.network.streams import streams
from elasticps.server.options import DEFAULTS, ServerOptions
from elasticps.server.roles.checkpoints import ASIDE_BYTES, CheckpointWriter
from elasticps.server.roles.context import Context, LastServed
from elasticps.server.roles.cuts import CutHandler
from elasticps.server.roles.executor import Executor
from elasticps.server.roles.handshake import HelloHandler, PeerKinds
from elasticps.server.roles.leaders import Leaders
from elasticps.server.roles.lifecycle import LifecycleHandler
from elasticps.server.roles.memory_limit import MemoryLimit
from elasticps.server.roles.participation import ParticipationHandler
from elasticps.server.roles.pulls import PullHandler
from elasticps.server.roles.pushes import PushHandler
from elasticps.server.roles.readers import JOURNAL_WORDS, ReaderFeeds
from elasticps.server.roles.reductions import ReduceHandler
from elasticps.server.roles.replica_links import ReplicaLinks
from elasticps.server.roles.restoring import BUFFER_BYTES, Restorer
from elasticps.server.roles.round_links import RoundLinks
from elasticps.server.roles.snapshots import SnapshotSender
from elasticps.server.roles.stall_detector import StallDetector
from elasticps.server.roles.sweeper import Sweeper
from elasticps.server.roles.updates import UpdateRequests
from elasticps.server.roles.worker_activity import WorkerActivity
from elasticps.wire.frames import Kind
from replication.chain import Member
from replication.refusals import MOST_BYTES

log = fields.logger(__name__)


class Server:
    """State and behaviour of one server; `process.lifecycle` connects it to sockets and to the coordination store."""

    def __init__(
        self, me: ServerInfo, cluster: str, ranges: int, loop: asyncio.AbstractEventLoop,
        options: ServerOptions = DEFAULTS,
    ) -> None:  # fmt: skip
        memory, clock = options.memory, options.clock
        log_budget_bytes = memory.share(options.log_budget_bytes)
        self.me = me  # as registered
        self.member = Member(me.name, me.incarnation)  # as chains name it
        self.cluster = cluster  # its name and incarnation: views of another one are not followed
        self.removed: asyncio.Future[None] = loop.create_future()
        """Done when a view has left this server out: its copy is void, and it may come back as a new incarnation."""
        self._left_out = False  # stays so, whatever views come later
        self._loop = loop  # for connections

        # What all parts share.
        self.fast = FastPath(ranges, log_budget_bytes)  # handles usual frames in compiled code
        self.executor = executor = Executor(self.member, ranges, log_budget_bytes, self.fast)  # carries out effects
        self.store, self.replica = executor.store, executor.replica  # the rows; the chain protocol
        self.replica.refusals.most_bytes = memory.share(MOST_BYTES)
        self.serving = serving = Serving(self.member, ranges, self.replica)  # the view and roster that are followed
        self.notifier = notifier = ViewNotifier(loop.call_soon)  # sends views and refusals
        self.updates = updates = UpdateRequests(loop, executor, serving, self.adopt)  # asks for newer views
        self.held = HeldFrames(serving, notifier, clock, updates.need_view, updates.need_roster)  # wait for them
        self.registered = RegisteredTables(self.store, updates.need_roster, updates.need_tables)  # owners of tables
        self.last_served = LastServed(loop.time)  # when a worker was: background work gives way then
        context = Context(
            me, cluster, loop, clock, self.fast, executor, serving, notifier, self.held, updates, self.registered,
            self.last_served,
        )  # fmt: skip

        # Connections, and links to other replicas.
        self._busy_poll = options.busy_poll or BusyPoll(loop)  # keeps the loop awake between requests
        self.streams = streams(loop, options.gate, self.fast, self._busy_poll)  # accepts and dials
        self.links = ReplicaLinks(context, self.streams.dial, self.connection)  # to the servers that share ranges
        self.snapshots = SnapshotSender(context, self.links)  # fills joining replicas

        # Requests of workers.
        self.headroom = Headroom(me.name, memory)  # how many rows may be added, here and down the chains
        self.memory = MemoryLimit(context, self.headroom, self.links)  # refuses rows where memory is short
        self.own_steps = OwnSteps(self.replica.clocks, clock)  # which pulls wait for their own worker's steps
        self.pulls = PullHandler(context, self.own_steps)  # answers them when they may be
        self.pushes = PushHandler(context, self.memory)  # checks them, and has them logged
        self.reductions = ReduceHandler(context, self.pulls)  # functions over all rows of a range
        group = GroupLog(serving, self.held, notifier, self.replica, executor.rounds, executor.perform)
        shards = ShardDispenser(group, executor.shards)
        self.round_links = RoundLinks(context, self.streams.dial, self._connection)  # to heads that close rounds
        self._barrier = BarrierCoordinator(  # decides and closes synchronous rounds
            group, clock, loop.call_soon, self.round_links.send, self.round_links.need
        )
        self.round_links.announcements = self._barrier.announcements
        active = ActiveWorkers(ranges, self.replica.clocks)
        self.delay = DelayCoordinator(group, active, clock, loop.call_soon)  # releases clocks under bounded delay
        self.participation = ParticipationHandler(context, active, self.delay, self.pulls.changed)  # who takes part

        # Requests of coordinators, and of operators by the admin service.
        self.leaders = Leaders(context, self.links, self.snapshots, self.headroom, options.wall)  # get reports
        self.sweeper = Sweeper(context, self.leaders, self.headroom)  # forgets rows by tables' policies
        self.pushes.stamp_time, self.pushes.awaits_time = self.sweeper.stamp, self.sweeper.awaits_time
        self._barrier.take_sweeps = self.sweeper.take
        self._lifecycle = LifecycleHandler(context, self.sweeper, self.memory)  # policies, sweeps that workers ask for
        self.restoring = Restorer(context, self.memory, memory.share(BUFFER_BYTES))  # reads checkpoints
        row_writer = options.row_writer or ThreadRowWriter(loop)
        aside_bytes = memory.share(ASIDE_BYTES)
        self.checkpoints = CheckpointWriter(context, row_writer, aside_bytes, log_budget_bytes)  # writes rows of a cut
        cuts = CutHandler(context, lambda: self.handshake.workers, self.checkpoints.wait)
        activity = WorkerActivity(context, lambda: self.handshake.workers)

        # What each kind of peer may send, and who forgets a connection that has ended.
        handlers = {
            **self.pushes.handlers, **self.pulls.handlers, **self._barrier.handlers, **shards.handlers,
            **cuts.handlers, **self.held.handlers, **self.reductions.handlers, **activity.handlers,
            **self._lifecycle.handlers, **self.delay.handlers, **self.participation.handlers,
        }  # fmt: skip
        forget = (
            self.pulls.forget, self.pushes.forget, self.reductions.forget, activity.forget, self._lifecycle.forget,
            self.participation.forget,
        )  # fmt: skip
        self.worker = PeerKind(handlers, *forget, rest=self.pulls.rest)  # frames of workers
        handlers = {**self.links.handlers, **self.memory.handlers, **self.held.handlers, **updates.handlers}
        self.peer = PeerKind(handlers, self.links.lost)  # frames of other replicas
        self.readers = ReaderFeeds(context, options.wall, memory.share(8 * JOURNAL_WORDS) // 8)  # send readers changes
        reader = PeerKind({**self.readers.handlers, **self.held.handlers}, self.readers.forget)
        rounds = PeerKind({Kind.ROUND_CLOSE: self._barrier.close, **updates.handlers}, self._barrier.forget)
        # Knows all connections, and gives each its kind of peer.
        self.handshake = HelloHandler(
            context,
            self.links,
            self.leaders,
            PeerKinds(self.worker, self.peer, rounds, reader),
            (cuts.greet,),
            options.connections,
        )
        self.handshake.feed(self.readers.add)
        roles = AdminRoles(
            self.snapshots, self.headroom, self.handshake, cuts, activity, self.restoring, self.readers
        )  # fmt: skip
        # Answers the admin service.
        self.admin = ServerAdmin(context, lambda: len(self.own_steps) + len(self.delay), roles)
        self.stall_detector = StallDetector(clock, executor)  # notices that this process was stopped
        self.fast.connect(
            self.links.link, self._changed, self.last_served.mark, executor.note_shard,
            self.stall_detector.look,
        )  # fmt: skip

    def _changed(self) -> None:
        """Something was applied or acknowledged."""
        self.pulls.changed()
        self.readers.changed()

    # --- connections ------------------------------------------------------------------------------------------------

    def connection(self) -> Connection:
        """A protocol object for a new connection, accepted or dialled."""
        return self._connection(self.handshake.newcomer)

    def _connection(self, kind: PeerKind) -> Connection:
        return Connection(kind, self.notifier, self._loop, self._busy_poll, self.fast)

    def close(self) -> None:
        """Drops every connection, and gives up what is being written of a checkpoint, or read."""
        self.checkpoints.close()
        self.restoring.close()
        self._lifecycle.close()
        self.links.close()
        self.round_links.close()
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
        self.notifier.adopt(view)
        if not listed:
            log.warning("left out", epoch=view.epoch, reason=view.reason)
            self._left_out = True
            self.removed.set_result(None)
            return
        self.own_steps.serve(serving.tailed, serving.held, serving.tail_since, serving.full_since)
        self.fast.serve(serving.tailed, serving.held, serving.tail_since, serving.full_since)
        self.links.adopt(view)
        self.headroom.adopt(view, self.member)
        self.executor.perform(self.replica.adopt, view.as_chains)
        self.leaders.adopt(view)
        self.round_links.adopt(view)
        self.readers.adopted()
        self._barrier.adopt(view)
        self.delay.adopt(view)
        log.info("adopted", epoch=view.epoch, headed=len(serving.headed), reason=view.reason)
        if serving.concerns_workers():
            self.notifier.tell_all(self.handshake.workers)
        self._recheck_waiting()

    def follow(self, roster: Roster) -> None:
        """Takes a newer roster: fences older incarnations, forgets who left, rechecks what waits."""
        if roster.version <= self.serving.roster_version or roster.cluster != self.cluster:
            return
        change, workers = self.serving.follow(roster), self.serving.workers
        self.delay.follow(change)
        self.participation.follow(workers.keys(), self.handshake.connections_of(change.came))
        self.handshake.follow(change)
        self.executor.perform(self.replica.adopt_roster, roster.version, roster.ids)
        self._recheck_waiting()

    def know_tables(self, entries: Mapping[int, RegisteredTable]) -> None:
        """These tables are registered, by id."""
        self.registered.follow(entries)
        self.fast.sync()
        self._recheck_waiting()

    def learn_tables(self, entries: Mapping[int, RegisteredTable]) -> None:
        """These tables are registered, too."""
        self.registered.learn(entries)
        self.fast.sync()
        self._recheck_waiting()

    def tick(self) -> None:
        """Called a few times a second: ends waits that took too long, beats."""
        self.stall_detector.beat()
        self._recheck_waiting()
        self.links.tick()
        self.round_links.tick()
        self.registered.look_for_owners()
        self.handshake.tick()
        self.sweeper.tick()
        self.readers.tick()

    def _recheck_waiting(self) -> None:
        """Handles again what waits for a view, a roster, tables, other workers or time."""
        self.held.release()
        self._barrier.recheck()
        self.delay.recheck()
        self.pulls.answer_waiting()
