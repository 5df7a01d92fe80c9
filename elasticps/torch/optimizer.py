"""Dense weights at the servers, and the step that sends every gradient of a model."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, overload

import torch
from torch import Tensor, nn

from elasticps.errors import ConfigError, InputError
from elasticps.model.spec import Filter
from elasticps.model.spec import Optimizer as ServerOptimizer
from elasticps.torch.devices import DeviceGroup, models_of
from elasticps.torch.embedding import nobody, refuse_torchs
from elasticps.torch.expected import Pulled, Wanted, in_one, layers_of
from elasticps.torch.group.client import GroupClient
from elasticps.torch.host import Fetch
from elasticps.torch.leaving import Leaving
from elasticps.torch.parameters import (
    NO_WRAPPER,
    Dense,
    Groups,
    Sparse,
    Summed,
    dense_of,
    described,
    first_edited,
    plain,
    refuse_wrapped,
    tables_of,
    values_of,
)
from elasticps.torch.rates import Rates
from elasticps.torch.sending import Sending

if TYPE_CHECKING:
    from elasticps.client import Client, Step
    from elasticps.torch.group import GroupStep
    from elasticps.torch.rates import Target

_AGAIN = (
    "{what} got a second gradient in one step, but its first has left for the servers. To add up the gradients of "
    "several backward passes, run all but the last inside `with optimizer.accumulate():`, or build the Optimizer with "
    "overlap=False (as for Lightning's accumulate_grad_batches). After an error, call optimizer.zero_grad() first"
)


class Optimizer(torch.optim.Optimizer):
    """A `torch.optim.Optimizer` whose weights, slots and updates are at the servers.

    Every parameter of `model` becomes the tensor `<prefix>.<name>`, created with the parameter's value if it is not
    there yet; then the model takes the servers' values. So all workers start from the same point, and a worker that
    comes later from the present. Frozen parameters too, so that all workers agree on them. Parameters may be float32,
    float16 or bfloat16 (the servers keep float32); float64 is refused.

    `optimizer` is one for all dense parameters, or a function `(name, parameter) -> optimizer` (no weight decay on
    biases, say). `param_groups` has a group for each different dense optimizer and one for each table, with `name` and
    `lr`: torch's LR schedulers work on them, and the rates are read when the first gradient of a step leaves. When
    somebody sets the rate of a table, or of a tensor of a group, for all workers (`set_lr`), the group takes it then.

    `overlap`: gradients leave during the backward pass, small ones gathered into frames of about `bucket_bytes`.
    Then nothing may change a gradient or a rate between `backward()` and `step()`; `step()` finds it and raises. Use
    `overlap=False` to clip gradients (`clip_grad_norm_` of the Optimizer, which knows those of rows), or to train with
    several Optimizers on one client (GANs).
    Several backward passes in one step: all but the last inside `accumulate()`.

    `pipeline`: `step()` only asks for the new dense weights; the next call of a module of the model (or `state_dict()`,
    or `refresh()`) waits for them, and until then parameters show the values of the step before.

    `push`, `pull`: filters of the dense tensors (docs/guides/filters.md); tables have theirs in their layers.

    A backward pass that raises may have trained the layers whose gradients had left; `zero_grad()` closes that step,
    warns, and the next step is clean. Gradients of rows do not outlive a step, whether or not `zero_grad()` is called.
    """

    _live: ClassVar[weakref.WeakSet[Optimizer]] = weakref.WeakSet()
    _step_supports_amp_scaling = True  # torch's GradScaler then tells us of its scale, and step() can refuse it
    loaded: ClassVar[weakref.WeakSet[nn.Module]] = weakref.WeakSet()
    """Models whose dense weights the servers are to take when an Optimizer is built."""

    def __init__(
        self,
        ps: Client | GroupClient,
        model: nn.Module | DeviceGroup[Any],
        optimizer: ServerOptimizer | Callable[[str, nn.Parameter], ServerOptimizer] | None = None,
        *,
        prefix: str = "model",
        overlap: bool = True,
        pipeline: bool = False,
        bucket_bytes: int = 256 * 1024,
        push: Sequence[Filter] = (),
        pull: Sequence[Filter] = (),
    ) -> None:
        refuse_torchs(optimizer)
        models = models_of(model)
        self._ps, self._models, self._model = ps, models, models[0]
        if any(isinstance(m, nn.parallel.DistributedDataParallel | nn.DataParallel) for m in self._model.modules()):
            raise ConfigError(NO_WRAPPER)
        # Of a group nothing leaves before all devices have their gradients: one's error would leave half a step.
        self._overlap, self._pipeline = overlap and not isinstance(model, DeviceGroup), pipeline
        self._replace_others()

        groups: Groups = {}
        taken = {dense.tensor.name: dense.parameter for other in self._others() for dense in other._dense}
        self._dense: list[Dense] = dense_of(ps, models, optimizer, prefix, groups, push=push, pull=pull, taken=taken)
        self._sparse = tables_of(models, groups)
        self._layers = [layer for each in models for layer in layers_of(each)]
        targets: list[tuple[Target, int]] = [  # and their groups' indices
            *((dense.tensor, dense.group) for dense in self._dense),
            *((sparse.table, sparse.group) for sparse in self._sparse),
        ]
        if not groups:
            raise ConfigError("the model has no parameter and no elasticps embedding to train")
        # With "momentum" among them, schedulers that want to change it fail in step(), which says what to do.
        super().__init__(list(groups.values()), {"lr": 0.0, "momentum": None})
        self._rates = Rates(targets, self.param_groups)
        self._rates.take(self.param_groups)
        self._complete = True

        self._lock = threading.RLock()
        self._leaving = Leaving()
        self._sending = Sending(ps, self._rates, bucket_bytes)
        self._held = 0
        self._departed = False  # whether gradients have ever left
        self._arriving: list[tuple[Dense, Pulled]] = []
        self.last_step: Step | GroupStep | None = None
        self._hooks = [*self._watch_gradients(), *self._watch_forwards()]
        Optimizer._live.add(self)
        if self._model in Optimizer.loaded:
            self.upload()
        else:
            self.refresh()

    # -- construction

    def _replace_others(self) -> None:
        """Two Optimizers on a client cannot both send during backward: a pass may reach parameters of both."""

        for old in [o for o in Optimizer._live if o._ps is self._ps and o._model is self._model]:
            old.close()
        if any(o._overlap or self._overlap for o in self._others()):
            raise ConfigError("several Optimizers on one client: build each of them with overlap=False")

    def _others(self) -> list[Optimizer]:
        """Those of other models on this client."""
        if found := [o for o in Optimizer._live if o._ps is self._ps and o._model is not self._model]:
            found.clear()
            gc.collect()  # an unused one may wait in a reference cycle
        return [o for o in Optimizer._live if o._ps is self._ps and o._model is not self._model]

    def _watch_gradients(self) -> Iterator[Any]:
        this = weakref.ref(self)  # the model must not keep its optimizer alive

        def dense_hook(dense: Dense) -> Callable[[Tensor], None]:
            def ready(_: Tensor) -> None:
                if (optimizer := this()) is not None:
                    optimizer._dense_ready(dense)

            return ready

        def sparse_hook(sparse: Sparse) -> Callable[[], None]:
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
            if (optimizer := this()) is not None:
                optimizer._arrive()

        if self._pipeline:
            for model in self._models:
                yield model.register_state_dict_pre_hook(arrive)
                for module in model.modules():
                    if module is model or any(p.numel() for p in module.parameters(recurse=False)):
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
            raise ConfigError(
                f"the state is of another optimizer: its groups are {described(theirs)}, not {described(ours)}"
            )
        self._rates.check_loaded(state_dict["param_groups"])
        super().load_state_dict(state_dict)
        self._rates.fix(self.param_groups)

    @classmethod
    def of(cls, model: nn.Module) -> list[Optimizer]:
        """Those that train a model now."""
        return [optimizer for optimizer in cls._live if optimizer._model is plain(model)]

    def __getstate__(self) -> NoReturn:
        raise ConfigError("an elasticps Optimizer cannot be copied or pickled: save its state_dict(), build it again")

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

    def _dense_ready(self, dense: Dense) -> None:
        with self._lock:
            if dense.left is not None:
                raise ConfigError(_AGAIN.format(what=f"parameter {dense.name!r}"))
            if not self._held:
                self._begin_dense([dense])
                self._depart(wait=False)

    def _sparse_ready(self, sparse: Sparse) -> None:
        with self._lock:
            if sparse.left:
                raise ConfigError(_AGAIN.format(what=f"table {sparse.table.name!r}"))
            # A forward pass of this batch whose backward pass is still to come may add to the same rows.
            if not self._held and not any(module.uses for module in sparse.modules):
                self._begin_sparse([sparse])
                self._depart(wait=False)

    def _begin_dense(self, some: Sequence[Dense]) -> None:
        found = list[tuple[Dense, Tensor]]()
        for dense in some:
            if not dense.parameter.requires_grad:  # frozen since: an old gradient is left
                continue
            dense.gather()
            gradient = dense.parameter.grad
            if gradient is None:
                continue
            if gradient.layout != torch.strided:
                raise InputError(
                    f"the gradient of {dense.name!r} is sparse: use elasticps.torch.Embedding or sparse=False"
                )
            found.append((dense, gradient))
        for dense, gradient in found:
            dense.left = (gradient.data_ptr(), gradient._version)
            self._leaving.add(dense.tensor, Fetch(gradient))

    def _begin_sparse(self, some: Sequence[Sparse]) -> None:
        for sparse in some:
            if taken := sparse.take():
                sparse.left = True
                self._leaving.add(sparse.table, Summed(taken))

    def _depart(self, wait: bool) -> None:
        """Sends what has come from devices, and waits for the rest of it or not."""
        if not self._departed:
            refuse_wrapped(self._models)
            self._departed = True
        for target, value in self._leaving.here(wait):
            self._sending.add(target, value, self.param_groups)

    def _changed(self) -> str:
        """What was changed after it had left, in words; empty if nothing was."""
        for dense in self._dense:
            if dense.left is not None:
                now = dense.parameter.grad
                if now is None or (now.data_ptr(), now._version) != dense.left:
                    return f"the gradient of {dense.name!r}"
        group = self._sending.changed_rate(self.param_groups)
        return f"the learning rate of group {group!r}" if group else ""

    def _check_edits(self) -> None:
        if edited := first_edited(self._dense):
            raise ConfigError(
                f"parameter {edited!r} was changed in place since the servers' values were taken, which the servers "
                "cannot know and the next values undo: after load_state_dict(), say, call upload(), which gives them "
                "this model's values, or refresh(), which takes theirs"
            )

    def _forget(self) -> str:
        """Ends a step that will not be completed: drops what has not left, and ticks if something has. Says what."""
        with self._lock:
            here = self._leaving, self._sending
            names = [d.name for d in self._dense if d.left is not None and not any(d.tensor in some for some in here)]
            names += [s.table.name for s in self._sparse if s.left and not any(s.table in some for some in here)]
            self.last_step = self._sending.cut_short() or self.last_step
            self._clear()
            return ", ".join(names)

    def _clear(self) -> None:
        self._leaving.clear()
        self._sending.clear()
        for dense in self._dense:
            dense.left = None
        for sparse in self._sparse:
            sparse.left = False
            for module in sparse.modules:
                module.forget()

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
        for dense in self._dense:
            for copy in dense.copies[0 if set_to_none else 1 :]:
                copy.parameter.grad = None
        if not set_to_none:
            super().zero_grad(set_to_none=False)
        left = self._forget()
        if left:
            warnings.warn(
                f"zero_grad() after a backward pass without step(): these have been trained already: {left}",
                RuntimeWarning,
                stacklevel=2,
            )
            self._check_edits()
            wanted = self._wanted()
            self._arriving = wanted.now(self._ps)
            self._asked(wanted)

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
        # The scaler takes them away only if we do not raise, and later steps would see them. After its unscale_(),
        # which leaves out rows, found_inf comes alone.
        scaled = [self.__dict__.pop(name, None) for name in ("grad_scale", "found_inf")]
        if scaled != [None, None]:
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
            try:
                self._rates.check(self.param_groups)
                self._depart(wait=True)  # what left during the backward pass, which a GPU may still compute
                self._begin_dense([dense for dense in self._dense if dense.left is None])
                self._begin_sparse([sparse for sparse in self._sparse if not sparse.left])
                self._check_edits()  # waits for all that a GPU computes
            except ConfigError:
                self._forget()
                raise
            self._depart(wait=True)
            wanted = self._wanted()
            if in_one(self._ps):
                self.last_step, self._arriving = self._sending.exchange(wanted, self.param_groups)
                self._clear()
            else:
                self.last_step = self._sending.end(self.param_groups)
                self._clear()
                self._arriving = wanted.now(self._ps)
        self._asked(wanted)
        return loss

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """`torch.nn.utils.clip_grad_norm_` over all gradients of this worker's step: those of dense parameters, and of
        rows, each row once. Returns their norm as it was. ConfigError with `overlap`, as gradients have left then."""
        if self._overlap:
            raise ConfigError("gradients leave before they can be clipped: build the Optimizer with overlap=False")
        if isinstance(self._ps, GroupClient):
            raise ConfigError("gradients of a group are added up when they leave, and no rank knows their norm before")
        trained = [dense for dense in self._dense if dense.parameter.requires_grad]
        for dense in trained:
            dense.gather()
        gradients = [dense.parameter.grad for dense in trained if dense.parameter.grad is not None]
        for sparse in self._sparse:
            if (taken := sparse.take_all()) is not None:
                sparse.modules[0].keep(taken)
                gradients.append(taken[1])
        norm = nn.utils.get_total_norm(gradients, norm_type, error_if_nonfinite)
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for gradient in gradients:
            gradient.mul_(factor.to(gradient.device))
        return norm

    # -- the servers' weights

    def refresh(self) -> None:
        """Takes the servers' newest dense weights into the model now, also those that this worker does not train."""
        self._take(Wanted(self._dense, ()).now(self._ps))

    def upload(self) -> None:
        """Gives the servers this model's dense weights, which `load_state_dict` has changed, say. Slots begin anew.

        One worker does this, while nobody trains. Returns when it is committed.
        """
        for dense in self._dense:
            dense.tensor.load(values_of(dense.parameter))
        self.refresh()
        Optimizer.loaded.discard(self._model)

    def _wanted(self) -> Wanted:
        trained = [dense for dense in self._dense if dense.parameter.requires_grad]
        return Wanted(trained, [want for layer in self._layers for want in layer.wants()])

    def _asked(self, wanted: Wanted) -> None:
        """Dense weights have been asked for."""
        wanted.rest(self._ps)
        if not self._pipeline:
            self._take(self._arriving)

    def _arrive(self) -> None:
        if self._arriving:
            with self._lock:  # models on several devices come at once, and go on when all have theirs
                if self._arriving:
                    self._check_edits()
                    self._take(self._arriving)

    def _take(self, arriving: list[tuple[Dense, Pulled]]) -> None:
        try:
            with torch.no_grad():
                for dense, pulled in arriving:
                    dense.take(torch.from_numpy(pulled()))
        finally:
            self._arriving = []
