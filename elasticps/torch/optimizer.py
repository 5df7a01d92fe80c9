"""Dense weights at the servers, and the step that sends every gradient of a model."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from elasticps.errors import ConfigError, InputError, SpecError
from elasticps.optimizers import Schedule
from elasticps.spec import Optimizer as ServerOptimizer
from elasticps.torch.embedding import Rows, nobody

if TYPE_CHECKING:
    from elasticps.client import Client, DenseTensor, OpenStep, SparseTable, Step
    from elasticps.client.pulls import DenseRead

_DENSE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_AGAIN = (
    "{what} got a second gradient in one step, but its first has left for the servers. To add up the gradients of "
    "several backward passes, run all but the last inside `with optimizer.accumulate():`, or build the Optimizer with "
    "overlap=False. After a backward pass that raised, call optimizer.zero_grad() first"
)


@dataclass(eq=False)
class _Dense:
    """One dense parameter and its tensor at the servers."""

    name: str
    parameter: nn.Parameter
    tensor: DenseTensor
    group: int  # index
    left: tuple[int, int] | None = None  # address and version of the gradient that has left in this step
    shown: int = 0  # version of the parameter when it took the servers' values last


@dataclass(eq=False)
class _Sparse:
    """One table, with every module of the model that reads it."""

    table: SparseTable
    modules: list[Rows]
    group: int  # index
    left: bool = False


class Optimizer(torch.optim.Optimizer):
    """A `torch.optim.Optimizer` whose weights, slots and updates are at the servers.

    Every parameter of `model` becomes the tensor `<prefix>.<name>`, created with the parameter's value if it is not
    there yet; then the model takes the servers' values. So all workers start from the same point, and a worker that
    comes later from the present. Frozen parameters too, so that all workers agree on them. Parameters may be float32,
    float16 or bfloat16 (the servers keep float32); float64 is refused.

    `optimizer` is one for all dense parameters, or a function `(name, parameter) -> optimizer` (no weight decay on
    biases, say). `param_groups` has a group for each different dense optimizer and one for each table, with `name` and
    `lr`: torch's LR schedulers work on them, and the rates are read when the first gradient of a step leaves.

    `overlap`: gradients leave during the backward pass, small ones gathered into frames of about `bucket_bytes`.
    Then nothing may change a gradient or a rate between `backward()` and `step()`; `step()` finds it and raises. Use
    `overlap=False` to clip gradients, or to train with several Optimizers on one client (GANs).
    Several backward passes in one step: all but the last inside `accumulate()`.

    `pipeline`: `step()` only asks for the new dense weights; the next call of a module of the model (or `state_dict()`,
    or `refresh()`) waits for them, and until then parameters show the values of the step before.

    A backward pass that raises may have trained the layers whose gradients had left; `zero_grad()` closes that step,
    warns, and the next step is clean. Gradients of rows do not outlive a step, whether or not `zero_grad()` is called.
    """

    _live: ClassVar[weakref.WeakSet[Optimizer]] = weakref.WeakSet()
    _step_supports_amp_scaling = True  # torch's GradScaler then hands us its scale, and step() can refuse it

    def __init__(
        self,
        ps: Client,
        model: nn.Module,
        optimizer: ServerOptimizer | Callable[[str, nn.Parameter], ServerOptimizer] | None = None,
        *,
        prefix: str = "model",
        overlap: bool = True,
        pipeline: bool = False,
        bucket_bytes: int = 256 * 1024,
    ) -> None:
        self._ps, self._model = ps, model
        self._overlap, self._pipeline, self._bucket_limit = overlap, pipeline, bucket_bytes
        self._replace_others()

        groups: dict[object, dict[str, Any]] = {}
        self._dense = self._register(ps, model, optimizer, prefix, groups)
        self._sparse = self._tables(model, groups)
        self._targets: list[tuple[DenseTensor | SparseTable, int]] = [  # and their groups' indices
            *((dense.tensor, dense.group) for dense in self._dense),
            *((sparse.table, sparse.group) for sparse in self._sparse),
        ]
        if not groups:
            raise ConfigError("the model has no parameter and no elasticps embedding to train")
        super().__init__(list(groups.values()), {"lr": 0.0})
        self._complete = True

        self._lock = threading.RLock()
        self._open: OpenStep | None = None
        self._rates: list[float] = []  # of the groups, as the open step has them
        self._bucket: dict[DenseTensor | SparseTable, Any] = {}
        self._bucket_bytes = 0
        self._held = 0
        self._arriving: list[tuple[_Dense, DenseRead]] = []
        self.last_step: Step | None = None
        self._hooks = [*self._watch_gradients(), *self._watch_forwards()]
        Optimizer._live.add(self)
        self.refresh()

    # -- construction

    def _replace_others(self) -> None:
        """Two Optimizers on a client cannot both send during backward: a pass may reach parameters of both."""

        def others() -> list[Optimizer]:
            return [o for o in Optimizer._live if o._ps is self._ps and o._model is not self._model]

        for old in [o for o in Optimizer._live if o._ps is self._ps and o._model is self._model]:
            old.close()
        if any(o._overlap or self._overlap for o in others()):
            gc.collect()  # an unused one may wait in a reference cycle
        if any(o._overlap or self._overlap for o in others()):
            raise ConfigError("several Optimizers on one client: build each of them with overlap=False")

    @staticmethod
    def _register(
        ps: Client,
        model: nn.Module,
        optimizer: ServerOptimizer | Callable[[str, nn.Parameter], ServerOptimizer] | None,
        prefix: str,
        groups: dict[object, dict[str, Any]],
    ) -> list[_Dense]:
        dense = []
        for name, parameter in model.named_parameters():  # a shared parameter comes once, under its first name
            if isinstance(parameter, nn.UninitializedParameter):
                raise ConfigError(f"parameter {name!r} has no shape yet: run one batch through the model first")
            if parameter.dtype not in _DENSE_DTYPES:
                raise SpecError(
                    f"parameter {name!r} is {parameter.dtype}, servers compute in float32: call model.float()"
                )
            if parameter.numel() == 0:
                continue
            spec = optimizer(name, parameter) if callable(optimizer) else optimizer
            if spec is None:
                raise ConfigError(f"parameter {name!r} is dense: the Optimizer needs optimizer=, e.g. Adam(lr=1e-3)")
            initial = parameter.detach().float().cpu().contiguous().numpy()
            tensor = ps.tensor(f"{prefix}.{name}", init=initial, optimizer=spec)
            schedule = _schedule(spec)
            # Schedules compare equal, whatever their function.
            same = (spec, schedule and id(schedule.function))
            groups.setdefault(same, _group(f"dense{len(groups)}", spec))["params"].append(parameter)
            dense.append(_Dense(name, parameter, tensor, list(groups).index(same)))
        return dense

    @staticmethod
    def _tables(model: nn.Module, groups: dict[object, dict[str, Any]]) -> list[_Sparse]:
        tables: dict[str, _Sparse] = {}
        for module in model.modules():
            if isinstance(module, Rows):
                name = module.table.name
                if name not in tables:
                    tables[name] = _Sparse(module.table, [], len(groups))
                    groups[name] = _group(name, module.optimizer)
                tables[name].modules.append(module)
        return list(tables.values())

    def _watch_gradients(self) -> Iterator[Any]:
        this = weakref.ref(self)  # the model must not keep its optimizer alive

        def dense_hook(dense: _Dense) -> Callable[[Tensor], None]:
            def ready(_: Tensor) -> None:
                if (optimizer := this()) is not None:
                    optimizer._dense_ready(dense)

            return ready

        def sparse_hook(sparse: _Sparse) -> Callable[[], None]:
            def ready() -> None:
                if (optimizer := this()) is not None:
                    optimizer._sparse_ready(sparse)

            return ready

        if self._overlap:
            for dense in self._dense:
                if dense.parameter.requires_grad:
                    yield dense.parameter.register_post_accumulate_grad_hook(dense_hook(dense))
            for sparse in self._sparse:
                for module in sparse.modules:
                    module.on_gradient = sparse_hook(sparse)

    def _watch_forwards(self) -> Iterator[Any]:
        this = weakref.ref(self)

        def arrive(*_: object) -> None:
            if (optimizer := this()) is not None and optimizer._arriving:
                optimizer._arrive()

        if self._pipeline:
            yield self._model.register_state_dict_pre_hook(arrive)
            for module in self._model.modules():
                if module is self._model or any(p.numel() for p in module.parameters(recurse=False)):
                    yield module.register_forward_pre_hook(arrive)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only the constructor adds groups: it alone knows the parameters' names."""
        if getattr(self, "_complete", False):
            raise ConfigError("groups cannot be added to an elasticps Optimizer: build it from the whole model")
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the rates of the groups. That is all a state_dict has: slots and clocks are at the servers.

        Raises ConfigError if its groups are not this Optimizer's.
        """
        ours = [(group["name"], group["scheduled"]) for group in self.param_groups]
        theirs = [(group.get("name"), group.get("scheduled")) for group in state_dict["param_groups"]]
        if ours != theirs:
            raise ConfigError(f"the state is of another optimizer: its groups are {_names(theirs)}, not {_names(ours)}")
        super().load_state_dict(state_dict)

    def close(self) -> None:
        """Takes the hooks off the model. A newer Optimizer for the same client and model does this to the older."""
        for hook in self._hooks:
            hook.remove()
        for sparse in self._sparse:
            for module in sparse.modules:
                module.on_gradient = nobody
        self._forget()
        self._arriving = []
        Optimizer._live.discard(self)

    # -- gradients

    def _dense_ready(self, dense: _Dense) -> None:
        with self._lock:
            if dense.left is not None:
                raise ConfigError(_AGAIN.format(what=f"parameter {dense.name!r}"))
            if not self._held:
                self._send_dense(dense)

    def _sparse_ready(self, sparse: _Sparse) -> None:
        with self._lock:
            if sparse.left:
                raise ConfigError(_AGAIN.format(what=f"table {sparse.table.name!r}"))
            # A forward pass of this batch whose backward pass is still to come may add to the same rows.
            if not self._held and not any(module.uses for module in sparse.modules):
                self._send_sparse(sparse)

    def _send_dense(self, dense: _Dense) -> None:
        gradient = dense.parameter.grad
        if gradient is None:
            return
        if gradient.layout != torch.strided:
            raise InputError(f"the gradient of {dense.name!r} is sparse: use elasticps.torch.Embedding or sparse=False")
        dense.left = (gradient.data_ptr(), gradient._version)
        plain = gradient.detach()
        if plain.dtype is not torch.float32 or not plain.is_cpu or not plain.is_contiguous():
            plain = plain.float().cpu().contiguous()
        self._send(dense.tensor, plain.numpy(), 4 * plain.numel())

    def _send_sparse(self, sparse: _Sparse) -> None:
        keys: list[NDArray[np.int64]] = []
        gradients: list[NDArray[np.float32]] = []
        for module in sparse.modules:
            more_keys, more_gradients = module.collect()
            keys += more_keys
            gradients += more_gradients
        if keys:
            sparse.left = True
            one = len(keys) == 1  # else a key may be in several: the client adds them up
            value = (keys[0], gradients[0]) if one else (np.concatenate(keys), np.concatenate(gradients))
            self._send(sparse.table, value, value[0].nbytes + value[1].nbytes)

    def _send(self, target: DenseTensor | SparseTable, value: object, nbytes: int) -> None:
        self._bucket[target] = value
        self._bucket_bytes += nbytes
        if self._bucket_bytes >= self._bucket_limit:
            self._send_bucket()

    def _send_bucket(self) -> None:
        if self._open is None:
            self._rates = [float(group["lr"]) for group in self.param_groups]
            self._open = self._ps.step(lr=self._step_rates())
        self._open.push(self._bucket)
        self._bucket, self._bucket_bytes = {}, 0

    def _end_step(self) -> Step:
        if self._open is None:  # all of it fits one part
            return self._ps.push(self._bucket, lr=self._step_rates())
        if self._bucket:
            self._send_bucket()
        return self._open.commit()

    def _step_rates(self) -> dict[Any, float]:
        rates: dict[Any, float] = {}
        for target, index in self._targets:
            group = self.param_groups[index]
            if not group["scheduled"]:
                rates[target] = float(group["lr"])
            elif "initial_lr" in group:
                raise ConfigError(f"group {group['name']!r} has its own schedule and a torch LR scheduler: drop one")
        return rates

    def _changed(self) -> str:
        """What was changed after it had left, in words; empty if nothing was."""
        for dense in self._dense:
            if dense.left is not None:
                now = dense.parameter.grad
                if now is None or (now.data_ptr(), now._version) != dense.left:
                    return f"the gradient of {dense.name!r}"
        if self._open is not None:
            for group, rate in zip(self.param_groups, self._rates, strict=True):
                if float(group["lr"]) != rate:
                    return f"the learning rate of group {group['name']!r}"
        return ""

    def _edited(self) -> str:
        """A parameter that somebody has changed here since it took the servers' values."""
        trained = (dense for dense in self._dense if dense.parameter.requires_grad)
        return next((dense.name for dense in trained if dense.parameter._version != dense.shown), "")

    def _forget(self) -> str:
        """Ends a step that will not be completed: drops what has not left, and ticks if something has. Says what."""
        with self._lock:
            names = [d.name for d in self._dense if d.left is not None and d.tensor not in self._bucket]
            names += [s.table.name for s in self._sparse if s.left and s.table not in self._bucket]
            for sparse in self._sparse:
                for module in sparse.modules:
                    module.collect()
            if self._open is not None:
                self.last_step = self._open.commit()
            self._clear()
            return ", ".join(names)

    def _clear(self) -> None:
        self._open = None
        self._bucket, self._bucket_bytes = {}, 0
        for dense in self._dense:
            dense.left = None
        for sparse in self._sparse:
            sparse.left = False

    # -- what a training loop calls

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Backward passes inside only add up; what they leave goes with the next pass outside, or with `step()`."""
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears all gradients, of rows too. Closes a step of which a part has left, with a RuntimeWarning."""
        if set_to_none:
            for dense in self._dense:
                dense.parameter.grad = None
        else:
            super().zero_grad(set_to_none=False)
        left = self._forget()
        if left:
            warnings.warn(
                f"zero_grad() after a backward pass without step(): these have been trained already: {left}",
                RuntimeWarning,
                stacklevel=2,
            )
            self._ask()

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Sends the gradients that have not left yet, ends the step (one tick) and takes the servers' new weights."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scale, _ = self.__dict__.pop("grad_scale", None), self.__dict__.pop("found_inf", None)
        if scale is not None:  # the scaler takes it away only if we do not raise, and later steps would see it
            self._forget()
            raise ConfigError("gradients scaled by torch.amp.GradScaler: use bfloat16 autocast, which needs no scaler")
        with self._lock:
            changed = self._changed()
            if changed:
                self._forget()
                raise ConfigError(
                    f"{changed} changed between backward() and step(), after it had left for the servers; the step was "
                    "made with what had left. Build the Optimizer with overlap=False to change it there"
                )
            if edited := self._edited():
                self._forget()
                raise ConfigError(
                    f"parameter {edited!r} was changed in place since the servers' values were taken, which the "
                    "servers cannot know and the next values undo: after load_state_dict(), say, call upload(), which "
                    "gives them this model's values, or refresh(), which takes theirs"
                )
            for dense in self._dense:
                if dense.left is None:
                    self._send_dense(dense)
            for sparse in self._sparse:
                if not sparse.left:
                    self._send_sparse(sparse)
            self.last_step = self._end_step()
            self._clear()
        self._ask()
        return loss

    # -- the servers' weights

    def refresh(self) -> None:
        """Takes the servers' newest dense weights into the model now, also those that this worker does not train."""
        self._arriving = self._pull(self._dense)
        self._arrive()

    def upload(self) -> None:
        """Gives the servers this model's dense weights, which `load_state_dict` has changed, say. Slots begin anew.

        One worker does this, while nobody trains. Returns when it is committed.
        """
        for dense in self._dense:
            dense.tensor.load(dense.parameter.detach().float().cpu().contiguous().numpy())
        self.refresh()

    def _pull(self, wanted: list[_Dense]) -> list[tuple[_Dense, DenseRead]]:
        return list(zip(wanted, self._ps.pull_many([dense.tensor for dense in wanted]), strict=True))

    def _ask(self) -> None:
        self._arriving = self._pull([dense for dense in self._dense if dense.parameter.requires_grad])
        if not self._pipeline:
            self._arrive()

    @torch.no_grad()
    def _arrive(self) -> None:
        arriving, self._arriving = self._arriving, []
        for dense, future in arriving:
            dense.parameter.copy_(torch.from_numpy(future.result()))
            dense.shown = dense.parameter._version


def _names(groups: list[tuple[Any, Any]]) -> str:
    return ", ".join(f"{name}{' with a schedule' * bool(scheduled)}" for name, scheduled in groups)


def _schedule(spec: ServerOptimizer) -> Schedule | None:
    rate = getattr(spec, "lr", 0.0)  # Assign and Accumulate have none
    return rate if isinstance(rate, Schedule) else None


def _group(name: str, spec: ServerOptimizer) -> dict[str, Any]:
    """A param group. With a schedule of elasticps' own, `lr` shows its start and is not read."""
    schedule = _schedule(spec)
    rate = schedule(1) if schedule is not None else getattr(spec, "lr", 0.0)
    return {"params": [], "lr": float(rate), "name": name, "scheduled": schedule is not None}
