"""What gradients are pushed to: a table or a tensor, with its filters and its learning rate."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NoReturn, Protocol, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from elasticps.client.core.routing import Routes
from elasticps.client.filtering import Feedback, PushFilter, Sent
from elasticps.client.inputs import refuse_pickling
from elasticps.client.kkt_filter import Screened, screen_of
from elasticps.client.lifecycle import ChangePolicies
from elasticps.client.loading import fill
from elasticps.client.pull import ServerPull, coded_pull
from elasticps.client.pull_layouts import Query
from elasticps.client.rates import SetRate, same_rate, with_rate
from elasticps.client.reads import Reads
from elasticps.client.scans import Reduced
from elasticps.client.short_keys import Saved, Short
from elasticps.client.table_stats import target_html
from elasticps.client.writes import Write
from elasticps.errors import InputError
from elasticps.kernels.hashing import table_salt
from elasticps.model.optimizers import Schedule, ServerOptimizer
from elasticps.model.spec import TableSpec
from elasticps.store.codec import Codec


class Changes(Protocol):
    """Who changes what is set of tables for all workers."""

    def set_rate(self, table: str, number: int, lr: float | None) -> None: ...
    def set_on_loss(self, table: str, number: int, policy: str, max_lost_steps: int | None) -> None: ...
    def set_policies(self, table: str, number: int, change: ChangePolicies) -> TableSpec: ...


def _warn(text: str) -> None:
    """Warns at the line of the caller's own code that opened the table, however deep in this package it happened."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and Path(frame.f_code.co_filename).is_relative_to(_PACKAGE):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)


_PACKAGE = Path(__file__).parent.parent


class PushTarget(Reduced):
    """What a table and a tensor have in common."""

    def __init__(self, reads: Reads, spec: TableSpec, table_id: int, own: TableSpec, changes: Changes) -> None:
        self._reads = reads  # starts pulls
        self._changes = changes  # sets rates for all workers
        self.spec = spec  # as it is registered
        self.id = table_id  # by which servers know it
        self.name = spec.name  # by which the application knows it
        self.dim = spec.dim  # floats of a row
        self.salt = table_salt(table_id)  # of its keys' hashes
        # What a plain pull asks.
        self._query = Query(table_id, self.salt, self.dim, self.name)
        self._query_any = replace(self._query, any_replica=True)  # the same of whichever replica
        # The same number for compiled code.
        self._signed_salt = int(self.salt.view(np.int64))
        self._own = own.optimizer  # the caller's: a schedule is no part of the registered spec
        self.optimizer = self._own  # with the rate that was set, if one was
        self.rate_set: SetRate | None = None  # that `set_lr` gave last
        # What pull filters make of rows, and push filters of gradients.
        self._pull, push = Codec(spec.pull, spec.dim), Codec(spec.push, spec.dim)
        # Leaves out gradients that change nothing.
        self._screen = screen_of(spec, reads.lock)
        # What filters make of gradients, None for none.
        self._push = self._push_filter() if push.code or self._screen else None
        self.remembers_pushes = self._push is not None  # whether `sent` does anything
        # How keys of pushes are made shorter.
        self._short = Short.of(spec.push)
        if self._short is not None:
            reads.shorten(table_id, self._short)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        refuse_pickling(f"the handle of table {self.name!r}")

    @property
    def feedback(self) -> Feedback:
        """What filters have dropped of this client's gradients, and is kept to be pushed with the next ones."""
        return Feedback(0, 0) if self._push is None else self._push.feedback

    @property
    def screened(self) -> Screened:
        """What a `KKT` filter has left out of this client's gradients."""
        return Screened(0, 0) if self._screen is None else self._screen.counts

    @property
    def zstd_bytes(self) -> Saved:
        """What pushes that `Zstd` was tried on take, uncompressed and as they were sent."""
        return Saved(0, 0) if self._short is None else self._short.bodies

    @property
    def lends(self) -> bool:
        """Whether what is pushed can be sent from the caller's memory."""
        return False

    def _push_filter(self) -> PushFilter:
        return PushFilter(self.spec, self._screen, table=self.id, in_rounds=self._reads.in_rounds)

    def sent(self, step: Sent) -> None:
        """What `source` gave last is outstanding, as a part of a step."""
        if self._push is not None:
            self._push.sent(step)

    def drop_feedback(self) -> None:
        """Forgets all that filters keep of this client's gradients, behind its own steps so far, as `load` does for the
        rows that it loads: for a worker when another one has loaded rows. InputError while a step is open."""
        self._forget_pushed(f"dropping the feedback of {self.name!r}")

    def _forget_pushed(self, doing: str, keys: NDArray[np.int64] | None = None) -> None:
        """Servers are about to change rows of `keys`, int64 [n], or all, past this client's steps: what its filters
        keep of earlier gradients is no part of these rows any more. InputError if a step is open: nothing is changed
        then, nor forgotten."""
        if self._push is not None:
            self._reads.settle(doing)
            with self._reads.pushing:
                self._push.forget(keys)

    def forget(self) -> None:
        """What is kept of rows may be wrong from now on."""

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
            lr = float(with_rate(self._own, lr).lr)  # type: ignore[arg-type]  # checked there
        self._changes.set_rate(self.name, self.id, lr)

    def set_on_loss(self, policy: str, max_lost_steps: int | None = None) -> None:
        """What becomes of ranges of which every replica is gone: "wait", for one of them or for a person, as it is
        unless said otherwise; or "restore": they come back from the newest checkpoint while training goes on, without
        the steps since, if all tables of the cluster say so. Never more than `max_lost_steps` of any worker.

        For all workers, from now on. InputError; under BSP there is only "wait". Raises `Timeout`.
        """
        self._changes.set_on_loss(self.name, self.id, policy, max_lost_steps)

    def follow(self, rate: SetRate | None) -> None:
        """Somebody has set a rate; None: nobody has yet."""
        if rate is not None and rate != self.rate_set and hasattr(self._own, "lr"):
            self.rate_set = rate
            self._choose()

    def open_again(self, own: ServerOptimizer) -> None:
        """The caller brings another rate, maybe: it counts for all that use the table on this client."""
        before, now = getattr(self._own, "lr", None), getattr(own, "lr", None)
        if not same_rate(before, now):
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
        self.optimizer = self._own if lr is None else with_rate(self._own, lr)

    def _coded(
        self, keys: NDArray[np.int64], out: NDArray[np.float32], any_replica: bool,
        where: NDArray[np.int64] | None = None, short: Short | None = None,
    ) -> ServerPull:  # fmt: skip
        query = self._query_any if any_replica else self._query
        return coded_pull(self._reads.finish, query, self._pull, keys, out, where, short)

    def _state(self, keys: NDArray[np.int64], floats: int) -> NDArray[np.float32]:
        """The optimizer's state of rows, float32 [n, floats]."""
        rows = np.empty((len(keys), floats), np.float32)
        if floats:
            query = replace(self._query, dim=floats, slots=True)
            self._reads.pulled(ServerPull(self._reads.finish, query, keys, rows))
        return rows

    def __repr__(self) -> str:
        shape = f"dim={self.dim}" if self.spec.shape is None else f"shape={self.spec.shape}"
        return f"<{type(self).__name__} {self.name!r} of cluster {self._reads.cluster!r}: {shape}, {self.optimizer}>"

    def _repr_html_(self) -> str:
        return target_html(repr(self), self)

    def _load(self, write: Callable[[Routes], Write], *, replace: bool = True) -> None:
        self._reads.change(fill([write], self._reads.worker.id, replace=replace), f"loading {self.name!r}")
