"""Tables and tensors as a training loop holds them, and how they are opened."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

from coordinator.adoption import ON_LOSS
from coordinator.losses import RESTORE, WAIT
from elasticps.client import filling, listing
from elasticps.client.dispatcher import Dispatcher
from elasticps.client.filling import NO_STEP_VALUES, fill
from elasticps.client.filtering import Feedback, PushFilter
from elasticps.client.inputs import checked_floats, checked_keys, checked_out, checked_read
from elasticps.client.protocol.fan_out import of_heads
from elasticps.client.protocol.routing import PushPlan, Routes, plan_push
from elasticps.client.pulls import CodedRead, DenseRead, Read, SparseRead
from elasticps.client.push_batch import Source
from elasticps.client.rates import SetRate
from elasticps.client.reads import Reads
from elasticps.client.registry import Registration, Registry
from elasticps.client.writes import LentRows, Write, check_size
from elasticps.errors import InputError, ServerError, SpecError, UnknownTable
from elasticps.hashing import table_salt
from elasticps.optimizers import Optimizer, Schedule
from elasticps.spec import TableSpec
from elasticps.store.codec import Codec
from elasticps.wire.frames import HEADER_BYTES, Kind, json_frame, unpack_header
from replication.messages import OperationKind

LOADED_BYTES = 8 << 20  # sent at once
CHUNK, MAX_CHUNK = 65_536, 262_144  # keys of a table that are handed out at once


class Changes(Protocol):
    """Who changes what is set of tables for all workers."""

    def set_rate(self, handle: _Handle, lr: float | None) -> None: ...
    def set_on_loss(self, handle: _Handle, policy: str, max_lost_steps: int | None) -> None: ...


def _with_rate(optimizer: Optimizer, lr: float) -> Optimizer:
    return replace(optimizer, lr=lr)  # type: ignore[type-var]  # all of them are dataclasses


def _same_rate(one: object, other: object) -> bool:
    """Schedules are equal if their function is the same object."""
    if isinstance(one, Schedule) and isinstance(other, Schedule):
        return one.function is other.function
    return one == other


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=6)  # whoever calls Client.table or Client.tensor


class _Handle:
    def __init__(self, reads: Reads, spec: TableSpec, table_id: int, own: TableSpec, changes: Changes) -> None:
        self._reads = reads
        self._changes = changes
        self.spec = spec
        self.id = table_id
        self.name = spec.name
        self.dim = spec.dim
        self.salt = table_salt(table_id)
        self._signed_salt = int(self.salt.view(np.int64))
        self._own = own.optimizer  # the caller's: a schedule is no part of the registered spec
        self.optimizer = self._own  # with the rate that was set, if one was
        self.rate_set: SetRate | None = None
        self._push = PushFilter(spec) if spec.push else None
        self._pull = Codec(spec.pull, spec.dim)

    @property
    def feedback(self) -> Feedback:
        """What filters have dropped of this client's gradients, and is kept to be pushed with the next ones."""
        return Feedback(0, 0) if self._push is None else self._push.feedback

    @property
    def lends(self) -> bool:
        """Whether what is pushed can be sent from the caller's memory."""
        return False

    def sent(self) -> None:
        """What `source` gave last is outstanding."""
        if self._push is not None:
            self._push.sent()

    def set_lr(self, lr: float | None) -> None:
        """Another learning rate for all workers of the application: for this one's next step, for others' within
        moments, and for those that open the table later, whatever they bring. None takes it back: each one's own again.

        Returns when etcd has it. InputError if the optimizer has no rate, and for a schedule, which is a function of
        one worker: open the table with that, or give each push its rate. Raises `Timeout`.
        """
        if not hasattr(self._own, "lr"):
            raise InputError(f"{self.name!r}: {type(self._own).__name__} knows no learning rate")
        given: object = lr
        if callable(given) or isinstance(given, Schedule):
            raise InputError(f"{self.name!r}: set_lr takes a number; a schedule is for ps.table(…) or push(…, lr=…)")
        if lr is not None:
            lr = float(_with_rate(self._own, lr).lr)  # type: ignore[arg-type]  # checked there
        self._changes.set_rate(self, lr)

    def set_on_loss(self, policy: str, max_lost_steps: int | None = None) -> None:
        """What becomes of ranges of which every replica is gone: "wait", for one of them or for a person, as it is
        unless said otherwise; or "restore": they come back from the newest checkpoint while training goes on, without
        the steps since, if all tables of the cluster say so. Never more than `max_lost_steps` of any worker.

        For all workers, from now on. InputError; under BSP there is only "wait". Raises `Timeout`.
        """
        self._changes.set_on_loss(self, policy, max_lost_steps)

    def follow(self, rate: SetRate | None) -> None:
        """Somebody has set a rate; None: nobody has yet."""
        if rate is not None and rate != self.rate_set and hasattr(self._own, "lr"):
            self.rate_set = rate
            self._choose()

    def open_again(self, own: Optimizer) -> None:
        """The caller brings another rate, maybe: it counts for all that use the table on this client."""
        before, now = getattr(self._own, "lr", None), getattr(own, "lr", None)
        if not _same_rate(before, now):
            _warn(
                f"table {self.name!r} is open here with learning rate {before}: from now on {now}, for all who use it"
            )
        self._own = own
        self._choose()

    def opened(self) -> None:
        """Says so if the caller's rate is not the one that counts."""
        if self.rate_set is not None and self.rate_set.lr not in (None, getattr(self._own, "lr", None)):
            _warn(
                f"table {self.name!r} has learning rate {self.rate_set.lr}, which set_lr() gave all workers, not the "
                f"{getattr(self._own, 'lr', None)} that it is opened with here; set_lr(None) takes it back"
            )

    def _choose(self) -> None:
        lr = None if self.rate_set is None else self.rate_set.lr
        self.optimizer = self._own if lr is None else _with_rate(self._own, lr)

    def _coded(self, keys: NDArray[np.int64], out: NDArray[np.float32], any_replica: bool) -> CodedRead:
        return CodedRead(self._reads.finish, self.id, self.salt, self._pull, self.name, keys, out, any_replica)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} of cluster {self._reads.cluster!r}>"

    def _load(self, write: Callable[[Routes], Write]) -> None:
        self._reads.ask(fill(write, self._reads.worker.id, replace=True), f"loading {self.name!r}", writes=True)


class SparseTable(_Handle):
    """int64 key -> row of `dim` floats. A key never pushed has its initial value."""

    def __init__(self, reads: Reads, spec: TableSpec, table_id: int, own: TableSpec, changes: Changes) -> None:
        super().__init__(reads, spec, table_id, own, changes)
        self._grads = f"table {self.name!r}: grads"

    def pull(
        self, keys: object, out: NDArray[np.float32] | None = None, *, read: str = "tail", exact: bool = False
    ) -> NDArray[np.float32]:
        """Rows of `keys`, int64 [n], as float32 [n, dim] in the order of the keys; into `out` if given.

        `read="tail"` gives committed values. `read="any"` spreads the load over all replicas, and may show values that
        are not committed yet; one's own pushes are always seen. exact: past the table's filters. Raises `InputError`
        for unusable arguments, `Timeout` when servers do not answer in time.
        """
        return self._reads.pulled(self._prepare(keys, out, read, exact))

    def pull_async(
        self, keys: object, out: NDArray[np.float32] | None = None, *, read: str = "tail", exact: bool = False
    ) -> SparseRead:
        """Asks for rows now; `result()` of what is returned waits for them."""
        return self._reads.start(self._prepare(keys, out, read, exact))

    def _prepare(self, keys: object, out: NDArray[np.float32] | None, read: str, exact: bool) -> SparseRead:
        """A read that nobody has been asked for yet."""
        checked_read(self.name, read)
        array = checked_keys(self.name, keys)
        shape = (len(array), self.dim)
        rows = np.empty(shape, np.float32) if out is None else checked_out(f"table {self.name!r}", out, shape)
        private = array if isinstance(keys, list | tuple) else array.copy()  # asked for again when servers change
        if self.spec.pull and not exact:
            return self._coded(private, rows, read == "any")
        return SparseRead(self._reads.finish, self.id, self.salt, self.dim, self.name, private, rows, read == "any")

    def __len__(self) -> int:
        """Rows that the servers have."""
        return listing.count(self._reads.ask, self.id, self._reads.routes.view.ranges)

    def __bool__(self) -> bool:
        """A table is one, however many rows it has."""
        return True

    def keys(self, chunk: int = CHUNK) -> Iterator[NDArray[np.int64]]:
        """All keys that have a row, each once, in arrays int64 [n] of about `chunk`, in no order that means anything.

        Training may go on meanwhile, and servers come and go: a row that was there at the beginning is listed; one that
        is made meanwhile may be.
        """
        asked: object = chunk
        if isinstance(asked, bool) or not isinstance(asked, int) or not 1 <= chunk <= MAX_CHUNK:
            raise InputError(f"table {self.name!r}: chunk must be a number from 1 to {MAX_CHUNK:,}, got {chunk!r}")
        return listing.parts(self._reads.ask, self.id, self._reads.routes.view.ranges, chunk)

    def items(self, chunk: int = CHUNK) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
        """The same with the rows, float32 [n, dim], as they are when they are pulled."""
        return ((keys, self.pull(keys, exact=True)) for keys in self.keys(chunk))

    def load(self, keys: object, rows: object, *, slots: Mapping[str, object] | None = None) -> None:
        """Gives rows of `keys`, int64 [n] without repeats, the values `rows`, float32 [n, dim], past the optimizer: for
        rows trained elsewhere. Slots (momenta, sums) begin anew, or are those that are given, all of them, as `slots()`
        has them. Returns when that is committed.

        Nobody else should train these rows meanwhile. `InputError` for unusable arguments, `ServerFull`.
        """
        array = checked_keys(self.name, keys)
        values = checked_floats(f"table {self.name!r}: rows", rows, (len(array), self.dim))
        if len(np.unique(array)) < len(array):
            raise InputError(f"table {self.name!r}: load takes each key once")
        if slots:
            values = filling.with_slots(self.name, values, slots, self.optimizer.slot_shapes(self.dim))
        step = max(1, LOADED_BYTES // (8 + 4 * values.shape[1]))
        for at in range(0, len(array), step):
            some = slice(at, at + step)
            self._load(partial(filling.rows, self.id, self.salt, array[some], values[some]))

    def slots(self, keys: object) -> dict[str, NDArray[np.float32]]:
        """What the optimizer keeps of rows: by name, float32 [n, floats of a row], in the order of the keys. A key
        never pushed has those of a new row. Errors as for `pull`."""
        shapes = self.optimizer.slot_shapes(self.dim)
        array, floats = checked_keys(self.name, keys), sum(shapes.values())
        rows = np.empty((len(array), floats), np.float32)
        if floats:
            asked = SparseRead(
                self._reads.finish, self.id, self.salt, floats, self.name, array.copy(), rows, False, slots=True
            )
            self._reads.pulled(asked)
        ends = np.cumsum(list(shapes.values()))
        return dict(zip(shapes, np.split(rows, ends[:-1], axis=1), strict=True)) if shapes else {}

    def delete(self, keys: object) -> None:
        """Forgets the rows of `keys`, int64 [n], weights and slots: from now on they read as rows never pushed. Returns
        when that is committed, behind this client's own steps so far. Keys without a row are left alone.

        It happens once, whatever servers do meanwhile. Raises `Timeout`; then it may have happened for some of them.
        """
        array = np.unique(checked_keys(self.name, keys))
        nothing = np.empty((len(array), 0), np.float32)
        step = max(1, LOADED_BYTES // 8)
        for at in range(0, len(array), step):
            write = partial(filling.rows, self.id, self.salt, array[at : at + step], nothing[at : at + step])
            worker = self._reads.worker.id
            self._reads.delete(partial(filling.delete, write, worker), f"deleting rows of {self.name!r}")

    def clear(self) -> None:
        """Forgets all rows, as `delete` does those of some keys. Workers may go on pushing meanwhile."""
        questions = partial(filling.erase, self.id, OperationKind.CLEAR, self._reads.worker.id)
        self._reads.delete(questions, f"clearing {self.name!r}")

    def source(self, value: object, step_values: NDArray[np.float32]) -> Source:
        """What pushing `value`, a pair (keys int64 [n], grads float32 [n, dim]), sends."""
        if not isinstance(value, tuple) or len(value) != 2:
            raise InputError(f"table {self.name!r}: push a pair (keys, grads), got {type(value).__name__}")
        keys = checked_keys(self.name, value[0])
        grads = checked_floats(self._grads, value[1], (len(keys), self.dim))
        if self._push is None:
            return Source(self.id, self._signed_salt, self.dim, -1, keys, grads, step_values)
        return self._push.source(self.id, self._signed_salt, keys, grads, step_values)


class DenseTensor(_Handle):
    """A float32 tensor on the servers, cut into blocks that are spread over all of them."""

    def __init__(self, reads: Reads, spec: TableSpec, table_id: int, own: TableSpec, changes: Changes) -> None:
        super().__init__(reads, spec, table_id, own, changes)
        self._blocks = np.arange(spec.blocks, dtype=np.int64)
        self._size = math.prod(self.shape)
        self._grads = f"tensor {self.name!r}"
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

    def pull_async(self, out: NDArray[np.float32] | None = None, *, read: str = "tail", exact: bool = False) -> Read:
        """Asks for the tensor now; `result()` of what is returned waits for it."""
        return self._reads.start(self.prepare(out, read, exact))

    def prepare(self, out: NDArray[np.float32] | None, read: str, exact: bool = False) -> Read:
        """A read that nobody has been asked for yet."""
        checked_read(self.name, read)
        if out is None:
            out = np.empty(self.shape, np.float32)
        else:
            checked_out(f"tensor {self.name!r}", out, self.shape)
        if self.spec.pull and not exact:
            return self._coded(self._blocks, out, read == "any")
        dim, any_replica = self.spec.dim, read == "any"
        return DenseRead(self._reads.finish, self.id, self.salt, dim, self.name, self._blocks, out, any_replica)

    def load(self, values: object) -> None:
        """Gives the tensor values, float32 of its shape, past the optimizer; as `SparseTable.load`."""
        given = self._flat(values).reshape(self.shape)
        check_size([self.lent(given, self._reads.routes, NO_STEP_VALUES)])
        self._load(lambda routes: self.lent(given, routes, NO_STEP_VALUES))

    def source(self, value: object, step_values: NDArray[np.float32]) -> Source:
        """What pushing `value`, a gradient float32 of the tensor's shape, sends."""
        flat = self._flat(value)
        if self._push is None:
            return Source(self.id, self._signed_salt, self.spec.dim, len(flat), self._blocks, flat, step_values)
        return self._push.source(self.id, self._signed_salt, self._blocks, flat, step_values)

    @property
    def lends(self) -> bool:
        """Whether what is pushed can be sent from the caller's memory."""
        return self._push is None

    def lent(self, value: object, routes: Routes, step_values: NDArray[np.float32]) -> Write:
        """The same from the caller's memory: a gradient, or initial values."""
        plan = self._plan(routes)
        return Write(self.id, LentRows(self._flat(value), self.spec.dim, plan), plan.offsets, step_values)

    def _flat(self, value: object) -> NDArray[np.float32]:
        return checked_floats(self._grads, value, self.shape).reshape(self._size)

    def _plan(self, routes: Routes) -> PushPlan:
        if self._planned is None or self._planned[0] != routes.epoch:
            self._planned = routes.epoch, plan_push(self._blocks, self.salt, routes)
        return self._planned[1]


Handle = SparseTable | DenseTensor


@dataclass(frozen=True)
class TableInfo:
    """A table or tensor of the application: its spec, how many rows the servers have of it, and the learning rate that
    `set_lr` gave all workers, if it did."""

    id: int
    spec: TableSpec
    rows: int
    lr: float | None = None


class Tables:
    """Opens tables and tensors; `opened` has them by name."""

    def __init__(
        self, registry: Registry, dispatcher: Dispatcher, reads: Reads, opened: dict[str, Handle], timeout_s: float
    ) -> None:
        self.opened = opened
        self._registry = registry
        self._dispatcher = dispatcher
        self._reads = reads
        self._timeout_s = timeout_s

    def sparse(self, spec: TableSpec) -> SparseTable:
        """Opens a sparse table, creating it if it is new."""
        return cast(SparseTable, self._brought(spec, None))

    def dense(self, spec: TableSpec, values: NDArray[np.float32]) -> DenseTensor:
        """Opens a tensor; one that is new has these values."""
        return cast(DenseTensor, self._brought(spec, values))

    def _brought(self, spec: TableSpec, values: NDArray[np.float32] | None) -> Handle:
        """Opens what the caller describes, with the rate that the caller wants."""
        known = self.opened.get(spec.name)
        handle = self._open(spec, values)
        if handle is known:
            handle.open_again(spec.optimizer)
        handle.opened()
        return handle

    def known(self) -> dict[str, TableInfo]:
        """All of the application, by name."""
        found = self._registry.tables(self._app, self._timeout_s)
        rates = {name: self._registry.rate_of(name, one.id) for name, one in found.items()}
        return {
            name: TableInfo(one.id, one.spec, self._rows(one.id), getattr(rates[name], "lr", None))
            for name, one in found.items()
        }

    def _rows(self, table: int) -> int:
        try:
            return listing.count(self._reads.ask, table, self._reads.routes.view.ranges)
        except UnknownTable:  # it is being made just now, or dropped
            return 0

    def open(self, name: str) -> Handle:
        """A table or tensor that there is, as it was made. Raises UnknownTable."""
        spec = self._find(name).spec
        return self._open(spec, None if spec.shape is None else np.zeros(spec.shape, np.float32))

    def clear(self, name: str) -> None:
        """Forgets the rows of a sparse table. Raises UnknownTable; InputError for a tensor."""
        found = self._find(name)
        if found.spec.shape is not None:
            raise InputError(f"{name!r} is a tensor, and has no rows to clear: load values, or drop it")
        SparseTable(self._reads, found.spec, found.id, found.spec, self).clear()

    def drop(self, name: str) -> None:
        """Forgets a table, its name too. Raises UnknownTable."""
        self._drop(self._find(name))

    def _find(self, name: str) -> Registration:
        self._dispatcher.check()
        found = self._registry.tables(self._app, self._timeout_s).get(name)
        if found is None:
            raise UnknownTable(f"application {self._app!r} has no table {name!r}")
        return found

    def _drop(self, registration: Registration) -> None:
        """In three steps, so that whoever is stopped in between leaves it to the next one who looks: the registry says
        so, all servers do it, the registry forgets the name."""
        name, worker = registration.spec.name, self._dispatcher.worker.id
        with self._dispatcher.lock:
            if (handle := self.opened.get(name)) is not None and handle.id == registration.id:
                del self.opened[name]
        marked = self._registry.begin_drop(self._app, registration, self._timeout_s)
        if marked is not None:
            questions = filling.erase(registration.id, OperationKind.DROP, worker)
            self._dispatcher.ask_all(questions, self._timeout_s, f"dropping table {name!r}", writes=True)
            self._registry.end_drop(self._app, marked, self._timeout_s)

    @property
    def _app(self) -> str:
        return self._dispatcher.worker.app

    def _open(self, spec: TableSpec, values: NDArray[np.float32] | None) -> Handle:
        self._dispatcher.check()
        worker, known = self._dispatcher.worker, self.opened.get(spec.name)

        def register() -> Registration:
            return self._registry.open_table(worker.app, spec, worker.id, values is None, self._timeout_s)

        while (registration := register()).dropping:
            self._drop(registration)
        if known is not None and known.id == registration.id:
            return known
        handle_type = SparseTable if values is None else DenseTensor
        handle = handle_type(self._reads, registration.spec, registration.id, spec, self)
        try:
            self._create(registration)
            if isinstance(handle, DenseTensor):
                self._fill(handle, registration, values)
        except (SpecError, UnknownTable, InputError, ServerError):
            if registration.made:  # the servers do not take it, and nobody else may have it
                self._drop(registration)
            raise
        with self._dispatcher.lock:
            before = self.opened.get(spec.name)
            if before is None or before.id != handle.id:
                self.opened[spec.name] = handle
                handle.follow(self._registry.rate_of(spec.name, handle.id))
            return self.opened[spec.name]

    def hear(self, name: str) -> None:
        """A rate was set; in the control loop."""
        with self._dispatcher.lock:
            if (handle := self.opened.get(name)) is not None:
                handle.follow(self._registry.rate_of(name, handle.id))

    def set_rate(self, handle: _Handle, lr: float | None) -> None:
        """For all workers; None: each one's own again."""
        self._dispatcher.check()
        self._registry.set_rate(handle.name, handle.id, lr, self._timeout_s)

    def set_on_loss(self, handle: _Handle, policy: str, max_lost_steps: int | None) -> None:
        """What becomes of lost ranges of it."""
        given: object = max_lost_steps
        if policy not in (WAIT, RESTORE):
            raise InputError(f"{handle.name!r}: on_loss is {WAIT!r} or {RESTORE!r}, not {policy!r}")
        if given is not None and (isinstance(given, bool) or not isinstance(given, int) or given < 0):
            raise InputError(f"{handle.name!r}: max_lost_steps is a number of steps, or None for any, not {given!r}")
        if policy == RESTORE and self._dispatcher.pushes.round:
            raise InputError(
                f"{handle.name!r}: under BSP a range cannot come back alone, rounds would be other than those of one "
                f"process: on_loss={WAIT!r}, and restore the whole checkpoint"
            )
        self._dispatcher.check()
        value = json.dumps({"table": handle.id, "on_loss": policy, "max_lost_steps": max_lost_steps}).encode()
        self._registry.put(f"{ON_LOSS}{self._app}/{handle.name}", value, self._timeout_s)

    def _create(self, registration: Registration) -> None:
        """Makes the table known to the heads of all ranges, which tell their successors; to absent ones later, but
        before anything is pushed there."""
        document = {"id": registration.id, "spec": registration.spec.to_json()}
        frame = json_frame(Kind.CREATE, document)
        header, body = unpack_header(frame), frame[HEADER_BYTES:]
        what = f"creating table {registration.spec.name!r}"
        self._dispatcher.ask_all(of_heads(header, body), self._timeout_s, what, of_absent=False)

    def _fill(self, tensor: DenseTensor, registration: Registration, values: object) -> None:
        """Stores initial values where there are none; a no-op on a tensor that is ready."""
        if registration.ready:
            return
        worker = self._dispatcher.worker
        mine = registration.creator == worker.id
        if not mine and self._registry.wait_ready(worker.app, tensor.name, registration.creator, self._timeout_s):
            return
        check_size([tensor.lent(values, self._dispatcher.routes, NO_STEP_VALUES)])

        questions = fill(lambda routes: tensor.lent(values, routes, NO_STEP_VALUES), worker.id, replace=False)
        self._dispatcher.ask_all(questions, self._timeout_s, f"filling tensor {tensor.name!r}", writes=True)
        self._registry.mark_ready(worker.app, registration, self._timeout_s)
