"""What a client is made of: how it begins, and how it ends."""

from __future__ import annotations

from elasticps.client.barrier import Barrier
from elasticps.client.catalog import TableCatalog
from elasticps.client.data_shards import WorkerShards
from elasticps.client.dispatcher import Dispatcher
from elasticps.client.join import Joining
from elasticps.client.losses import Losses
from elasticps.client.reads import Reads
from elasticps.client.registry import Registry
from elasticps.client.steps import Steps
from elasticps.client.tables import Handle, SparseTable
from elasticps.errors import ClusterUnreachable, Timeout
from elasticps.model.spec import BSP, Consistency

LEAVE_S = 5.0  # for what is outstanding when a client is closed


class Parts:
    """Registered under a name, and connected to the servers that it always is, once made. closed: it has ended, or
    is about to."""

    def __init__(
        self, registry: Registry, worker: str, consistency: Consistency, window: int, timeout_s: float, app: str,
        *, raise_on_loss: bool = False,
    ) -> None:  # fmt: skip
        self.registry = registry
        self.closed = False
        self._timeout_s = timeout_s
        self._runtime = registry.runtime
        self._opened: dict[str, Handle] = {}
        self._dispatcher: Dispatcher | None = None
        try:
            deadline_s = self._runtime.monotonic() + timeout_s
            view = registry.first_view(timeout_s)
            self.worker = registry.register(worker, app, self._lost, timeout_s, view.cluster)
            self._dispatcher = dispatcher = Dispatcher(
                self._runtime, view.cluster, self.worker, view, window, registry.ask_view, registry.credentials,
                authenticated=registry.authenticated,
            )  # fmt: skip
            barrier = None
            if isinstance(consistency, BSP):
                barrier = Barrier(dispatcher)
                dispatcher.pushes.round = True
            opened = self._opened
            self.losses = Losses(registry, self._runtime, self.worker, raises=raise_on_loss)
            dispatcher.on_restored = self._restored
            dispatcher.pushes.on_refused = self._forget
            dispatcher.pushes.name_of = self._name_of
            joining = Joining(dispatcher, registry, barrier, timeout_s)
            self.steps = Steps(dispatcher, joining, barrier, opened, timeout_s, self.losses)
            self.reads = Reads(
                dispatcher, self.steps.before_read, consistency.bound, timeout_s, self.steps.settle_own_steps
            )
            self.tables = TableCatalog(registry, dispatcher, self.reads, opened, timeout_s)
            self.shards = WorkerShards(dispatcher, self.steps, registry)
            dispatcher.on_watch = self._use
            registry.follow_rates(app, self.tables.hear, timeout_s)
            self._start(dispatcher, deadline_s)
        except BaseException:
            self.close()
            raise

    def _start(self, dispatcher: Dispatcher, deadline_s: float) -> None:
        """Connects to the servers. They take nobody in whom no leader has listed: that is said then."""
        try:
            dispatcher.start(deadline_s)
        except (ClusterUnreachable, Timeout) as error:
            if not (why := self.registry.trouble()):
                raise
            raise type(error)(f"{why}. Therefore: {error}") from error

    @property
    def dispatcher(self) -> Dispatcher:
        """Whom all others ask."""
        assert self._dispatcher is not None
        return self._dispatcher

    @property
    def over(self) -> bool:
        """Whether nothing can be done with it any more, in this process."""
        return self.closed or (self._dispatcher is not None and self._dispatcher.disowned)

    def close(self) -> None:
        """Waits briefly for outstanding steps, leaves the cluster and closes every connection."""
        if self.over:
            return
        self.closed = True
        dispatcher, leave_s = self._dispatcher, min(self._timeout_s, LEAVE_S)
        if dispatcher is not None:
            if dispatcher.error is None and dispatcher.session.outstanding:
                self.steps.wait_briefly(leave_s)
            if dispatcher.error is None:
                self.shards.leave(leave_s)
            dispatcher.close()
        self.registry.close()

    def _restored(self, epochs: list[int], committed: int) -> None:
        self._forget()
        self.losses.began(epochs, committed)

    def _forget(self) -> None:
        """Servers have not what this worker would expect: rows that it keeps may be wrong."""
        for handle in list(self._opened.values()):
            handle.forget()

    def _name_of(self, table: int) -> str | None:
        return next((handle.name for handle in list(self._opened.values()) if handle.id == table), None)

    def _use(self) -> tuple[int, int, int]:
        used = [handle.used for handle in list(self._opened.values()) if isinstance(handle, SparseTable)]
        return sum(rows for rows, _ in used), sum(hits for _, hits in used), self.shards.held

    def _lost(self, reason: str) -> None:
        if self._dispatcher is not None and not self.closed:
            self._dispatcher.fence(f"worker {self.worker.name!r} lost its place in the cluster: {reason}")
