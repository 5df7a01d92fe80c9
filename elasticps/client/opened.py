"""How tables and tensors are opened, listed, changed for all and dropped."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import cast

import numpy as np
from numpy.typing import NDArray

from coordinator.adoption import ON_LOSS
from coordinator.losses import RESTORE, WAIT
from elasticps.caching import Cache
from elasticps.client import filling, listing
from elasticps.client.cache_use import check_cache
from elasticps.client.dispatcher import Dispatcher
from elasticps.client.filling import NO_STEP_VALUES, fill
from elasticps.client.inputs import checked_floats
from elasticps.client.protocol.fan_out import Ask, of_heads
from elasticps.client.reads import Reads
from elasticps.client.registry import Registration, Registry
from elasticps.client.tables import DenseTensor, Handle, SparseTable, TableInfo
from elasticps.client.writes import check_size
from elasticps.errors import InputError, ServerError, SpecError, UnknownTable
from elasticps.spec import TableSpec
from elasticps.wire.frames import HEADER_BYTES, Kind, json_frame, unpack_header
from replication.messages import OperationKind


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

    def sparse(
        self, spec: TableSpec, on_loss: str | None, max_lost_steps: int | None, cache: Cache | None
    ) -> SparseTable:
        """Opens a sparse table, creating it if it is new."""
        if cache is not None:
            check_cache(spec.name, cache, self._reads.in_rounds, self._reads.bound)
        table = cast(SparseTable, self._brought(spec, None, on_loss, max_lost_steps))
        if cache is not None:
            table.keep(cache)
        return table

    def dense(self, init: object, spec: Callable[[tuple[int, ...]], TableSpec], on_loss: str | None,
              max_lost_steps: int | None) -> DenseTensor:  # fmt: skip
        """Opens a tensor of the shape of `init`; one that is new has its values."""
        shape = getattr(init, "shape", None)
        described = spec(np.asarray(init, np.float32).shape if shape is None else tuple(shape))
        values = checked_floats(f"tensor {described.name!r}: init", init, described.shape or ()).copy()
        return cast(DenseTensor, self._brought(described, values, on_loss, max_lost_steps))

    def _brought(
        self, spec: TableSpec, values: NDArray[np.float32] | None, on_loss: str | None, max_lost_steps: int | None
    ) -> Handle:
        """Opens what the caller describes, with the rate that the caller wants."""
        known = self.opened.get(spec.name)
        handle = self._open(spec, values)
        if handle is known:
            handle.open_again(spec.optimizer)
        handle.opened()
        if on_loss is not None:
            handle.set_on_loss(on_loss, max_lost_steps)
        return handle

    def known(self) -> dict[str, TableInfo]:
        """All of the application, by name."""
        ask = self._reads.behind_own_steps()
        found = self._registry.tables(self._app, self._timeout_s)
        rates = {name: self._registry.rate_of(name, one.id) for name, one in found.items()}
        return {
            name: TableInfo(one.id, one.spec, self._rows(ask, one.id), getattr(rates[name], "lr", None))
            for name, one in found.items()
        }

    def _rows(self, ask: Ask, table: int) -> int:
        try:
            return listing.count(ask, table, self._reads.routes.view.ranges)
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
        """Own steps come first: of a push that has rows of a table that is gone, servers refuse the other rows, too."""
        self._reads.settle(f"dropping {name!r}")

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
                handle.forget()
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

        while (registration := register()).dropping:  # somebody has begun that, and was stopped
            self._settle_before_drop(spec.name)
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

    def _create(self, registration: Registration) -> None:
        """Makes the table known to the heads of all ranges, which tell their successors; to absent ones later, but
        before anything is pushed there. One that was registered before has come with what ranges begin anew from."""
        document = {"id": registration.id, "spec": registration.spec.to_json()}
        frame = json_frame(Kind.CREATE, document)
        header, body = unpack_header(frame), frame[HEADER_BYTES:]
        what = f"creating table {registration.spec.name!r}"
        questions = of_heads(header, body, all_ranges=registration.made)
        self._dispatcher.ask_all(questions, self._timeout_s, what, of_absent=False)

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
