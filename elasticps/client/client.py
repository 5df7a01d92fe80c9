"""How a process becomes a worker (`connect`), and the client that it works with: tables, tensors, pushes and pulls."""

from __future__ import annotations

import functools
import os
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import NoReturn, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from coordinator.core.names import check_name
from coordinator.core.view import View
from elasticps.client.cache_batches import CacheUse
from elasticps.client.core.join import Resume
from elasticps.client.data_shards import Shards
from elasticps.client.inputs import refuse_pickling
from elasticps.client.losses import Loss
from elasticps.client.parts import Parts
from elasticps.client.pull import ServerPull, TablesPull
from elasticps.client.registry import Registry
from elasticps.client.runtime import Runtime
from elasticps.client.stats import client_html, read_stats
from elasticps.client.steps import OpenStep, Step, Values
from elasticps.client.tables import DenseTensor, H, Rates, SparseTable, TableInfo, planned_pulls
from elasticps.client.warm import warm
from elasticps.errors import ConfigError, InputError, Timeout
from elasticps.model.caching import Cache
from elasticps.model.policies import Admission, Eviction, check_evictions
from elasticps.model.sharding import checked_spec
from elasticps.model.spec import ASP, BSP, SSP, Consistency, Filter, Init, ServerOptimizer, TableSpec, Zeros
from elasticps.system.progress import Progress, reporting

Filters = Sequence[Filter]
Rows = NDArray[np.float32]


class Client:
    """A worker's connection to a cluster; made by `connect`. Threads may share it."""

    def __init__(
        self, registry: Registry, worker: str, consistency: Consistency, window: int, timeout: float, app: str,
        raise_on_loss: bool = False,
    ) -> None:  # fmt: skip
        self.consistency = consistency
        self.timeout = timeout
        self.app = app
        self._parts = parts = Parts(registry, worker, consistency, window, timeout, app, raise_on_loss=raise_on_loss)
        self.worker = parts.worker
        self._dispatcher, self._steps, self._tables = parts.dispatcher, parts.steps, parts.tables

    def __repr__(self) -> str:
        consistency, tables = self.consistency.kind.upper(), len(self._tables.opened)
        state = f"{consistency}, tables open: {tables}, steps: {self.clock}, committed: {self.committed}"
        if self._parts.closed:
            state = "closed"
        return f"<Client {self.worker.name!r} of cluster {self.cluster!r}: {state}>"

    def _repr_html_(self) -> str:
        return client_html(repr(self), self._parts)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        refuse_pickling(f"the client of worker {self.worker.name!r}")

    @property
    def cluster(self) -> str:
        """The cluster's name."""
        return self._parts.registry.cluster

    @property
    def view(self) -> View:
        """The newest view known here."""
        return self._dispatcher.routes.view

    @property
    def collective(self) -> bool:
        """Whether several processes are this worker, as those of an `elasticps.torch.LocalGroup` are: no."""
        return False

    @property
    def clock(self) -> int:
        """Steps pushed, counted from the worker's base clock."""
        return self._dispatcher.session.clock

    @property
    def committed(self) -> int:
        """The clock up to which every step is committed."""
        return self._dispatcher.session.committed

    def table(
        self, name: str, *, dim: int, optimizer: ServerOptimizer, init: Init | None = None, dtype: str = "float32",
        finite: bool = False, push: Filters = (), pull: Filters = (), on_loss: str | None = None,
        max_lost_steps: int | None = None, cache: Cache | None = None, admission: Admission | None = None,
        eviction: Eviction | Sequence[Eviction] = (), usage: str = "",
    ) -> SparseTable:  # fmt: skip
        """Opens a sparse table, creating it if it is new. `SpecError` if it exists with another spec.

        finite: servers refuse rows of gradients that hold NaN or infinity (`NotFinite`), and apply the others.
        push, pull: filters that make gradients, and rows that are read, shorter on their way (docs/guides/filters.md).
        on_loss, max_lost_steps: as for `SparseTable.set_on_loss`; None leaves what was set before.
        cache: rows that this worker keeps, `eps.Cache(rows=…, staleness=…)` (docs/guides/caches.md); None leaves the
        cache as it is. It is no part of the table: other workers have their own, or none.
        admission, eviction: which keys get a row, and which rows are forgotten (docs/guides/growing-tables.md). A table
        that exists keeps its policies: `SparseTable.set_admission` and `set_eviction` change them.
        usage: what rows keep of their use, "count" (last use and count) or "score"; at least what the policies need.
        """
        spec = TableSpec(
            name, dim, optimizer, init or Zeros(), dtype, finite=finite, push=push, pull=pull, admission=admission,
            eviction=check_evictions(eviction, f"table {name!r}: "), usage=usage,
        )  # fmt: skip
        return self._tables.sparse(spec, on_loss, max_lost_steps, cache)

    def tensor(
        self, name: str, *, init: object, optimizer: ServerOptimizer, dtype: str = "float32", finite: bool = False,
        push: Filters = (), pull: Filters = (), on_loss: str | None = None, max_lost_steps: int | None = None,
    ) -> DenseTensor:  # fmt: skip
        """Opens a dense tensor. `init`, float32 of any shape, gives its values if it is new, its shape in any case.

        Of several workers that open it at once one fills it and the others wait. All else as for `table`.
        """
        spec = partial(TableSpec.dense, name, optimizer=optimizer, dtype=dtype, finite=finite, push=push, pull=pull)
        return self._tables.dense(init, spec, on_loss, max_lost_steps)

    def tensors(
        self, values: Mapping[str, object], *, optimizer: ServerOptimizer | Callable[[str], ServerOptimizer],
        dtype: str = "float32", finite: bool = False, push: Filters = (), pull: Filters = (),
    ) -> dict[str, DenseTensor]:  # fmt: skip
        """Opens many dense tensors in few requests: their initial values by their names. optimizer: of all of them, or
        a function of the name. All else as for `tensor`."""
        same = partial(TableSpec.dense, dtype=dtype, finite=finite, push=push, pull=pull)
        described = [(value, partial(same, name, optimizer=of_name(optimizer, name))) for name, value in values.items()]
        return dict(zip(values, self._tables.all_dense(described), strict=True))

    def tables(self) -> dict[str, TableInfo]:
        """All tables and tensors of the application, by name: their specs, and how many rows servers have of each,
        those of this client's own steps so far among them."""
        return self._tables.known()

    def caches(self) -> dict[str, CacheUse]:
        """What caches have done, by the names of the tables that have one here."""
        tables = [table for table in list(self._tables.opened.values()) if isinstance(table, SparseTable)]
        return {table.name: table.cached for table in tables if table.cache is not None}

    def stats(self) -> dict[str, float]:
        """What this client knows of itself, by dotted names: steps, bytes, servers, views, and of each table that has
        them rates, caches and filters. docs/guides/logging.md says what each is. Asks nobody, and costs pushes and
        pulls nothing; `elasticps.log_stats` writes it to TensorBoard or Weights & Biases."""
        return read_stats(self._parts)

    def open(self, name: str) -> SparseTable | DenseTensor:
        """A table or tensor of the application, as it was made. Raises `UnknownTable` if there is none of that name."""
        return self._tables.open(name)

    def drop_table(self, name: str) -> None:
        """Forgets a table or tensor of the application: rows, slots and name. Returns when every server has, behind
        this client's own steps so far.

        Whoever still uses it gets `UnknownTable`; a push of it ticks without its rows. A table that is opened under the
        name later is another one. Raises `UnknownTable` if there is none of that name, `InputError` while a step of
        this client is open, `Timeout`.
        """
        self._tables.drop(name)

    def clear_table(self, name: str) -> None:
        """`SparseTable.clear` by name, for whoever has not opened the table."""
        self._tables.clear(name)

    def push(self, values: Values, *, lr: Rates = None, copy: bool = True) -> Step:
        """Sends one step: {table: (keys int64 [n], grads float32 [n, dim]), tensor: grad float32 of its shape}.
        Of tables that keep scores {table: (keys, grads, scores float32 [n], finite and at least 0)}; without scores
        they count as 0.

        Returns at once, unless `window` steps are outstanding already. Gradients of keys that repeat are summed. An
        empty mapping, or empty keys, is a step that only ticks the clock. `lr` overrides the optimizers' rates, for
        all tables or by table. `copy=False` lends tensors' gradients instead of copying them: they must not change
        until the step is committed; under BSP, where it may be pushed again after that, they are copied. Raises
        `InputError` before anything is sent, `Timeout` when the window stays full. Rows that servers refuse later are
        named by what `result()` of the step raises, see `ServerError`.
        """
        return self._steps.whole(values, lr, copy=copy)

    def pull(self, keys: Mapping[H, object], *, read: str = "tail", exact: bool = False) -> dict[H, Rows]:
        """Rows of several tables, and tensors, {table: keys int64 [n], tensor: None}: of each table float32 [n, dim] in
        the order of its keys, each tensor float32 of its shape. One frame asks each server for all of them but large
        tensors. `read`, `exact` and what is raised as for `SparseTable.pull`.
        """
        return self._pull(keys, None, read, exact).rows()

    def pull_async(
        self, keys: Mapping[H, object], out: Mapping[H, Rows] | None = None, *,
        read: str = "tail", exact: bool = False,
    ) -> TablesPull[H]:  # fmt: skip
        """Asks for all of that now, for those of `out` into that; `result()` of what is returned waits for them and
        gives what `pull` does."""
        return self._pull(keys, out, read, exact).start()

    def _pull(self, keys: Mapping[H, object], out: Mapping[H, Rows] | None, read: str, exact: bool) -> TablesPull[H]:
        """Checks the arguments of a pull, which is not sent yet."""
        handles, pulls = planned_pulls(self._tables.opened, keys, out, read, exact)
        return TablesPull(self._parts.reads, handles, pulls)

    def push_pull(
        self, values: Values, keys: Mapping[H, object], out: Mapping[H, Rows] | None = None, *,
        step: OpenStep | None = None, lr: Rates = None, copy: bool = True, read: str = "tail", exact: bool = False,
    ) -> tuple[Step, TablesPull[H]]:  # fmt: skip
        """`push(values)`, then `pull_async(keys, out)`: the same results, but to each server one message has both,
        which spares time at both ends. Under `BSP` the round is waited for in between. Arguments of the pull that
        cannot be used raise before anything is sent.

        step: an open one, of which `values` are the last part; its own `lr` counts then.
        """
        pull = self._pull(keys, out, read, exact)
        if step is None:
            step = OpenStep(self._steps, lr)
        return step.end(values, copy=copy, then=pull.with_step), pull.follow()

    def pull_many(
        self, tensors: Iterable[DenseTensor], outs: Iterable[NDArray[np.float32]] | None = None
    ) -> list[ServerPull]:
        """Asks for several tensors now, each server once; the `result()` of each pull, in their order, waits for it.
        Into `outs`, as many arrays, if given."""
        tensors = list(tensors)
        for tensor in tensors:
            if not isinstance(tensor, DenseTensor):
                raise InputError(f"pull_many takes tensors, as ps.tensor(…) returns them, got {tensor!r:.200}")
        pairs = ((tensor, None) for tensor in tensors) if outs is None else zip(tensors, outs, strict=True)
        return self._parts.reads.start_tensors([tensor.prepare(out, "tail") for tensor, out in pairs])

    def step(self, *, lr: Rates = None) -> OpenStep:
        """Begins a step that is sent in parts."""
        return OpenStep(self._steps, lr)

    def resume(self) -> Resume:
        """Joins, and says where this worker starts: what its predecessor of the same name has trained.

        Without a call the first operation does the same, so that `clock` never goes back under one name (but under
        `BSP` clocks are rounds of the application: a step whose round was closed without its worker is pushed again).

            at = ps.resume()
            for batch in batches[at.steps:]:
                ps.push(...)

        That is for one worker with data of its own. A worker that joins under a new name has trained nothing, so it
        would begin at the first batch, and train all of them alone when the others have ended: hand out data by
        `shards`.
        """
        return self._steps.enter()

    def shards(
        self, num_samples: int, shard_size: int, epochs: int = 1, *, name: str = "train",
        shuffle_seed: int | None = None,
    ) -> Shards:  # fmt: skip
        """Hands out samples 0 … `num_samples` - 1, `epochs` times, to all workers of the application that iterate over
        the shards of this `name`; each shard is what one step trains.

        The next step that begins after `next` trains the shard. It is done when that step is committed; the shards of
        a worker that is lost go to the others. So every sample is trained, and none twice but those that a lost worker
        had in its hands: the shard that it got last, and those of its unacknowledged steps. A worker that stands still
        for longer than its lease, 5 s, is lost, though it may go on afterwards. The iterator ends when all are done.
        With `shuffle_seed` each epoch has an order of its own, the same for all workers. `InputError` for unusable
        arguments, `SpecError` if the shards of that name are cut differently.
        """
        spec = checked_spec(num_samples, shard_size, epochs, shuffle_seed)
        return self._parts.shards.open(name, spec)

    def checkpoint(self, *, full: bool = False) -> CheckpointRequest:
        """Asks for a checkpoint, where the coordinator's `--checkpoint-url` says. Returns at once; the `result()` of it
        waits until it is made.

        It has, of each worker, the steps up to one and none later; of this one at least those pushed so far, unless one
        is still open in parts. It adds to the newest one there, unless `full`.
        """
        self._dispatcher.check()
        return CheckpointRequest(self._parts.registry, full, self.timeout)

    def losses(self) -> list[Loss]:
        """What was lost in this cluster so far: ranges of which every replica was gone, that came back from a
        checkpoint, and the steps that are missing in them; the oldest first. Raises `Timeout`."""
        self._dispatcher.check()
        return self._parts.losses.all(self.timeout)

    def flush(self, timeout: float | None = None) -> None:
        """Waits until every step pushed so far is committed. `Timeout` says whom it waited for.

        Raises the first error of the steps whose `result` nobody has asked for, if servers refused rows of one; its
        `refused` has the rows of that step, and its `others` are the errors of later ones (of the first 64).
        """
        self._steps.flush(timeout)

    def close(self) -> None:
        """Waits briefly for outstanding steps, leaves the cluster and closes every connection."""
        self._parts.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None and not self._parts.over:
                self.flush()
        finally:
            self.close()


def of_name(optimizer: ServerOptimizer | Callable[[str], ServerOptimizer], name: str) -> ServerOptimizer:
    """The optimizer of a tensor: one for all, or what a function gives for its name."""
    return optimizer(name) if callable(optimizer) else optimizer


_POLL_S, _POLL_MOST_S = 0.05, 0.5


class CheckpointRequest:
    """One that was asked for: the coordinator has it made, while training goes on."""

    def __init__(self, registry: Registry, full: bool, timeout_s: float) -> None:
        self._registry = registry
        self._timeout_s = timeout_s
        self._key = registry.want_checkpoint(full, timeout_s)
        self._cut = 0

    def done(self) -> bool:
        """Whether it is made. Raises `CheckpointError` if it cannot be."""
        if not self._cut:
            self._cut = self._registry.checkpoint_made(self._key, self._timeout_s)
        return self._cut > 0

    def result(self, timeout: float | None = None, *, progress: Progress = False) -> int:
        """Waits until it is made, and returns its number. Raises `CheckpointError` that says why it could not be made,
        `Timeout` when `timeout` seconds (default: the client's) were not enough; it may still be made then. progress:
        True shows that it waits, and for how long; a function gets (checkpoints made, 1).

        Under `BSP` not between two steps of which others have pushed the second: they wait for this worker's share.
        """
        runtime = self._registry.runtime
        timeout_s = self._timeout_s if timeout is None else timeout
        until_s, pause_s = runtime.monotonic() + timeout_s, _POLL_S
        with reporting(progress, "checkpoint", "made", 1) as report:
            while not self.done():
                if runtime.monotonic() >= until_s:
                    raise Timeout(f"a checkpoint took longer than {timeout_s:.1f} s")
                runtime.sleep(pause_s)
                pause_s = min(2 * pause_s, _POLL_MOST_S)
            report.advance(1)
        return self._cut


_PART = re.compile(r"[^A-Za-z0-9._-]+")
_HOST_MAX = 32  # characters of a host's name in the name of a worker


@functools.cache
def own_name(host: str, pid: int) -> str:
    """A name that no other process has, the same for all clients of this one. Host and process id alone are not enough:
    in containers of one image they may be alike."""
    return f"worker-{_PART.sub('-', host)[:_HOST_MAX]}-{pid}-{secrets.token_hex(4)}"


def connect(
    url: str | None = None,
    *,
    worker: str = "",
    consistency: Consistency | None = None,
    window: int = 4,
    timeout: float = 30.0,
    app: str = "default",
    raise_on_loss: bool = False,
) -> Client:
    """Joins a cluster as a worker.

    `url` is etcd://host:port[,host:port…]/cluster (default: the environment's ELASTICPS_URL). `worker` names this
    process: started again under its name, it fences its older self and goes on where that was (default: a name that no
    other process has, so that a process that is started again is a new worker). `window` is how many steps may be
    outstanding before `push` waits. `timeout`, in seconds, bounds every wait that has no timeout of its own. `app`
    names one of several applications that share the servers: each has tables, rounds, bounds on staleness and shards of
    its own, and sees nothing of the others. `raise_on_loss`: the next operation raises `DataLost` when ranges were lost
    and came back from a checkpoint; else `ps.losses()` tells.

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
    warm()
    try:
        name = check_name("worker", worker or own_name(os.uname().nodename, os.getpid()))
    except ValueError as error:
        raise ConfigError(f"worker=: {error}") from None
    return Client(Registry.open(url, timeout, Runtime()), name, consistency, window, timeout, app, raise_on_loss)
