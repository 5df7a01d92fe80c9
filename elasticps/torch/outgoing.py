"""Gradients of a step on their way to the servers: from their devices to this host, into frames, and out.

A gradient begins to leave its device when the backward pass has it. Gradients arrive here in the order in which they
left, are gathered in a frame, and a full frame is pushed while the backward pass still runs. With the first frame the
step opens, and takes the learning rates of that moment; what fits one frame leaves as a whole, at the end.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from elasticps.errors import ConfigError, InputError
from elasticps.torch.embedding import TableLayer, forget_gradients, gradients_of, no_optimizer
from elasticps.torch.host import Fetch, fetch_all
from elasticps.torch.kernels.merge import merged
from elasticps.torch.parameters import TrainedTable, rate_of, refuse_wrapped
from elasticps.torch.weights import DenseParameter

if TYPE_CHECKING:
    from elasticps.client.rates import SetRate
    from elasticps.torch.parameters import Target
    from elasticps.torch.worker import Worker

ParamGroups = Sequence[dict[str, Any]]
_OF_GROUPS = {"params", "lr", "name", "scheduled"}  # all else is fixed when a tensor or table is made
_AGAIN = (
    "{what} got a second gradient in one step, but its first has left for the servers. To add up the gradients of "
    "several backward passes, run all but the last inside `with optimizer.accumulate():`, or build the Optimizer with "
    "overlap=False (as for Lightning's accumulate_grad_batches). After an error, call optimizer.zero_grad() first"
)


class _Leaving(NamedTuple):
    """The gradient of one tensor or table that has left its device. keys: of a table, those of each fetch's rows."""

    target: Any
    fetches: list[Fetch]
    keys: list[NDArray[np.int64]] | None = None

    def value(self) -> Any:
        """Waits for it: float32 of the tensor's shape, or (keys [n], rows [n, dim])."""
        return _array(self.fetches[0]) if self.keys is None else _summed(self.keys, self.fetches)


def _array(fetch: Fetch) -> NDArray[np.float32]:
    return fetch.array if fetch.array is not None else fetch.result()


def _summed(keys: list[NDArray[np.int64]], fetches: list[Fetch]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """One gradient of a table, each row once: added up in the order given, by the CPU; a GPU would do it in any
    order."""
    given = [(some, _array(rows)) for some, rows in zip(keys, fetches, strict=True)]
    if len(given) == 1:
        return given[0]
    total = sum(map(len, keys))
    all_keys, all_rows = np.empty(total, np.int64), np.empty((total, given[0][1].shape[1]), np.float32)
    count = merged(given, 0, 1, all_keys, all_rows)
    return all_keys[:count], all_rows[:count]


class Rates:
    """The learning rates of an Optimizer's param groups: which ones a step takes, and which ones workers have set for
    all. Everything else in a group is fixed at the servers.

    targets: each tensor and table with the index of its group; groups: gives the param groups, which torch replaces
    when it loads a state.
    """

    def __init__(self, targets: Sequence[tuple[Target, int]], groups: Callable[[], ParamGroups]) -> None:
        self._targets, self._groups = targets, groups
        self._fixed = [{k: v for k, v in group.items() if k not in _OF_GROUPS} for group in groups()]
        self._applied: list[SetRate | None] = [None] * len(targets)  # what `set_lr` gave, as groups have it
        self._of_step: list[float] = []  # rates of the groups when the step began
        self._apply_set()

    def begin(self) -> dict[Any, float]:
        """The rates of a step that begins, by tensor or table, but for those that have a schedule of their own.
        ConfigError if a scheduler of torch's is to change such a one, too."""
        self._apply_set()
        groups = self._groups()
        self._of_step = [float(group["lr"]) for group in groups]
        rates: dict[Any, float] = {}
        for target, index in self._targets:
            group = groups[index]
            if not group["scheduled"]:
                rates[target] = self._of_step[index]
            elif "initial_lr" in group:
                raise ConfigError(f"group {group['name']!r} has its own schedule and a torch LR scheduler: drop one")
        return rates

    def _apply_set(self) -> None:
        """Gives groups the rates that were set for all workers since the last step: the newest one of each group."""
        changed = None
        for number, (target, _) in enumerate(self._targets):
            rate = target.rate_set
            if rate is not None and rate is not self._applied[number]:
                changed = [*(changed or ()), (rate.revision, number)]
        for _, number in sorted(changed or ()):
            target, index = self._targets[number]
            self._applied[number] = target.rate_set
            self._groups()[index]["lr"] = rate_of(target.optimizer)

    def changed(self) -> str:
        """Names a group whose rate was changed since the step began; empty if none was."""
        for group, rate in zip(self._groups(), self._of_step, strict=True):
            if float(group["lr"]) != rate:
                return f"the learning rate of group {group['name']!r}"
        return ""

    def check(self, groups: ParamGroups) -> None:
        """ConfigError if something of the groups was changed that cannot be."""
        for group, constant in zip(groups, self._fixed, strict=True):
            for key, value in constant.items():
                if group[key] != value:
                    raise ConfigError(
                        f"{key} of group {group['name']!r} is {group[key]!r}, but at the servers it stays {value!r}: "
                        "only lr can be changed. OneCycleLR and CyclicLR take cycle_momentum=False"
                    )

    def check_loaded(self, groups: ParamGroups) -> None:
        """As `check`, for groups of a saved state, which may lack fields that are newer."""
        self.check([constant | group for group, constant in zip(groups, self._fixed, strict=True)])

    def complete(self) -> None:
        """Gives groups that were loaded the fields that they lack."""
        for group, constant in zip(self._groups(), self._fixed, strict=True):
            group.update(constant)


class Outgoing:
    """The gradients of one step after another. Callers hold `lock`, unless a method says that it takes it.

    lock: guards the step, as backward passes of several devices run in threads of torch's.
    accumulating: how many `accumulate()` blocks are open; nothing leaves inside of them.
    """

    def __init__(
        self, ps: Worker, models: Sequence[nn.Module], dense: list[DenseParameter], tables: list[TrainedTable],
        rates: Rates, frame_bytes: int,
    ) -> None:  # fmt: skip
        self.lock = threading.RLock()
        self.accumulating = 0
        self._ps, self._models, self._rates = ps, models, rates
        self._dense, self._tables = dense, tables
        self._table_of = {layer: table for table in tables for layer in table.layers}
        # A collective step leaves when all ranks have all of their gradients: until then a rank may die.
        self._frame_limit = sys.maxsize if ps.collective else frame_bytes
        self._leaving: deque[_Leaving] = deque()
        self._frame: dict[Any, Any] = {}  # gradients that are here, by tensor or table
        self._frame_bytes = 0
        self._open: Any = None  # the step, once a frame has left
        self._checked_wrappers = False

    # -- hooks of the backward pass

    def watch(self) -> Iterator[Callable[[], None]]:
        """Has gradients leave during backward passes; yields what ends that. The model does not keep this alive."""
        this = weakref.ref(self)

        def dense_hook(dense: DenseParameter) -> Callable[[Tensor], None]:
            def ready(_: Tensor) -> None:
                if (outgoing := this()) is not None:
                    outgoing.dense_ready(dense)

            return ready

        def rows_hook(layers: Sequence[TableLayer]) -> None:
            if (outgoing := this()) is not None:
                outgoing.rows_ready(layers)

        for dense in self._dense:
            if dense.parameter.requires_grad:
                yield dense.parameter.register_post_accumulate_grad_hook(dense_hook(dense)).remove
        for table in self._tables:
            for layer in table.layers:
                layer.on_gradients = rows_hook
                yield lambda layer=layer: _ignore_gradients(layer)  # type: ignore[misc]

    def dense_ready(self, dense: DenseParameter) -> None:
        """A backward pass has a parameter's gradient. Takes the lock. ConfigError for the second one of a step."""
        with self.lock:
            if dense.left is not None:
                raise ConfigError(_AGAIN.format(what=f"parameter {dense.name!r}"))
            if not self.accumulating:
                if (gradient := _gradient_of(dense)) is not None:
                    self._fetch(dense, gradient)
                self.send_arrived(wait=False)

    def rows_ready(self, layers: Sequence[TableLayer]) -> None:
        """A backward pass has gradients of rows in these layers. Takes the lock. ConfigError for one that is too
        late."""
        with self.lock:
            tables = list(dict.fromkeys(self._table_of[layer] for layer in layers))
            for table in tables:
                if table.left:
                    raise ConfigError(_AGAIN.format(what=f"table {table.table.name!r}"))
            if not self.accumulating:
                # A forward pass whose backward pass is still to come may add to the same rows.
                self._fetch_rows([table for table in tables if not any(layer.passes for layer in table.layers)])
                self.send_arrived(wait=False)

    # -- leaving

    def fetch_rest(self) -> None:
        """Gathers what has left, and begins to fetch all gradients that have not left their devices. InputError for one
        that is sparse."""
        self.send_arrived(wait=True)  # from the backward pass, which a GPU may still compute
        found = [(dense, _gradient_of(dense)) for dense in self._dense if dense.left is None]
        for dense, gradient in found:
            if gradient is not None:
                self._fetch(dense, gradient)
        self._fetch_rows([table for table in self._tables if not table.left])

    def _fetch(self, dense: DenseParameter, gradient: Tensor) -> None:
        dense.left = gradient.data_ptr(), gradient._version
        self._leaving.append(_Leaving(dense.tensor, fetch_all([gradient])))

    def _fetch_rows(self, tables: Sequence[TrainedTable]) -> None:
        if not tables:
            return
        for table, taken in zip(tables, gradients_of([table.layers for table in tables]), strict=True):
            if taken:
                table.left = True
                fetches = fetch_all([rows for _, rows in taken])
                self._leaving.append(_Leaving(table.table, fetches, [keys for keys, _ in taken]))

    def send_arrived(self, wait: bool) -> None:
        """Gathers the gradients that have arrived, up to the first that has not; with `wait` waits for all. Pushes a
        frame whenever one is full."""
        if not self._checked_wrappers:
            refuse_wrapped(self._models)
            self._checked_wrappers = True
        while self._leaving:
            first = self._leaving[0]
            if not wait:
                for fetch in first.fetches:
                    if fetch.array is None and not fetch.done():
                        return
            value = first.value()
            self._leaving.popleft()
            self._frame[first.target] = value
            self._frame_bytes += value[0].nbytes + value[1].nbytes if first.keys is not None else value.nbytes
            if self._frame_bytes >= self._frame_limit:
                if self._open is None:
                    self._open = self._ps.step(lr=self._rates.begin())
                self._open.push(self._frame)
                self._frame, self._frame_bytes = {}, 0

    def end(self, keys: dict[Any, Any], out: dict[Any, NDArray[np.float32]]) -> tuple[Any, Any]:
        """Sends the rest, which ends the step, and asks in the same messages for tensors and rows: see
        `Client.push_pull`. The step, and the pull. The next step begins."""
        rates = None if self._open is not None else self._rates.begin()
        step, pull = self._ps.push_pull(self._frame, keys, out, step=self._open, lr=rates)
        self._clear()
        return step, pull

    def changed(self) -> str:
        """Names a gradient or rate that was changed after it had left; empty if none was."""
        for dense in self._dense:
            if dense.left is not None:
                now = dense.parameter.grad
                if now is None or (now.data_ptr(), now._version) != dense.left:
                    return f"the gradient of {dense.name!r}"
        return "" if self._open is None else self._rates.changed()

    def zero_grad(self, set_to_none: bool) -> None:
        """Clears dense gradients: those of all copies of a parameter, or else of all but the first, which torch
        clears."""
        for dense in self._dense:
            for copy in dense.copies[0 if set_to_none else 1 :]:
                copy.parameter.grad = None

    def drop(self) -> tuple[str, Any]:
        """Drops a step that will not be completed: what has not left, and ends it if a part has. The names of the
        tensors and tables whose gradients had left, and the step, or None. Takes the lock."""
        with self.lock:
            here = [*self._frame, *(each.target for each in self._leaving)]
            left: list[tuple[str, Any]] = [
                (dense.name, dense.tensor) for dense in self._dense if dense.left is not None
            ]
            left += [(table.table.name, table.table) for table in self._tables if table.left]
            names = [name for name, target in left if not any(target is each for each in here)]
            step = None if self._open is None else self._open.commit()
            self._clear()
            return ", ".join(names), step

    def _clear(self) -> None:
        self._leaving.clear()
        self._open = None
        self._frame, self._frame_bytes = {}, 0
        for dense in self._dense:
            dense.left = None
        forget = [layer for table in self._tables for layer in table.layers if table.left or layer.gradients]
        if forget:
            forget_gradients(forget)
        for table in self._tables:
            table.left = False

    # -- gradients that stay here

    def gathered(self) -> list[Tensor]:
        """All gradients of the step, in their models: of dense parameters [shape], and of tables [n, dim], each row
        once. Nothing of the step may have left."""
        gradients = [gradient for dense in self._dense if (gradient := _gradient_of(dense)) is not None]
        for table in self._tables:
            taken = gradients_of([table.layers])[0]
            if len(taken) > 1:
                keys, rows = _summed([keys for keys, _ in taken], fetch_all([rows for _, rows in taken]))
                taken = [(keys, torch.from_numpy(rows))]
            if taken:
                table.layers[0].keep(*taken[0])
                gradients.append(taken[0][1])
        return gradients


def _gradient_of(dense: DenseParameter) -> Tensor | None:
    """The gradient of a parameter, of all devices; None if it has none, or is frozen since: an old one is left.
    InputError for a sparse one."""
    if not dense.parameter.requires_grad:
        return None
    if len(dense.copies) > 1:
        dense.gather()
    gradient = dense.parameter.grad
    if gradient is not None and gradient.layout != torch.strided:
        raise InputError(f"the gradient of {dense.name!r} is sparse: use elasticps.torch.Embedding or sparse=False")
    return gradient


def _ignore_gradients(layer: TableLayer) -> None:
    layer.on_gradients = no_optimizer
