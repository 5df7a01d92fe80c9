"""Dense weights at the servers, and the step that sends every gradient of a model."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, overload

import torch
from torch import Tensor, nn

from elasticps.errors import ConfigError
from elasticps.model.spec import Filter, ServerOptimizer
from elasticps.torch.arguments import refuse_torchs
from elasticps.torch.devices import DeviceGroup, models_of
from elasticps.torch.outgoing import Outgoing, Rates
from elasticps.torch.parameters import NO_WRAPPER, Groups, dense_of, described, plain, tables_of
from elasticps.torch.weights import Weights, layers_of

if TYPE_CHECKING:
    from elasticps.client import Step
    from elasticps.torch.group import GroupStep
    from elasticps.torch.parameters import Target
    from elasticps.torch.worker import Worker


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
        ps: Worker,
        model: nn.Module | DeviceGroup[Any],
        optimizer: ServerOptimizer | Callable[[str, nn.Parameter], ServerOptimizer] | None = None,
        *,
        prefix: str = "model",
        overlap: bool = True,
        pipeline: bool = False,
        bucket_bytes: int = 1 << 20,
        push: Sequence[Filter] = (),
        pull: Sequence[Filter] = (),
    ) -> None:
        refuse_torchs(optimizer)
        models = models_of(model)
        self._ps, self._model = ps, models[0]
        if any(isinstance(m, nn.parallel.DistributedDataParallel | nn.DataParallel) for m in self._model.modules()):
            raise ConfigError(NO_WRAPPER)
        # Of a group nothing leaves before all devices have their gradients: one's error would leave half a step.
        self._overlap, self._pipeline = overlap and not isinstance(model, DeviceGroup), pipeline
        self._replace_others()

        groups: Groups = {}
        trained = {name: parameter for other in self._others() for name, parameter in other._trained.items()}
        dense = dense_of(ps, models, optimizer, prefix, groups, push, pull, trained)
        tables = tables_of(models, groups)
        if not groups:
            raise ConfigError("the model has no parameter and no elasticps embedding to train")
        self._trained: dict[str, nn.Parameter] = {each.tensor.name: each.parameter for each in dense}
        # With "momentum" among them, schedulers that want to change it fail in step(), which says what to do.
        super().__init__(list(groups.values()), {"lr": 0.0, "momentum": None})
        self._complete = True
        this = weakref.ref(self)

        def groups_now() -> list[dict[str, Any]]:
            optimizer = this()
            assert optimizer is not None  # who asks was called by it
            return optimizer.param_groups

        targets: list[tuple[Target, int]] = [(each.tensor, each.group) for each in dense]
        targets += [(each.table, each.group) for each in tables]
        self._rates = Rates(targets, groups_now)
        self._weights = Weights(ps, dense, [layer for each in models for layer in layers_of(each)])
        self._outgoing = Outgoing(ps, models, dense, tables, self._rates, bucket_bytes)
        self.last_step: Step | GroupStep | None = None
        self._unhook = [*(self._outgoing.watch() if self._overlap else ()), *self._watch_forwards(models)]
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
        """The Optimizers of other models on this client."""
        if found := [o for o in Optimizer._live if o._ps is self._ps and o._model is not self._model]:
            found.clear()
            gc.collect()  # an unused one may wait in a reference cycle
        return [o for o in Optimizer._live if o._ps is self._ps and o._model is not self._model]

    def _watch_forwards(self, models: Sequence[nn.Module]) -> Iterator[Callable[[], None]]:
        """Has weights of a pipelined step taken before they are needed; yields what ends that."""
        this = weakref.ref(self)  # the model must not keep its optimizer alive

        def arrive(*_: object) -> None:
            if (optimizer := this()) is not None:
                optimizer._arrive()

        if self._pipeline:
            for model in models:
                yield model.register_state_dict_pre_hook(arrive).remove
                for module in model.modules():
                    if module is model or any(p.numel() for p in module.parameters(recurse=False)):
                        yield module.register_forward_pre_hook(arrive).remove

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
        self._rates.complete()

    @classmethod
    def of(cls, model: nn.Module) -> list[Optimizer]:
        """The Optimizers that train a model now."""
        return [optimizer for optimizer in cls._live if optimizer._model is plain(model)]

    def __getstate__(self) -> NoReturn:
        raise ConfigError("an elasticps Optimizer cannot be copied or pickled: save its state_dict(), build it again")

    def close(self) -> None:
        """Takes the hooks off the model. A newer Optimizer for the same client and model does this to the older."""
        for remove in self._unhook:
            remove()
        self._drop()
        self._weights.forget()
        Optimizer._live.discard(self)

    def _drop(self) -> str:
        """Drops a step that will not be completed; names the gradients of it that had left."""
        left, step = self._outgoing.drop()
        self.last_step = step or self.last_step
        return left

    @property
    def overlaps(self) -> bool:
        """Whether gradients leave during the backward pass."""
        return self._overlap

    # -- what a training loop calls

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Backward passes inside only add up; what they leave goes with the next pass outside, or with `step()`."""
        self._outgoing.accumulating += 1
        try:
            yield
        finally:
            self._outgoing.accumulating -= 1

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears all gradients, of rows too. Closes a step of which a part has left, with a RuntimeWarning."""
        self._outgoing.zero_grad(set_to_none)
        if not set_to_none:
            super().zero_grad(set_to_none=False)
        left = self._drop()
        if left:
            warnings.warn(
                f"zero_grad() after a backward pass without step(): these have been trained already: {left}",
                RuntimeWarning,
                stacklevel=2,
            )
            self._weights.check_edits()
            self._weights.refresh(self._weights.next_pull())
            self._take_weights()

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
            self._drop()
            raise ConfigError("gradients scaled by torch.amp.GradScaler: use bfloat16 autocast, which needs no scaler")
        outgoing, weights = self._outgoing, self._weights
        with outgoing.lock:
            changed = outgoing.changed()
            if changed:
                self._drop()
                raise ConfigError(
                    f"{changed} changed between backward() and step(), after it had left for the servers; the step was "
                    "made with what had left. Build the Optimizer with overlap=False to change it there"
                )
            try:
                self._rates.check(self.param_groups)
                outgoing.fetch_rest()
                weights.check_edits()  # waits for all that a GPU computes
            except ConfigError:
                self._drop()
                raise
            outgoing.send_arrived(wait=True)
            pull = weights.next_pull()
            self.last_step, answer = outgoing.end(pull.keys, pull.out)
            weights.sent(pull, answer)
        self._take_weights()
        return loss

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """`torch.nn.utils.clip_grad_norm_` over all gradients of this worker's step: those of dense parameters, and of
        rows, each row once. Returns their norm as it was. ConfigError with `overlap`, as gradients have left then."""
        if self._overlap:
            raise ConfigError("gradients leave before they can be clipped: build the Optimizer with overlap=False")
        if self._ps.collective:
            raise ConfigError("gradients of a group are added up when they leave, and no rank knows their norm before")
        gradients = self._outgoing.gathered()
        norm = nn.utils.get_total_norm(gradients, norm_type, error_if_nonfinite)
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for gradient in gradients:
            gradient.mul_(factor.to(gradient.device))
        return norm

    # -- the servers' weights

    def refresh(self) -> None:
        """Takes the servers' newest dense weights into the model now, also of frozen parameters."""
        self._weights.refresh()
        self._weights.take()

    def upload(self) -> None:
        """Gives the servers this model's dense weights, which `load_state_dict` has changed, say. Slots are new then.

        One worker does this, while none trains. Returns when it is committed.
        """
        self._weights.upload()
        self.refresh()
        Optimizer.loaded.discard(self._model)

    def _take_weights(self) -> None:
        """Waits for the weights that a step has asked for, unless that is for the next forward pass to do."""
        if not self._pipeline:
            self._weights.take()

    def _arrive(self) -> None:
        if self._weights.coming:
            with self._outgoing.lock:  # models on several devices come at once, and go on when all have theirs
                if self._weights.coming:
                    self._weights.check_edits()
                    self._weights.take()
