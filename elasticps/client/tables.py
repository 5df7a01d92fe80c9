"""Tables and tensors as a training loop holds them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from elasticps.client import lifecycle, loading, scans
from elasticps.client.cache_batches import NOT_USED, CacheUse, check_cache
from elasticps.client.core.routing import PushPlan, Routes, plan_push
from elasticps.client.filtering import Sent
from elasticps.client.inputs import checked_floats, checked_keys, checked_pull, checked_push, checked_read, checked_rows
from elasticps.client.loading import NO_STEP_VALUES
from elasticps.client.pull import ServerPull
from elasticps.client.pull_layouts import BLOCKS
from elasticps.client.push_batch import PushSource
from elasticps.client.reads import Reads
from elasticps.client.row_cache import CachedPull, RowCache
from elasticps.client.short_keys import Saved, Short
from elasticps.client.target import Changes, PushTarget
from elasticps.client.writes import LentRows, Write, check_size
from elasticps.errors import ConfigError, InputError
from elasticps.model.caching import Cache
from elasticps.model.policies import Admission, Eviction, check_admission, check_evictions
from elasticps.model.spec import TableSpec
from elasticps.store.usage import USAGE
from elasticps.system.progress import Progress, reporting
from replication.messages import OperationKind

LOADED_BYTES = 8 << 20  # sent at once
CHUNK, MAX_CHUNK = 65_536, 262_144  # keys of a table that are handed out at once


class SparseTable(PushTarget):
    """int64 key -> row of `dim` floats. A key never pushed has its initial value."""

    def __init__(self, reads: Reads, spec: TableSpec, table_id: int, own: TableSpec, changes: Changes) -> None:
        super().__init__(reads, spec, table_id, own, changes)
        self._short_pull = Short.of(spec.pull)
        self.changes = 0  # how often this client has changed rows past its steps
        self.invalidations = 0  # how often `forget` was called
        self._cache: RowCache | None = None
        self._source: PushSource | None = None  # given last, of a table whose rows are kept
        self._push_width = spec.push_width  # floats of a row that is pushed without filters
        if self._short is not None and self._short.shortens_keys:
            self._push = self._push or self._push_filter()
            self.remembers_pushes = True

    @property
    def key_bytes(self) -> Saved:
        """What this client's keys of tables with filters for them take, without those and with them."""
        both = [short.keys for short in (self._short, self._short_pull) if short is not None]
        return Saved(sum(keys.whole for keys in both), sum(keys.sent for keys in both))

    def keep(self, cache: Cache | None) -> None:
        """From now on rows that were pulled are kept, and shown again; None: no more. Another cache takes the place of
        the first, whose rows are forgotten.

        ConfigError under BSP, and where rows would be older than SSP allows.
        """
        if cache is None:
            self._cache = None
            self.remembers_pushes = self._push is not None
        elif self._cache is None or self._cache.options != cache:
            check_cache(self.name, cache, self._reads.in_rounds, self._reads.bound)
            self._cache = RowCache(cache, self.spec, self.id, self._reads, self._rows)
            self.remembers_pushes = True

    @property
    def cached(self) -> CacheUse:
        """What a `Cache` of this client's has done for the table."""
        return NOT_USED if self._cache is None else self._cache.use

    @property
    def used(self) -> tuple[int, int]:
        """Rows that pulls wanted while there is a `Cache`, and those that were shown from it."""
        return (0, 0) if self._cache is None else self._cache.used

    @property
    def cache(self) -> Cache | None:
        """That which the table was opened with here, if it was."""
        return None if self._cache is None else self._cache.options

    def fetch(self, keys: object, ahead: int = 1) -> None:
        """Asks now for what of the rows of `keys`, int64 [n], will not be in the table's `Cache`, or be too old, when
        this worker has made `ahead` more steps. Returns at once; later pulls find them. InputError for unusable
        arguments, ConfigError without a cache."""
        if self._cache is None:
            raise ConfigError(f"table {self.name!r} keeps no rows: open it with cache=Cache(rows=…, staleness=…)")
        given: object = ahead
        if isinstance(given, bool) or not isinstance(given, int) or ahead < 1:
            raise InputError(f"table {self.name!r}: ahead is a number of steps from 1 on, got {ahead!r}")
        self._cache.fetch(checked_keys(self.name, keys).copy(), ahead)

    def pull(
        self, keys: object, out: NDArray[np.float32] | None = None, *, read: str = "tail", exact: bool = False
    ) -> NDArray[np.float32]:
        """Rows of `keys`, int64 [n], as float32 [n, dim] in the order of the keys; into `out` if given.

        `read="tail"` gives committed values. `read="any"` spreads the load over all replicas, and may show values that
        are not committed yet; one's own pushes are always seen. exact: past the table's filters, and its cache. Raises
        `InputError` for unusable arguments, `Timeout` when servers do not answer in time.
        """
        pull = self.prepare(keys, out, read, exact)
        return self._reads.pulled(pull) if isinstance(pull, ServerPull) else pull().result()

    def pull_async(
        self, keys: object, out: NDArray[np.float32] | None = None, *, read: str = "tail", exact: bool = False
    ) -> ServerPull | CachedPull:
        """Asks for rows now; `result()` of what is returned waits for them."""
        pull = self.prepare(keys, out, read, exact)
        return self._reads.start(pull) if isinstance(pull, ServerPull) else pull()

    def prepare(
        self, keys: object, out: NDArray[np.float32] | None = None, read: str = "tail", exact: bool = False
    ) -> ServerPull | Callable[[], CachedPull]:
        """Checks the arguments of a pull; returns as `planned`."""
        array, rows = checked_rows(self, keys, out, read)
        return self.planned(array, rows, read == "any", exact)

    def planned(
        self, keys: NDArray[np.int64] | None, rows: NDArray[np.float32], any_replica: bool, exact: bool
    ) -> ServerPull | Callable[[], CachedPull]:
        """A pull that is not sent yet, of what `checked_rows` gave; with a `Cache`, a function that begins one."""
        assert keys is not None
        private = keys.copy()  # asked for again when servers change
        if self._cache is not None and not exact:
            return partial(self._begin_cached, private, rows, any_replica)
        return self._server_pull(private, rows, any_replica, exact)

    def _begin_cached(self, keys: NDArray[np.int64], rows: NDArray[np.float32], any_replica: bool) -> CachedPull:
        assert self._cache is not None
        pull = self._cache.start(keys, rows, any_replica)
        if self._screen is not None:
            pull.on_rows = self._screen.noting(keys)
        return pull

    def _rows(self, keys: NDArray[np.int64], any_replica: bool) -> ServerPull:
        """A pull of rows that the cache lacks."""
        return self._server_pull(keys.copy(), np.empty((len(keys), self.dim), np.float32), any_replica, exact=False)

    def _server_pull(
        self, keys: NDArray[np.int64], rows: NDArray[np.float32], any_replica: bool, exact: bool
    ) -> ServerPull:
        if self._short_pull is not None and not exact:
            ordered, where = self._in_order(keys)
            pull = self._coded(ordered, rows, any_replica, where, self._short_pull)
        elif self._pull.code and not exact:
            pull = self._coded(keys, rows, any_replica)
        else:
            pull = ServerPull(self._reads.finish, self._query_any if any_replica else self._query, keys, rows)
        if self._screen is not None:
            pull.on_rows = self._screen.noting(keys)
        return pull

    def _in_order(self, keys: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Each key once, in the order in which a push of them has them; and where each is found there."""
        distinct, which = np.unique(keys, return_inverse=True)
        order = plan_push(distinct, self.salt, self._reads.routes).order
        where = np.empty(len(order), np.int64)
        where[order] = np.arange(len(order))
        return distinct[order], where[which]

    def __len__(self) -> int:
        """Rows that the servers have, those of this client's own steps so far among them."""
        return self._count()

    def _count(self) -> int:
        return scans.count_rows(self._reads.after_own_steps(), self.id, self._reads.routes.view.ranges)

    def __bool__(self) -> bool:
        """A table is one, however many rows it has."""
        return True

    def keys(self, chunk: int = CHUNK) -> Iterator[NDArray[np.int64]]:
        """All keys that have a row, each once, in arrays int64 [n] of about `chunk`, in no order that means anything.

        Training may go on meanwhile, and servers come and go: a row that was there at the beginning is listed, also one
        that this client's own steps so far have made; one that is made meanwhile may be.
        """
        size: object = chunk
        if isinstance(size, bool) or not isinstance(size, int) or not 1 <= chunk <= MAX_CHUNK:
            raise InputError(f"table {self.name!r}: chunk must be a number from 1 to {MAX_CHUNK:,}, got {chunk!r}")
        return scans.list_keys(self._reads.after_own_steps(), self.id, self._reads.routes.view.ranges, chunk)

    def items(self, chunk: int = CHUNK) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
        """The same with the rows, float32 [n, dim], as they are when they are pulled."""
        return ((keys, self.pull(keys, exact=True)) for keys in self.keys(chunk))

    def load(
        self, keys: object, rows: object, *, slots: Mapping[str, object] | None = None, only_new: bool = False,
        progress: Progress = False,
    ) -> None:  # fmt: skip
        """Gives rows of `keys`, int64 [n] without repeats, the values `rows`, float32 [n, dim], past the optimizer: for
        rows trained elsewhere. Slots (momenta, sums) begin anew, or are those that are given, all of them, as `slots()`
        has them. only_new: rows that exist stay as they are. Returns when that is committed, behind this client's own
        steps so far. progress: True shows a bar, a function gets (rows done, rows). Nobody else should train these rows
        meanwhile. `InputError` for unusable arguments, while a step of this client is open; `ServerFull`, `Timeout`.
        """
        array = checked_keys(self.name, keys)
        values = checked_floats(f"table {self.name!r}: rows", rows, (len(array), self.dim))
        if len(np.unique(array)) < len(array):
            raise InputError(f"table {self.name!r}: load takes each key once")
        if slots and only_new:
            raise InputError(f"table {self.name!r}: load(only_new=True) takes no slots: those of new rows are new")
        if slots:
            values = loading.with_slots(self.name, values, slots, self.optimizer.slot_shapes(self.dim))
        step = max(1, LOADED_BYTES // (8 + 4 * values.shape[1]))
        report = reporting(progress, f"load {self.name}", "rows", len(array))
        with self._forgotten(f"loading {self.name!r}", array), report as done:
            for at in range(0, len(array), step):
                some = slice(at, at + step)
                self._load(partial(loading.rows, self.id, self.salt, array[some], values[some]), replace=not only_new)
                done.advance(len(array[some]))

    def slots(self, keys: object) -> dict[str, NDArray[np.float32]]:
        """What the optimizer keeps of rows: by name, float32 [n, floats of a row], in the order of the keys. A key
        never pushed has those of a new row. Errors as for `pull`."""
        shapes = self.optimizer.slot_shapes(self.dim)
        rows = self._state(checked_keys(self.name, keys).copy(), sum(shapes.values()))
        ends = np.cumsum(list(shapes.values()))
        return dict(zip(shapes, np.split(rows, ends[:-1], axis=1), strict=True)) if shapes else {}

    def delete(self, keys: object) -> None:
        """Forgets the rows of `keys`, int64 [n], weights and slots: from now on they read as rows never pushed. Returns
        when that is committed, behind this client's own steps so far. Keys without a row are left alone.

        It happens once, whatever servers do meanwhile. Raises `InputError` while a step of this client is open, and
        `Timeout`; then it may have happened for some of them.
        """
        array = np.unique(checked_keys(self.name, keys))
        nothing = np.empty((len(array), 0), np.float32)
        step = max(1, LOADED_BYTES // 8)
        doing = f"deleting rows of {self.name!r}"
        with self._forgotten(doing, array):
            for at in range(0, len(array), step):
                write = partial(loading.rows, self.id, self.salt, array[at : at + step], nothing[at : at + step])
                self._reads.delete(partial(loading.delete, [write], self._reads.worker.id), doing)

    def clear(self) -> None:
        """Forgets all rows, as `delete` does those of some keys. Other workers may go on pushing meanwhile."""
        questions = partial(loading.erase, self.id, OperationKind.CLEAR, self._reads.worker.id)
        doing = f"clearing {self.name!r}"
        with self._forgotten(doing):
            self._reads.delete(questions, doing)

    # --- admission, usage and eviction: docs/guides/growing-tables.md -------------------------------------------------

    def usage(self, keys: object) -> lifecycle.KeyUsage:
        """When the rows of `keys`, int64 [n], were pushed to last, how often, and their score, in the order of the
        keys; NaN where there is no row. SpecError for a table that keeps no usage; else errors as for `pull`."""
        lifecycle.need_usage(self.spec)
        array = checked_keys(self.name, keys).copy()
        words = np.empty((len(array), USAGE), np.float32)
        self._reads.pulled(ServerPull(self._reads.finish, replace(self._query, dim=USAGE, usage=True), array, words))
        return lifecycle.usage_of(words)

    def state(self) -> lifecycle.TableState:
        """How many rows there are, how many keys wait for one, what was admitted and evicted, and how old and used rows
        are; behind this client's own steps so far. SpecError for a table that keeps no usage; `Timeout`."""
        lifecycle.need_usage(self.spec)
        return lifecycle.state(self._reads.after_own_steps(), self.id, self.name)

    def evict(self, dry_run: bool = False) -> dict[str, int]:
        """Sweeps the whole table now, behind this client's own steps so far, and returns how many rows went, and keys
        that waited for one, by reason. Returns when they are gone at all replicas; under BSP they go when the next
        round closes. dry_run: counts what would go, each row for its first reason, forgets nothing. Without a leading
        coordinator nothing goes.

        SpecError for a table that keeps no usage, `Timeout`.
        """
        lifecycle.need_usage(self.spec)
        going = lifecycle.sweep(self._reads.after_own_steps(), self.id, self.name, bool(dry_run))
        if not dry_run:
            self.forget()
        return going

    def set_admission(self, policy: Admission | None) -> None:
        """Puts the table under another admission policy, None for none: for all workers, from now on, and for those
        that open it later. Keys that wait keep their counts. Returns when all servers have it.

        SpecError if its rows do not keep what the policy needs: nothing is changed then. `Timeout`: call again.
        """
        chosen = check_admission(policy, f"table {self.name!r}: ")
        self._set_policies(lambda spec: spec.with_policies(chosen, spec.eviction))

    def set_eviction(self, policies: Eviction | Sequence[Eviction] | None) -> None:
        """Puts the table under other eviction policies, none for no eviction; otherwise as `set_admission`."""
        chosen = check_evictions(policies, f"table {self.name!r}: ")
        self._set_policies(lambda spec: spec.with_policies(spec.admission, chosen))

    def _set_policies(self, change: lifecycle.ChangePolicies) -> None:
        lifecycle.need_usage(self.spec)
        self.spec = self._changes.set_policies(self.name, self.id, change)

    @contextmanager
    def _forgotten(self, doing: str, keys: NDArray[np.int64] | None = None) -> Iterator[None]:
        """Servers change rows of `keys`, or all, past this client's steps: nothing is added to them later that filters
        kept of gradients before, and afterwards no row is kept that was pulled before."""
        self._forget_pushed(doing, keys)
        try:
            yield
        finally:
            self.changes += 1
            self.forget()

    def source(
        self, keys: NDArray[np.int64] | None, grads: NDArray[np.float32], step_values: NDArray[np.float32]
    ) -> PushSource:
        """What pushing gradients sends: keys int64 [n], grads float32 [n, push_width]."""
        assert keys is not None
        if self._push is None:
            source = PushSource(self.id, self._signed_salt, self._push_width, -1, keys, grads, step_values)
        else:
            source = self._push.source(self.id, self._signed_salt, keys, grads, step_values)
        if self._cache is not None:
            self._source = source
        return source

    def sent(self, step: Sent) -> None:
        """What `source` gave last is outstanding, as a part of a step."""
        super().sent(step)
        source, self._source = self._source, None
        if self._cache is not None and source is not None:
            self._cache.pushed(source)

    def forget(self) -> None:
        """What is kept of rows may be wrong from now on."""
        self.invalidations += 1
        if self._cache is not None:
            self._cache.clear()


class DenseTensor(PushTarget):
    """A float32 tensor on the servers, cut into blocks that are spread over all of them."""

    def __init__(self, reads: Reads, spec: TableSpec, table_id: int, own: TableSpec, changes: Changes) -> None:
        super().__init__(reads, spec, table_id, own, changes)
        self._blocks = np.arange(spec.blocks, dtype=np.int64)
        self._size = math.prod(self.shape)
        self._planned: tuple[int, PushPlan] | None = None  # the plan depends on the view only

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the array which `pull` gives."""
        assert self.spec.shape is not None
        return self.spec.shape

    def pull(
        self, out: NDArray[np.float32] | None = None, *, read: str = "tail", exact: bool = False
    ) -> NDArray[np.float32]:
        """The tensor, float32 of its shape; into `out` if given, which spares the allocation. `read`, `exact` and
        errors as for `SparseTable.pull`."""
        return self._reads.pulled(self.prepare(out, read, exact))

    def pull_async(
        self, out: NDArray[np.float32] | None = None, *, read: str = "tail", exact: bool = False
    ) -> ServerPull:
        """Asks for the tensor now; `result()` of what is returned waits for it."""
        return self._reads.start(self.prepare(out, read, exact))

    def take(self, where: object, *, read: str = "tail", exact: bool = False) -> NDArray[np.float32]:
        """The floats at places `where`, int64 [n], of the flat tensor: float32 [n]. Only blocks that have one are sent,
        of at most 16,384 floats each. `read`, `exact` and errors as for `SparseTable.pull`."""
        checked_read(self.name, read)
        at = checked_keys(self.name, where)
        if len(at) and not 0 <= at.min() <= at.max() < self._size:
            raise InputError(f"tensor {self.name!r} has {self._size} floats, none at {at.min()} or {at.max()}")
        dim, any_replica = self.spec.dim, read == "any"
        blocks, which = np.unique(at // dim, return_inverse=True)
        rows = np.empty((len(blocks), dim), np.float32)
        pull = ServerPull(self._reads.finish, self._query_any if any_replica else self._query, blocks, rows)
        if self._pull.code and not exact:
            pull = self._coded(blocks, rows, any_replica)
        self._reads.pulled(pull)
        return rows[which, at % dim]

    def prepare(self, out: NDArray[np.float32] | None, read: str, exact: bool = False) -> ServerPull:
        """Checks the arguments of a pull; returns as `planned`."""
        return self.planned(*checked_rows(self, None, out, read), read == "any", exact)

    def planned(
        self, keys: NDArray[np.int64] | None, out: NDArray[np.float32], any_replica: bool, exact: bool
    ) -> ServerPull:
        """A pull that is not sent yet, of what `checked_rows` gave; keys is None, for the whole tensor."""
        if self._pull.code and not exact:
            pull = self._coded(self._blocks, out, any_replica)
        else:
            query = self._query_any if any_replica else self._query
            pull = ServerPull(self._reads.finish, query, self._blocks, out, BLOCKS)
        pull.of_tensor = True
        if self._screen is not None:
            pull.on_rows = self._screen.noting_tensor()
        return pull

    def _count(self) -> int:
        return self._size

    def slots(self) -> dict[str, NDArray[np.float32]]:
        """What the optimizer keeps of the tensor, by name: float32 of the tensor's shape where it keeps a float for
        each weight. What it keeps for each block (Adam's `step`) is float32 [k], or [blocks, k] where blocks differ, as
        `step` may while others train. Errors as for `pull`."""
        floats = self.optimizer.slot_floats(self.spec.dim)
        return loading.of_blocks(self.spec, self._state(self._blocks, floats))

    def load(self, values: object, *, slots: Mapping[str, object] | None = None) -> None:
        """Gives the tensor values, float32 of its shape, past the optimizer; as `SparseTable.load`, with slots as
        `slots()` has them."""
        given = checked_floats(f"tensor {self.name!r}", values, self.shape)
        if slots:
            rows = loading.with_weights(self.spec, given, slots)
            step = max(1, LOADED_BYTES // (8 + 4 * rows.shape[1]))
            self._forget_pushed(f"loading {self.name!r}")
            for at in range(0, len(rows), step):
                some = slice(at, at + step)
                self._load(partial(loading.rows, self.id, self.salt, self._blocks[some], rows[some]))
            return
        check_size([self.lent(given, self._reads.routes, NO_STEP_VALUES)])
        self._forget_pushed(f"loading {self.name!r}")
        self._load(lambda routes: self.lent(given, routes, NO_STEP_VALUES))

    def source(
        self, keys: NDArray[np.int64] | None, grads: NDArray[np.float32], step_values: NDArray[np.float32]
    ) -> PushSource:
        """What pushing a gradient sends: float32 of the tensor's shape; keys is None."""
        flat = grads.reshape(self._size)
        if self._push is None:
            return PushSource(self.id, self._signed_salt, self.spec.dim, len(flat), self._blocks, flat, step_values)
        return self._push.source(self.id, self._signed_salt, self._blocks, flat, step_values)

    @property
    def lends(self) -> bool:
        """Whether what is pushed can be sent from the caller's memory."""
        return self._push is None and self._short is None

    def lent(self, values: NDArray[np.float32], routes: Routes, step_values: NDArray[np.float32]) -> Write:
        """The same from the caller's memory: a gradient, or initial values, float32 of the tensor's shape."""
        plan = self._plan(routes)
        return Write(self.id, LentRows(values.reshape(self._size), self.spec.dim, plan), plan.offsets, step_values)

    def _plan(self, routes: Routes) -> PushPlan:
        if self._planned is None or self._planned[0] != routes.epoch:
            self._planned = routes.epoch, plan_push(self._blocks, self.salt, routes)
        return self._planned[1]


Handle = SparseTable | DenseTensor
H = TypeVar("H", SparseTable, DenseTensor, Handle)
Rates = float | Mapping[Handle, float] | None


def planned_pulls(
    opened: Mapping[str, Handle], keys: Mapping[H, object], outs: Mapping[H, NDArray[np.float32]] | None,
    read: str, exact: bool,
) -> tuple[list[H], list[ServerPull | Callable[[], CachedPull]]]:  # fmt: skip
    """The tables and tensors that a pull names, and for each a pull that is not sent yet; of a table with a `Cache` a
    function that begins one. InputError for unusable arguments."""
    checked, any_replica = checked_pull(opened, keys, outs, read), read == "any"  # type: ignore[misc]
    pulls = [handle.planned(mine, rows, any_replica, exact) for handle, mine, rows in checked]
    return list(keys), pulls


def push_sources(
    opened: Mapping[str, Handle], values: Mapping[Handle, object], clock: int, rates: Rates, routes: Routes, copy: bool
) -> tuple[list[PushSource], list[Write]]:
    """What a push sends of each table and tensor that it names: what is to be copied, and what is lent by the caller.
    clock: of its step; rates: instead of the optimizers' own. InputError for unusable arguments."""
    sources: list[PushSource] = []
    lent: list[Write] = []
    known: dict[tuple[int, float | None], NDArray[np.float32]] = {}  # many tables have the same
    of_each, of_all = (rates, None) if rates is not None and isinstance(rates, Mapping) else (None, rates)
    for handle, keys, grads in checked_push(opened, values):
        lr = of_all if of_each is None else of_each.get(handle)
        key = id(handle.optimizer), lr
        step_values = known.get(key)
        if step_values is None:
            step_values = known[key] = handle.optimizer.step_values(clock, lr)
        if not copy and isinstance(handle, DenseTensor) and handle.lends:
            lent.append(handle.lent(grads, routes, step_values))
        else:
            sources.append(handle.source(keys, grads, step_values))
    return sources, lent


@dataclass(frozen=True)
class TableInfo:
    """A table or tensor of the application: its spec, how many rows the servers have of it, and the learning rate that
    `set_lr` gave all workers, if it did."""

    id: int
    spec: TableSpec
    rows: int
    lr: float | None = None
