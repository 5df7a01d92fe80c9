"""The public client: `connect`, then tables, tensors, pushes and pulls."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TypeVar, cast
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from coordinator.view import View
from elasticps.client.barrier import Barrier
from elasticps.client.data_shards import Parts, Shards
from elasticps.client.dispatcher import Dispatcher
from elasticps.client.inputs import checked_floats
from elasticps.client.join import Joining
from elasticps.client.protocol.join import Resume
from elasticps.client.protocol.routing import Routes
from elasticps.client.protocol.session import Session
from elasticps.client.pulls import DenseRead, Read
from elasticps.client.push_batch import PackedPart, Packer, Source
from elasticps.client.pushes import StepState
from elasticps.client.registry import Registration, Registry
from elasticps.client.runtime import Runtime
from elasticps.client.steps import OpenStep, Pushes, Rates, Step
from elasticps.client.tables import DenseTensor, Handle, SparseTable
from elasticps.client.writes import Part, Write, check_size
from elasticps.errors import ConfigError, Error, InputError, Timeout
from elasticps.sharding import checked_spec
from elasticps.spec import ASP, BSP, SSP, Consistency, Init, Optimizer, TableSpec, Zeros
from elasticps.wire.frames import (
    ALL_RANGES,
    HEADER_BYTES,
    LAST,
    MAX_BLOCKS,
    ROUND,
    Buffer,
    Header,
    Kind,
    json_frame,
    unpack_header,
)
from elasticps.wire.pool import Pool
from replication.chain import Member
from replication.progress import MAX_PARTS

BOUND_GRACE_S = 1.0
KEPT_BYTES = 32 << 20

log = logging.getLogger(__name__)

AnyRead = TypeVar("AnyRead", bound=Read)


class Client:
    """A worker's connection to a cluster; made by `connect`. Threads may share it."""

    def __init__(
        self, control: Registry, worker: str, consistency: Consistency, window: int, timeout: float, app: str
    ) -> None:
        self.consistency = consistency
        self.timeout = timeout
        self.app = app
        self._runtime = control.runtime
        self._lock = self._runtime.rlock()  # session, open step, tables: whatever must keep an order
        self._packer = Packer(Pool(KEPT_BYTES))  # under the lock
        self._tables: dict[str, Handle] = {}
        self._shards: list[Shards] = []
        self._shard: tuple[int, int] | None = None  # what the next step trains
        self._closed = False
        self._control = control
        self._network: Dispatcher | None = None
        self._sync: Barrier | None = None
        try:
            deadline_s = self._runtime.monotonic() + timeout
            view = self._control.first_view(timeout)
            self.worker = self._control.register(worker, app, self._lost, timeout)
            self._session = Session(self.worker.id, view.ranges, window)
            self._network = Dispatcher(
                self._runtime, self._control.cluster, self.worker, view, self._session, self._lock, itertools.count(1),
                self._control.ask_view,
            )  # fmt: skip
            if isinstance(consistency, BSP):
                self._sync = Barrier(self._network, self._session, app, self.worker.id)
                self._network.pushes.flags = ROUND
            self._joining = Joining(self._network, self._control, self._session, self._sync, timeout)
            _clients.add(self)
            self._network.start(deadline_s)
        except BaseException:
            self.close()
            raise

    # --- what callers see ---------------------------------------------------------------------------------------

    @property
    def cluster(self) -> str:
        return self._control.cluster

    @property
    def view(self) -> View:
        """The newest view known here."""
        return self._net.routes.view

    @property
    def clock(self) -> int:
        """Steps pushed, counted from the worker's base clock."""
        return self._session.clock

    @property
    def committed(self) -> int:
        """The clock up to which every step is committed."""
        return self._session.committed

    def table(
        self, name: str, *, dim: int, optimizer: Optimizer, init: Init | None = None, dtype: str = "float32"
    ) -> SparseTable:
        """Opens a sparse table, creating it if it is new. `SpecError` if it exists with another spec."""
        spec = TableSpec(name, dim, optimizer, init or Zeros(), dtype)
        return cast(SparseTable, self._open_table(spec, None))

    def tensor(self, name: str, *, init: object, optimizer: Optimizer, dtype: str = "float32") -> DenseTensor:
        """Opens a dense tensor. `init`, float32 of any shape, gives its values if it is new, its shape in any case.

        Of several workers that open it at once one fills it and the others wait. `SpecError` as for `table`.
        """
        shape = getattr(init, "shape", None)
        shape = _shape(init) if shape is None else tuple(shape)
        values = checked_floats(f"tensor {name!r}: init", init, shape).copy()
        spec = TableSpec.dense(name, values.shape, optimizer, dtype)
        return cast(DenseTensor, self._open_table(spec, values))

    def push(self, values: Pushes, *, lr: Rates = None, copy: bool = True) -> Step:
        """Sends one step: {table: (keys int64 [n], grads float32 [n, dim]), tensor: grad float32 of its shape}.

        Returns at once, unless `window` steps are outstanding already. Gradients of keys that repeat are summed. An
        empty mapping, or empty keys, is a step that only ticks the clock. `lr` overrides the optimizers' rates, for
        all tables or by table. `copy=False` lends tensors' gradients instead of copying them: they must not change
        until the step is committed. Raises `InputError` before anything is sent, `Timeout` when the window stays full.
        """
        step = OpenStep(self, lr)
        self.push_part(step, values, lr, last=True, copy=copy)
        assert step.state is not None
        return Step(self, step.state)

    def pull_many(self, tensors: Iterable[DenseTensor]) -> list[DenseRead]:
        """Asks for several tensors now, each server once; the `result()` of each read, in their order, waits for it."""
        reads = [tensor.prepare(None, "tail") for tensor in tensors]
        self._start_reads(reads)
        return reads

    def step(self, *, lr: Rates = None) -> OpenStep:
        """Begins a step that is sent in parts."""
        return OpenStep(self, lr)

    def resume(self) -> Resume:
        """Joins, and says where this worker starts: what its predecessor of the same name has trained.

        Without a call the first operation does the same, so that `clock` never goes back under one name (but under
        `BSP` clocks are rounds of the application: a step whose round was closed without its worker is pushed again).

            at = ps.resume()
            for batch in batches[at.steps:]:
                ps.push(...)
        """
        self._net.check()
        return self._joining.enter()

    def shards(
        self,
        num_samples: int,
        shard_size: int,
        epochs: int = 1,
        *,
        name: str = "train",
        shuffle_seed: int | None = None,
    ) -> Shards:
        """Hands out samples 0 … `num_samples` - 1, `epochs` times, to all workers of the application that iterate over
        the shards of this `name`; each shard is what one step trains.

        The next step that begins after `next` trains the shard. It is done when that step is committed; the shards of
        a worker that is lost go to the others. So every sample is trained, and none twice but those of a lost worker's
        unacknowledged step. The iterator ends when all are done. With `shuffle_seed` each epoch has an order of its
        own, the same for all workers. `InputError` for unusable arguments, `SpecError` if the shards of that name are
        cut differently.
        """
        spec = checked_spec(num_samples, shard_size, epochs, shuffle_seed)
        label: object = name
        if not isinstance(label, str) or not 0 < len(name) <= 200:
            raise InputError(f"shards take a name of 1 to 200 letters, got {name!r}")
        parts = Parts(self._runtime, self._net, self._session, self._joining, self._sync, self._control, self._lock)
        shards = Shards(self, parts, name, spec)
        with self._lock:
            self._shards.append(shards)
        return shards

    def flush(self, timeout: float | None = None) -> None:
        """Waits until every step pushed so far is committed. `Timeout` says whom it waited for.

        Raises the first error of the steps whose `result` nobody has asked for, if a server refused one.
        """
        self._net.check()
        with self._lock:
            target = self._session.clock - self._session.open
        self._wait(lambda: self._session.committed >= target, timeout, "flush")
        self._settle(timeout)
        with self._lock:
            failures = dict(self._net.pushes.failures)
            self._net.pushes.failures.clear()
        if failures:
            raise failures[min(failures)]

    def close(self) -> None:
        """Waits briefly for outstanding steps, leaves the cluster and closes every connection."""
        if self._closed:
            return
        self._closed = True
        network = self._network
        if network is not None:
            if network.error is None and self._session.outstanding:
                network.wait(lambda: not self._session.outstanding, self._runtime.monotonic() + min(self.timeout, 5.0))
            if network.error is None:
                self._leave_shards()
            network.close()
        self._control.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None and not self._closed:
                self.flush()
        finally:
            self.close()

    def disown(self) -> None:
        """In a forked child: the connections and the place in the cluster are the parent's."""
        self._closed = True
        self._lock = self._runtime.rlock()  # a thread that is not here any more may hold the other one
        if self._network is not None:
            text = f"this client belongs to process {os.getppid()}, of which this is a fork: connect again in the child"
            self._network.disown(text)

    # --- tables -------------------------------------------------------------------------------------------------

    def _open_table(self, spec: TableSpec, values: NDArray | None) -> Handle:  # type: ignore[type-arg]
        self._net.check()
        known = self._tables.get(spec.name)
        registration = self._control.open_table(self.app, spec, self.worker.id, values is None, self.timeout)
        if known is not None and known.id == registration.id:
            return known
        handle_type = SparseTable if values is None else DenseTensor
        handle = handle_type(self, registration.spec, registration.id, spec)
        self._create(registration)
        if isinstance(handle, DenseTensor):
            self._fill(handle, registration, values)
        with self._lock:
            return self._tables.setdefault(spec.name, handle)

    def _create(self, registration: Registration) -> None:
        """Makes the table known to the heads of all ranges, which tell their successors."""
        document = {"id": registration.id, "spec": registration.spec.to_json()}
        frame = json_frame(Kind.CREATE, document)
        header, body = unpack_header(frame), frame[HEADER_BYTES:]
        self._net.ask_heads(lambda r: header._replace(epoch=r.epoch), body, self.timeout,
                            f"creating table {registration.spec.name!r}")  # fmt: skip

    def _fill(self, tensor: DenseTensor, registration: Registration, values: object) -> None:
        """Stores initial values where there are none; a no-op on a tensor that is ready."""
        if registration.ready:
            return
        mine = registration.creator == self.worker.id
        if not mine and self._control.wait_ready(self.app, tensor.name, registration.creator, self.timeout):
            return
        nothing = np.empty(0, np.float32)
        check_size([tensor.lent(values, self._net.routes, nothing)])

        def questions(routes: Routes) -> Iterator[tuple[Member, Header, list[Buffer]]]:
            part = Part([tensor.lent(values, routes, nothing)], routes)
            for server in routes.share_of:
                for cut in part.whole(server, routes):
                    flags = LAST | (ALL_RANGES if cut.ranges is None else 0)
                    size = sum(map(len, cut.buffers))
                    header = Header(Kind.INIT, flags, size, epoch=routes.epoch, worker=self.worker.id, items=cut.items)
                    yield routes.members[server], header, cut.buffers

        self._net.ask_all(questions, self.timeout, f"filling tensor {tensor.name!r}")
        self._control.mark_ready(self.app, registration, self.timeout)

    # --- steps --------------------------------------------------------------------------------------------------

    def push_part(self, step: OpenStep, values: Pushes, rates: Rates, *, last: bool, copy: bool) -> None:
        """Sends one part of a step, the first of which begins it."""
        network, session = self._net, self._session
        network.check()
        if not self._joining.active:
            self._joining.enter()
        if step.state is None:
            self._settle(None)
        while True:
            if step.state is None and not session.room:
                self._wait(lambda: session.room, None, "room in the window")
            with self._lock:
                network.check()
                if step.state is not None and not network.pushes.begun(step.state):
                    step.state = None
                if step.state is None and session.open:
                    raise InputError(f"step {session.clock} is still open; commit it before pushing another")
                if step.state is not None or session.room:  # else another thread was faster
                    self._push(step, values, rates, last, copy)
                    break
        network.nudge()

    def _push(self, step: OpenStep, values: Pushes, rates: Rates, last: bool, copy: bool) -> None:
        """Whatever is raised, at any point: the part is outstanding, with all its content copied, or nothing is."""
        if step.state is not None and not last and self._session.parts >= MAX_PARTS - 1:
            raise InputError(f"a step has at most {MAX_PARTS} parts")
        begins = None if step.state is not None else StepState(self._session.clock + 1)
        clock = self._session.clock + (begins is not None)
        part = self._part(values, clock, rates, copy)
        shard = None if begins is None else self._shard
        try:
            step.state = begins or step.state
            self._net.pushes.push(part, last, begins, shard)
        except BaseException:
            self._net.hurt()
            raise
        finally:
            if shard is not None and self._session.clock == clock:
                self._shard = None
                for shards in self._shards:
                    shards.used(shard, clock)

    def is_closed(self, state: StepState) -> bool:
        """Whether all parts of a step are outstanding, or more than that."""
        with self._lock:
            self._net.check()
            waits = self._session.open and self._session.clock == state.clock
            return self._net.pushes.begun(state) and not waits

    def _part(self, values: Pushes, clock: int, rates: Rates, copy: bool) -> Part | PackedPart:
        """What a push of these values sends under the view of now; a copy, but for what is lent."""
        routes = self._net.routes
        sources: list[Source] = []
        lent: list[Write] = []
        known: dict[tuple[int, object], NDArray[np.float32]] = {}  # many tables have the same
        if len(values) > MAX_BLOCKS:
            raise InputError(f"a push of {len(values)} tables is over the limit of {MAX_BLOCKS}; push them in parts")
        for handle, value in values.items():
            if self._tables.get(getattr(handle, "name", "")) is not handle:
                raise InputError(f"push takes the tables and tensors of this client as keys, got {handle!r}")
            lr = rates.get(handle) if isinstance(rates, Mapping) else rates
            steps = known.get((id(handle.optimizer), lr))
            if steps is None:
                steps = known[id(handle.optimizer), lr] = handle.optimizer.step_values(clock, lr)
            if copy or isinstance(handle, SparseTable):
                sources.append(handle.source(value, steps))
            else:
                lent.append(handle.lent(value, routes, steps))
        packed = self._packer.pack(sources, routes)
        if not lent:
            return packed
        writes = packed.writes() + lent
        check_size(writes)
        return Part(writes, routes)

    def finish_step(self, state: StepState, timeout: float | None) -> None:
        self._wait(lambda: state.done, timeout, f"step {state.clock}")
        if state.error is not None:
            self._net.pushes.failures.pop(state.clock, None)
            raise state.error
        self._settle(timeout)

    def _settle(self, timeout: float | None) -> None:
        """Under BSP: closes the round of the newest step, so that whatever comes next sees its result."""
        if self._sync is not None:
            timeout = self.timeout if timeout is None else timeout
            self._sync.settle(lambda: self._wait(lambda: not self._session.outstanding, timeout, "a step"), timeout)

    # --- shards -------------------------------------------------------------------------------------------------

    def attach(self, shard: tuple[int, int] | None) -> None:
        """What the next step that begins trains: (set, number) of a shard."""
        if shard is not None:
            self._net.check()
        with self._lock:
            self._shard = shard

    def settle_all(self) -> None:
        """Waits until every step so far is committed and its round closed."""
        self._wait(lambda: not self._session.outstanding, None, "a step")
        self._settle(None)

    def _leave_shards(self) -> None:
        """Gives back what was not trained: others need not wait until this worker is out of the roster."""
        for shards in self._shards:
            try:
                shards.leave(min(self.timeout, 5.0))
            except Error as error:
                log.info("worker %s leaves with shards %r in its hands: %s", self.worker.name, shards.name, error)

    # --- pulls --------------------------------------------------------------------------------------------------

    def start_read(self, read: AnyRead) -> AnyRead:
        """Asks for what is to be read."""
        self._start_reads([read])
        return read

    def _start_reads(self, reads: Sequence[Read]) -> None:
        self._net.check()
        if not self._joining.active:
            self._joining.enter()
        self._settle(None)
        with self._lock:
            clock = self._session.clock - self._session.open
        for read in reads:
            read.clock = clock
        self._net.start_reads(reads, self.consistency.bound, int(self.timeout * 1000))

    def pulled(self, read: Read) -> NDArray[np.float32]:
        """What is pulled; if the wait ends with an exception, its memory is the caller's alone from now on."""
        try:
            return read.result()
        except BaseException:
            self._net.forget_read(read, Timeout("nobody waits for it"))
            raise

    def finish_read(self, read: Read, timeout: float | None) -> None:
        if self.consistency.bound is not None:  # the servers, who know whom it waits for, give up first
            timeout = (self.timeout if timeout is None else timeout) + BOUND_GRACE_S
        try:
            self._wait(read.done, timeout, f"a pull of {read.name!r}")
        except Timeout as error:
            self._net.forget_read(read, error)
            raise
        if read.error is not None:
            raise read.error

    # --- waiting ------------------------------------------------------------------------------------------------

    @property
    def _net(self) -> Dispatcher:
        assert self._network is not None
        return self._network

    def _wait(self, done: Callable[[], bool], timeout: float | None, what: str) -> None:
        if done():
            return
        timeout = self.timeout if timeout is None else timeout
        started = self._runtime.monotonic()
        if not self._net.wait(done, started + timeout):
            self._net.check()
            raise Timeout(f"{what} took longer than {timeout:.1f} s: {self._net.explain()}")

    def _lost(self, reason: str) -> None:
        if self._network is not None and not self._closed:
            self._network.fence(f"worker {self.worker.name!r} lost its place in the cluster: {reason}")


_clients: WeakSet[Client] = WeakSet()


def _disown_all() -> None:
    for client in list(_clients):
        client.disown()


os.register_at_fork(after_in_child=_disown_all)


def _shape(value: object) -> tuple[int, ...]:
    return np.asarray(value, np.float32).shape


def connect(
    url: str | None = None,
    *,
    worker: str = "",
    consistency: Consistency | None = None,
    window: int = 4,
    timeout: float = 30.0,
    app: str = "default",
) -> Client:
    """Joins a cluster as a worker.

    `url` is etcd://host:port[,host:port…]/cluster (default: the environment's ELASTICPS_URL). `worker` names this
    process: started again under its name, it fences its older self (default: a name of its own). `window` is how
    many steps may be outstanding before `push` waits. `timeout`, in seconds, bounds every wait that has no timeout of
    its own. `app` names one of several applications that share the servers: each has tables, rounds, bounds on
    staleness and shards of its own, and sees nothing of the others.

        with eps.connect(url, worker="w0", app="ads") as ps:             # the classic store: push and pull
            clicks = ps.table("clicks", dim=1, optimizer=eps.Accumulate())   # or eps.Custom, an update of your own
            ps.push({clicks: (ids, ones)}).result()
            clicks.pull(ids)                                               # the sum over all workers of "ads"

    Raises `ConfigError` for unusable arguments and `ClusterUnreachable`, saying what was tried, within the timeout.
    """
    url = url or os.environ.get("ELASTICPS_URL", "")
    if not url:
        raise ConfigError("no cluster given: pass a URL such as etcd://127.0.0.1:2379/demo or set ELASTICPS_URL")
    if not 1 <= window <= 1024:
        raise ConfigError(f"window must be between 1 and 1024 steps, got {window}")
    if not 0 < timeout < 86_400:
        raise ConfigError(f"timeout must be between 0 and 86400 seconds, got {timeout}")
    consistency = consistency or ASP()
    if not isinstance(consistency, ASP | SSP | BSP):
        raise ConfigError(f"consistency must be ASP(), SSP(staleness=k) or BSP(), got {consistency!r}")
    name = worker or f"worker-{os.uname().nodename}-{os.getpid()}"
    return Client(Registry.open(url, timeout, Runtime()), name, consistency, window, timeout, app)
