"""How tables and tensors are opened, listed, changed for all and dropped."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import numpy as np
from numpy.typing import NDArray

from coordinator.core.keys import ON_LOSS, RESTORE, WAIT
from elasticps.client import loading, scans
from elasticps.client.cache_batches import check_cache
from elasticps.client.core.fan_out import Ask, of_heads
from elasticps.client.core.routing import Routes
from elasticps.client.dispatcher import Dispatcher
from elasticps.client.inputs import checked_floats
from elasticps.client.lifecycle import ChangePolicies, set_policies
from elasticps.client.loading import NO_STEP_VALUES, fill
from elasticps.client.reads import Reads
from elasticps.client.registrations import Registration, TableToRegister
from elasticps.client.registry import Registry
from elasticps.client.tables import DenseTensor, Handle, SparseTable, TableInfo
from elasticps.client.writes import Write, check_size
from elasticps.errors import InputError, ServerError, SpecError, UnknownTable
from elasticps.model.caching import Cache
from elasticps.model.spec import TableSpec
from elasticps.wire.frames import (
    CREATED_BYTES,
    HEADER_BYTES,
    MAX_BLOCKS,
    MAX_CREATED,
    Buffer,
    Header,
    Kind,
    json_frame,
    portions,
    unpack_header,
)
from replication.chain import Member
from replication.messages import OperationKind

AT_ONCE = 500  # tables that are registered, made and filled together; the time-out counts for so many
FILLED_BYTES = 4 << 20  # of initial values that are sent together
FEW_HEADS = 16  # to ask so many takes no longer than to look at the registry a few times
CREATOR_S = 2.0  # so long the creator of a new table has for asking more heads, before others ask them too


@dataclass(frozen=True)
class TableRequest:
    """A table that the caller describes; of a tensor with its initial values."""

    spec: TableSpec
    values: NDArray[np.float32] | None = None


@dataclass(frozen=True)
class Opening:
    """A table that is registered, and is being made and filled. handle: what the caller gets."""

    request: TableRequest
    table: Registration
    handle: Handle

    @property
    def nbytes(self) -> int:
        """Of its initial values."""
        return 0 if self.request.values is None else self.request.values.nbytes


class TableCatalog:
    """Opens tables and tensors; `opened` has them by name."""

    def __init__(
        self, registry: Registry, dispatcher: Dispatcher, reads: Reads, opened: dict[str, Handle], timeout_s: float
    ) -> None:
        self.opened = opened
        self._registry = registry
        self._dispatcher = dispatcher
        self._reads = reads
        self._timeout_s = timeout_s

    def sparse(
        self, spec: TableSpec, on_loss: str | None, max_lost_steps: int | None, cache: Cache | None
    ) -> SparseTable:
        """Opens a sparse table, creating it if it is new."""
        if cache is not None:
            check_cache(spec.name, cache, self._reads.in_rounds, self._reads.bound)
        table = cast(SparseTable, self._brought(TableRequest(spec), on_loss, max_lost_steps))
        if cache is not None:
            table.keep(cache)
        return table

    def dense(self, init: object, spec: Callable[[tuple[int, ...]], TableSpec], on_loss: str | None,
              max_lost_steps: int | None) -> DenseTensor:  # fmt: skip
        """Opens a tensor of the shape of `init`; one that is new has its values."""
        return cast(DenseTensor, self._brought(_new_tensor(init, spec), on_loss, max_lost_steps))

    def all_dense(self, requests: Sequence[tuple[object, Callable[[tuple[int, ...]], TableSpec]]]) -> list[DenseTensor]:
        """The same for many tensors at once, of different names: their initial values, and their specs by shape."""
        return [cast(DenseTensor, handle) for handle in self._all_brought([_new_tensor(*one) for one in requests])]

    def _brought(self, request: TableRequest, on_loss: str | None, max_lost_steps: int | None) -> Handle:
        """Opens what the caller describes, with the rate that the caller wants."""
        (handle,) = self._all_brought([request])
        if on_loss is not None:
            handle.set_on_loss(on_loss, max_lost_steps)
        return handle

    def _all_brought(self, requests: Sequence[TableRequest]) -> list[Handle]:
        known = {name: self.opened.get(name) for name in (one.spec.name for one in requests)}
        handles = self._open_all(requests)
        for one, handle in zip(requests, handles, strict=True):
            if handle is known[one.spec.name]:
                handle.open_again(one.spec.optimizer)
            handle.opened()
        return handles

    def known(self) -> dict[str, TableInfo]:
        """All of the application, by name."""
        ask = self._reads.after_own_steps()
        found = self._registry.tables(self._app, self._timeout_s)
        rates = {name: self._registry.rate_of(name, one.id) for name, one in found.items()}
        return {
            name: TableInfo(one.id, one.spec, self._rows(ask, one.id), getattr(rates[name], "lr", None))
            for name, one in found.items()
        }

    def _rows(self, ask: Ask, table: int) -> int:
        try:
            return scans.count_rows(ask, table, self._reads.routes.view.ranges)
        except UnknownTable:  # it is being made just now, or dropped
            return 0

    def open(self, name: str) -> Handle:
        """A table or tensor that there is, as it was made. Raises UnknownTable."""
        spec = self._find(name).spec
        return self._open_all([TableRequest(spec, None if spec.shape is None else np.zeros(spec.shape, np.float32))])[0]

    def clear(self, name: str) -> None:
        """Forgets the rows of a sparse table. Raises UnknownTable; InputError for a tensor."""
        found = self._find(name)
        if found.spec.shape is not None:
            raise InputError(f"{name!r} is a tensor, and has no rows to clear: load values, or drop it")
        handle = self.opened.get(name)
        if not isinstance(handle, SparseTable) or handle.id != found.id:
            handle = SparseTable(self._reads, found.spec, found.id, found.spec, self)
        handle.clear()

    def drop(self, name: str) -> None:
        """Forgets a table, its name too. Raises UnknownTable."""
        found = self._find(name)
        self._settle_before_drop(name)
        self._drop(found)

    def _settle_before_drop(self, name: str) -> None:
        """Own steps come first: servers would refuse rows that were pushed while there was a table."""
        self._reads.settle(f"dropping {name!r}")

    def _find(self, name: str) -> Registration:
        self._dispatcher.check()
        found = self._registry.find(self._app, name, self._timeout_s)
        if found is None:
            raise UnknownTable(
                f"application {self._app!r} has no table {name!r}: `elasticps tables` lists those that there are"
            )
        return found

    def _drop(self, registration: Registration) -> None:
        """In three steps, so that whoever is stopped in between leaves it to the next one who looks: the registry says
        so, all servers do it, the registry forgets the name."""
        name, worker = registration.spec.name, self._dispatcher.worker.id
        with self._dispatcher.lock:
            if (handle := self.opened.get(name)) is not None and handle.id == registration.id:
                del self.opened[name]
                handle.forget()
        marked = self._registry.begin_drop(self._app, registration, self._timeout_s)
        if marked is not None:
            questions = loading.erase(registration.id, OperationKind.DROP, worker)
            self._dispatcher.ask_all(questions, self._timeout_s, f"dropping table {name!r}", writes=True)
            self._registry.end_drop(self._app, marked, self._timeout_s)

    @property
    def _app(self) -> str:
        return self._dispatcher.worker.app

    def _open_all(self, requests: Sequence[TableRequest]) -> list[Handle]:
        """Opens tables of different names, creating those that are new: in few requests, however many there are."""
        self._dispatcher.check()
        starts = range(0, len(requests), AT_ONCE)
        return [handle for start in starts for handle in self._open_some(requests[start : start + AT_ONCE])]

    def _open_some(self, requests: Sequence[TableRequest]) -> list[Handle]:
        tables = self._after_creators(self._register(requests))
        handles = [self._known(table) for table in tables]
        new = list[Opening]()
        for one, table, known in zip(requests, tables, handles, strict=True):
            if known is None:
                handle_type = SparseTable if one.values is None else DenseTensor
                new.append(Opening(one, table, handle_type(self._reads, table.spec, table.id, one.spec, self)))
        try:
            epoch = self._create([one.table for one in new if not self._is_created(one.table)])
            self._fill(new, epoch)
        except (SpecError, UnknownTable, InputError, ServerError):
            self._take_back([one.table for one in new])
            raise
        with self._dispatcher.lock:
            for opening in new:
                if self._known(opening.table) is None:
                    self.opened[opening.handle.name] = opening.handle
                    opening.handle.follow(self._registry.rate_of(opening.handle.name, opening.table.id))
            made = iter([self.opened[opening.handle.name] for opening in new])
            return [next(made) if known is None else known for known in handles]

    def _known(self, table: Registration) -> Handle | None:
        """What was opened here before of a table that is registered."""
        handle = self.opened.get(table.spec.name)
        if handle is None or handle.id != table.id:
            return None
        handle.spec = table.spec  # whose policies others may have changed
        return handle

    def _register(self, requests: Sequence[TableRequest]) -> list[Registration]:
        """Registers all, or finds them. SpecError says how an existing one differs; then nothing is registered."""
        worker = self._dispatcher.worker
        while True:
            to_register = [TableToRegister(one.spec, one.values is None) for one in requests]
            found = self._registry.open_tables(worker.app, to_register, worker.id, self._timeout_s)
            going = [table for table in found if table.dropping]
            for one, table in zip(requests, found, strict=True):
                described = one.spec.with_usage_of(table.spec)
                if not table.dropping and (difference := table.spec.difference(described)):
                    self._take_back(found)
                    raise SpecError(_differs(table.spec, one.spec, difference))
            if not going:
                return found
            for table in going:  # somebody has begun that, and was stopped
                self._settle_before_drop(table.spec.name)
                self._drop(table)

    def _after_creators(self, tables: list[Registration]) -> list[Registration]:
        """Lets whoever has registered a new table ask all heads: of many workers that open it at once, each would ask
        each head. Returns tables as they are registered then."""
        worker, several = self._dispatcher.worker, len(self._dispatcher.routes.heads) > FEW_HEADS
        others = [one for one in tables if not (one.made or one.created or one.creator == worker.id)]
        waited_for = [one for one in others if several and self._known(one) is None]
        if not waited_for:
            return tables
        patience_s = min(CREATOR_S, self._timeout_s)
        found = self._registry.wait_created(worker.app, waited_for, patience_s, self._timeout_s)
        newest = {one.id: one for one in found if not one.dropping}
        return [newest.get(one.id, one) for one in tables]

    def _take_back(self, tables: Sequence[Registration]) -> None:
        """Drops those that this call has registered: servers do not take them, and nobody else may have them."""
        for table in tables:
            if table.made:
                self._drop(table)

    def hear(self, name: str) -> None:
        """A rate was set; in the control loop."""
        with self._dispatcher.lock:
            if (handle := self.opened.get(name)) is not None:
                handle.follow(self._registry.rate_of(name, handle.id))

    def set_rate(self, table: str, number: int, lr: float | None) -> None:
        """For all workers; None: each one's own again."""
        self._dispatcher.check()
        self._registry.set_rate(table, number, lr, self._timeout_s)

    def set_on_loss(self, table: str, number: int, policy: str, max_lost_steps: int | None) -> None:
        """What becomes of lost ranges of it."""
        given: object = max_lost_steps
        if policy not in (WAIT, RESTORE):
            raise InputError(f"{table!r}: on_loss is {WAIT!r} or {RESTORE!r}, not {policy!r}")
        if given is not None and (isinstance(given, bool) or not isinstance(given, int) or given < 0):
            raise InputError(f"{table!r}: max_lost_steps is a number of steps, or None for any, not {given!r}")
        if policy == RESTORE and self._dispatcher.pushes.round:
            raise InputError(
                f"{table!r}: under BSP a range cannot come back alone, rounds would be other than those of one "
                f"process: on_loss={WAIT!r}, and restore the whole checkpoint"
            )
        self._dispatcher.check()
        value = json.dumps({"table": number, "on_loss": policy, "max_lost_steps": max_lost_steps}).encode()
        self._registry.put(f"{ON_LOSS}{self._app}/{table}", value, self._timeout_s, ours=True)

    def set_policies(self, table: str, number: int, change: ChangePolicies) -> TableSpec:
        """Puts a table under other policies, at all servers, and returns its spec. Of two workers that change it at the
        same time each goes on until servers have what is registered, so the later one counts everywhere."""
        self._dispatcher.check()
        found = self._registry.set_policies(self._app, table, number, change, self._timeout_s)
        while True:
            if found is None:
                raise UnknownTable(f"table {table!r} was dropped meanwhile, or made again: open it again")
            questions, what = set_policies(number, found), f"setting policies of table {table!r}"
            self._dispatcher.ask_all(questions, self._timeout_s, what, writes=True)
            sent, found = found, self._registry.policies(self._app, table, number, self._timeout_s)
            if found == sent:
                return sent

    def _is_created(self, table: Registration) -> bool:
        """Whether all heads have a table: they had, and none has begun anew since, with what it lacks perhaps."""
        return not table.made and table.created >= max(1, int(self._dispatcher.routes.view.recovery_epoch.max()))

    def _create(self, tables: Sequence[Registration]) -> int:
        """Makes tables known to the heads of all ranges, which tell their successors; to absent ones later, but before
        anything is pushed there. One that was registered before has come with what ranges begin anew from. Returns the
        epoch of a view all heads of which have made them, 0 if some could not be asked."""
        if not tables:
            return 0
        epoch = 0
        several = list(portions(tables, MAX_CREATED, CREATED_BYTES, lambda table: len(table.spec.to_json())))

        def questions(routes: Routes) -> Iterator[tuple[Member, Header, list[Buffer]]]:
            nonlocal epoch
            epoch = 0 if routes.headless else routes.epoch
            for some in several:
                documents = [{"id": table.id, "spec": table.spec.to_json()} for table in some]
                frame = json_frame(Kind.CREATE, documents[0] if len(some) == 1 else {"tables": documents})
                header, body = unpack_header(frame), frame[HEADER_BYTES:]
                yield from of_heads(header, body, all_ranges=any(table.made for table in some))(routes)

        what = f"creating table {_named(tables)}"
        return epoch if self._dispatcher.ask_all(questions, self._timeout_s, what, of_absent=False) else 0

    def _fill(self, new: Sequence[Opening], epoch: int) -> None:
        """Stores initial values of tensors where there are none; a no-op on tensors that are ready. epoch: as `_create`
        returned it."""
        worker = self._dispatcher.worker
        empty = [one for one in new if isinstance(one.handle, DenseTensor) and not one.table.ready]
        if epoch and (made := [one.table for one in new if one.table.ready and not self._is_created(one.table)]):
            self._registry.mark_created(worker.app, made, epoch, self._timeout_s)
        others = [one.table for one in empty if one.table.creator != worker.id]
        if others:
            given_up = {one.id for one in self._registry.wait_ready(worker.app, others, self._timeout_s)}
            empty = [one for one in empty if one.table.creator == worker.id or one.table.id in given_up]
        for some in portions(empty, MAX_BLOCKS, FILLED_BYTES, lambda one: one.nbytes):
            writes = [partial(_initial, cast(DenseTensor, one.handle), one.request.values) for one in some]
            check_size([write(self._dispatcher.routes) for write in writes])
            tables, questions = [one.table for one in some], fill(writes, worker.id, replace=False)
            what = f"filling tensor {_named(tables)}"
            self._dispatcher.ask_all(questions, self._timeout_s, what, writes=True)
        if empty:
            self._registry.mark_ready(worker.app, [replace(one.table, created=epoch) for one in empty], self._timeout_s)


def _initial(tensor: DenseTensor, values: object, routes: Routes) -> Write:
    """The initial values of a tensor."""
    return tensor.lent(cast(NDArray[np.float32], values), routes, NO_STEP_VALUES)


def _new_tensor(init: object, spec: Callable[[tuple[int, ...]], TableSpec]) -> TableRequest:
    if init is None:  # numpy makes NaN of it
        raise InputError("a tensor needs init=, float32 values of its shape, got None")
    shape = getattr(init, "shape", None)
    described = spec(np.asarray(init, np.float32).shape if shape is None else tuple(shape))
    return TableRequest(
        described, checked_floats(f"tensor {described.name!r}: init", init, described.shape or ()).copy()
    )


def _differs(there: TableSpec, described: TableSpec, difference: str) -> str:
    """How what is opened differs from what is there, for people."""
    if (there.shape is None) != (described.shape is None):
        what, call = f"a table of dim {there.dim}", "ps.table"
        if there.shape is not None:
            what, call = f"a dense tensor of shape {there.shape}", "ps.tensor"
        return f"{there.name!r} exists, as {what}. Open it with {call}, or use another name"
    kind = "table" if there.shape is None else "tensor"
    return f"{kind} {there.name!r} exists with another spec: its {difference}. Use the same spec or another name"


def _named(tables: Sequence[Registration]) -> str:
    """Names tables in an error."""
    more = f" and {len(tables) - 1} more" if len(tables) > 1 else ""
    return f"{tables[0].spec.name!r}{more}"
