"""Embedding layers over the servers' tables: any int64 is an id, and their number is not declared."""

from __future__ import annotations

import threading
import warnings
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, NoReturn, SupportsIndex

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from elasticps.errors import ConfigError, InputError
from elasticps.model.caching import Cache
from elasticps.model.spec import Filter, Init, Normal, ServerOptimizer
from elasticps.torch.arguments import check_ids, refuse_arguments, refuse_torchs
from elasticps.torch.host import moved, room, sent
from elasticps.torch.kernels.distinct import distinct

if TYPE_CHECKING:
    from elasticps.client import SparseTable
    from elasticps.torch.group import GroupTable
    from elasticps.torch.step_rows import StepRows
    from elasticps.torch.worker import PendingPull, Worker

INCOMPLETE = (
    "state_dict() has not the rows of tables, which are at the servers: elasticps.torch.full_state_dict(model) has "
    "them, and elasticps.torch.save(model, file) writes them to a file"
)
MAX_PREFETCHED = 8  # batches of ids whose rows may be under way; older ones are dropped
Gradient = tuple[NDArray[np.int64], Tensor]
"""keys int64 [n], distinct; the gradient of their rows, float32 [n, dim]"""


class ExpectedRows(NamedTuple):
    """Rows that a batch will need: keys of tables, int64 [n] each, and where their rows go, float32 [n, dim]. begun: is
    called with the pull that brings them."""

    keys: dict[Any, NDArray[np.int64]]
    out: dict[Any, NDArray[np.float32]]
    begun: Callable[[PendingPull], None]


@dataclass(eq=False)
class _Lookup:
    """The rows that one batch of ids needs."""

    keys: NDArray[np.int64]  # distinct, without the padding id
    positions: Tensor  # int64, shape of ids: index into keys; len(keys) stands for the padding id
    floats: Tensor  # float32 [keys (+ 1 of zeros if padded), dim], filled when the pull is over
    pull: PendingPull | None = None  # None: no key, nothing to pull

    @property
    def rows(self) -> NDArray[np.float32]:
        """The part of the same memory that belongs to the keys."""
        return self.floats.numpy()[: len(self.keys)]

    @property
    def padded(self) -> bool:
        """Whether the batch has the padding id."""
        return len(self.floats) > len(self.keys)


class _Early(NamedTuple):
    """Rows that were pulled with the end of a step; clock, changes: of that moment, as of the table."""

    lookup: _Lookup
    clock: int
    changes: int


@dataclass(eq=False)
class ForwardPass:
    """Takes the gradient of the rows that one forward pass pulled. Lives as long as the autograd graph does."""

    layer: weakref.ref[TableLayer]
    keys: NDArray[np.int64]

    def __call__(self, rows: Tensor) -> None:
        """The hook of autograd, when the gradient of `rows` is complete."""
        gradient, rows.grad = rows.grad, None
        layer = self.layer()
        if layer is not None and gradient is not None:
            with layer._lock:
                layer.passes.discard(self)
            take_gradients([(layer, self.keys, gradient[: len(self.keys)])])  # not that of the padding id


class _Elsewhere(Tensor):
    """The `.grad` of a layer's parameter while gradients of its rows wait elsewhere. It refuses to be computed with:
    torch's `clip_grad_norm_`, or an optimizer of torch's, would leave out the rows."""

    dropped = False  # by zero_grad(set_to_none=False)
    _HARMLESS: ClassVar[frozenset[str]] = frozenset(
        {
            "__get__",
            "__set__",
            "__repr__",
            "detach",
            "detach_",
            "requires_grad_",
            "to",
            "cpu",
            "cuda",
            "float",
            "half",
            "bfloat16",
            "_has_compatible_shallow_copy_type",
        }
    )

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name == "zero_":
            args[0].dropped = True
        elif name not in cls._HARMLESS:
            raise ConfigError(
                f"torch's {name} knows no gradients of rows, which are not in a model's parameters: train them with "
                "elasticps.torch.Optimizer, clip all gradients together with its clip_grad_norm_(…)"
            )
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


class TableLayer(nn.Module):
    """A layer over one table: forward passes pull the rows they need, backward passes leave their gradients here."""

    def __new__(cls, *args: Any, **options: Any) -> Any:
        """Refuses the arguments of torch's layers: Python would only say that others are missing."""
        if cls.__init__.__module__ == __name__:  # not a user's subclass, with arguments of its own
            refuse_arguments(cls.__name__, args, options)
        return super().__new__(cls)

    def __init__(
        self,
        ps: Worker,
        name: str,
        dim: int,
        *,
        optimizer: ServerOptimizer,
        init: Init | None = None,
        dtype: str = "float32",
        padding_idx: int | None = None,
        num_embeddings: int | None = None,
        max_norm: float | None = None,
        push: Sequence[Filter] = (),
        pull: Sequence[Filter] = (),
        cache: Cache | None = None,
    ) -> None:
        super().__init__()
        refuse_torchs(optimizer)
        if max_norm is not None:
            raise ConfigError(
                f"table {name!r}: max_norm is not to be had, because it changes rows when they are read: use weight "
                "decay, or an optimizer of your own that clips a row (docs/guides/custom.md)"
            )
        if num_embeddings is not None:
            if padding_idx is not None and padding_idx < 0:  # as torch counts
                padding_idx += num_embeddings
            if num_embeddings < 1 or not 0 <= (padding_idx or 0) < num_embeddings:
                raise ConfigError(f"table {name!r}: padding_idx must be one of num_embeddings={num_embeddings} ids")
        # What freezes a model, or asks whether a layer is frozen, does so by its parameters: this one has no values.
        self.trains = nn.Parameter(torch.empty(0))
        if init is None:  # torch's own default; the name as seed, because equal seeds start with equal rows
            init = Normal(std=1.0, seed=zlib.crc32(name.encode()))
        # The handle of the table at the servers.
        self.table: SparseTable | GroupTable = ps.table(
            name, dim=dim, optimizer=optimizer, init=init, dtype=dtype, push=push, pull=pull, cache=cache
        )
        self.ps = ps  # as whose steps this layer is trained
        self.optimizer = optimizer  # of the servers, for the rows
        self.dim = dim  # floats of a row
        self.padding_idx = padding_idx  # the id whose row is zeros; None for none
        self.num_embeddings = num_embeddings  # ids are below it; None for any int64
        self.max_norm = None  # as torch's layers have it
        self._prefetched: deque[tuple[Tensor, Tensor, _Lookup]] = deque(maxlen=MAX_PREFETCHED)  # ids, and a copy
        self._expected: list[_Lookup] = []  # of the next batch, to be pulled when this one's step ends
        self._early: list[_Early] = []  # rows that came with the end of the last step
        self.step_rows: StepRows[Any] | None = None  # shared by a group's devices: rows that one of them has pulled
        self._lock = threading.Lock()  # of gradients and passes: on CUDA, backward passes run in torch's own threads
        self.gradients: list[Gradient] = []  # they wait here until an Optimizer takes them
        self.passes: weakref.WeakSet[Any] = weakref.WeakSet()  # forward passes without their backward pass so far
        self.on_ids: Callable[[Tensor], None] | None = None  # called with the ids of each forward pass
        # Called when a backward pass has left gradients in some layers, of which this is one.
        self.on_gradients: Callable[[Sequence[TableLayer]], None] = no_optimizer

    def prefetch(self, ids: Tensor) -> None:
        """Asks for the rows of `ids` now; the forward pass that gets this very tensor, unchanged, takes them.

        The rows are as new as the servers had them at the time of this call. InputError for unusable ids.
        """
        self._prefetched.append((ids, ids.detach().clone(), self._ask(ids)))

    def expect(self, *ids: Tensor) -> None:
        """Announces the ids of the next forward passes, instead of those announced before. The Optimizer's next
        `step()` asks for these rows in the messages in which its gradients leave and the dense weights are asked for.
        They are as new as that step; passes that come after another step ask again. InputError for unusable ids."""
        self._expected = [self._plan(each) for each in ids]

    def take_expected(self) -> list[ExpectedRows]:
        """Hands over the rows that are expected, to a step that ends; then none are."""
        if not self._expected and not self._early:  # as most are
            return []
        expected, self._expected, self._early = self._expected, [], []
        return [
            ExpectedRows({self.table: each.keys}, {self.table: each.rows}, partial(self._began, each))
            for each in expected
            if len(each.keys) or self.ps.collective
        ]

    def _began(self, lookup: _Lookup, pull: PendingPull) -> None:
        lookup.pull = pull
        self._early.append(_Early(lookup, self.ps.clock, self._changes))

    @property
    def _changes(self) -> int:
        """How often rows of the table were changed past steps."""
        return int(getattr(self.table, "changes", 0))

    @property
    def embedding_dim(self) -> int:
        """`dim`, under the name that torch's layers have for it."""
        return self.dim

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            raise AttributeError(
                f"the rows of table {self.table.name!r} are at the servers: layer.table.pull(ids) gives some of them, "
                "elasticps.torch.full_state_dict(model) all, layer.table.load(ids, rows) changes them"
            )
        return super().__getattr__(name)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        self._refuse_copies()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        self._refuse_copies()

    def _refuse_copies(self) -> NoReturn:
        raise ConfigError(
            f"a layer over table {self.table.name!r} cannot be copied or pickled, its rows are at the servers: build "
            "the model again where it is needed, with another table's name for rows of its own; to keep its values: "
            "elasticps.torch.save(model, file)"
        )

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        warnings.warn(INCOMPLETE, stacklevel=2)  # one text for all layers: by default, Python shows it once

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        if f"{prefix}keys" in state_dict or f"{prefix}weight" in state_dict:
            error_msgs.append(
                f"it has rows of table {self.table.name!r}, which go to the servers: "
                "elasticps.torch.load_full_state_dict(model, state), or load(model, file), sends them"
            )

    def extra_repr(self) -> str:
        known = {"num_embeddings": self.num_embeddings, "padding_idx": self.padding_idx}
        options = "".join(f", {name}={value}" for name, value in known.items() if value is not None)
        return f"{self.table.name!r}, dim={self.dim}{options}"

    def keys_of(self, ids: Tensor) -> tuple[NDArray[np.int64], NDArray[np.int64], bool]:
        """The distinct keys of a batch of ids: (keys, positions, padded).

        keys: int64, without the padding id; positions: int64 [ids], the index of each id in keys, and len(keys) for the
        padding id; padded: whether that occurs. InputError for unusable ids.
        """
        check_ids(self.table.name, ids)
        flat = ids.detach().reshape(-1).to("cpu", torch.int64).contiguous().numpy()
        keys, where, padded = distinct(flat, self.padding_idx)
        if self.num_embeddings is not None and len(keys) and not 0 <= keys.min() <= keys.max() < self.num_embeddings:
            raise InputError(f"ids of table {self.table.name!r} must be from 0 to {self.num_embeddings - 1}")
        return keys, where, padded

    def _ask(self, ids: Tensor, step_rows: StepRows[Any] | None = None) -> _Lookup:
        """Asks for rows, unless they came with the end of the last step."""
        lookup = self._plan(ids)
        for early in self._early:
            same_moment = (early.clock, early.changes) == (self.ps.clock, self._changes)
            if same_moment and np.array_equal(early.lookup.keys, lookup.keys):
                self._early.remove(early)
                if len(early.lookup.floats) == len(lookup.floats):
                    lookup.floats, lookup.pull = early.lookup.floats, early.lookup.pull
                    return lookup
                break
        keys, rows = lookup.keys, lookup.rows
        if step_rows is not None:
            lookup.pull = step_rows.ask(self.ps.clock, {self.table: keys}, {self.table: rows}, self.ps.pull_async)
        elif len(keys) or self.ps.collective:
            lookup.pull = self.table.pull_async(keys, rows)
        return lookup

    def _plan(self, ids: Tensor) -> _Lookup:
        """Finds the keys of a batch and allocates memory for their rows."""
        keys, where, padded = self.keys_of(ids)
        floats = room(len(keys) + padded, self.dim, device=ids.device)
        if padded:
            floats[len(keys) :] = 0.0
        return _Lookup(keys, moved(torch.from_numpy(where).view(ids.shape), ids.device), floats)

    def _claim(self, ids: Tensor) -> _Lookup:
        """The rows of a batch: those prefetched for it, or a new pull."""
        for prefetched in self._prefetched:
            given, copy, lookup = prefetched
            if given is ids and torch.equal(copy, ids):  # else changed in place: torch's own count does not see it all
                self._prefetched.remove(prefetched)
                return lookup
        step_rows = self.step_rows
        return self._ask(ids, step_rows if step_rows is not None and may_share_rows(self, [self]) else None)

    def _pull(self, ids: Tensor) -> tuple[Tensor, _Lookup]:
        """The rows of a batch on its device, float32 [keys (+ 1 of zeros if padded), dim], ready for autograd."""
        if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            raise ConfigError(
                f"a trace would keep the rows of table {self.table.name!r} that it sees: compile the model"
            )
        if self.on_ids is not None:
            self.on_ids(ids)
        lookup = self._claim(ids)
        if lookup.pull is not None:
            lookup.pull.result()
        rows = sent(lookup.floats, ids.device)
        trained = self.training and self.trains.requires_grad
        if trained and torch.is_grad_enabled():
            rows.requires_grad_()  # also of padding alone: a backward pass goes through
            if len(lookup.keys):
                forward = ForwardPass(weakref.ref(self), lookup.keys)
                rows.register_post_accumulate_grad_hook(forward)
                self.passes.add(forward)
        return rows, lookup

    def keep(self, keys: NDArray[np.int64], rows: Tensor) -> None:
        """Has a gradient wait here: keys int64 [n], distinct; of their rows, float32 [n, dim]."""
        with self._lock:
            trains = self._parameters["trains"]
            assert trains is not None
            if (shown := trains.grad) is None or getattr(shown, "dropped", False):
                self.gradients.clear()
                trains.grad = torch.empty_like(trains.detach()).as_subclass(_Elsewhere)
            self.gradients.append((keys, rows))

    def take_all(self) -> list[Gradient]:
        """Hands over all gradients since the last call, one for every backward pass, unless the model's zero_grad() has
        dropped them."""
        with self._lock:
            trains = self._parameters["trains"]
            assert trains is not None
            shown = trains.grad
            taken = [] if shown is None or getattr(shown, "dropped", False) else list(self.gradients)
            self.gradients.clear()
        return taken

    def forget(self) -> None:
        """Drops all gradients that wait: a step has ended."""
        trains = self._parameters["trains"]
        assert trains is not None
        with self._lock:
            self.gradients.clear()
            if trains.grad is not None:
                trains.grad = None


def take_gradients(given: Sequence[tuple[TableLayer, NDArray[np.int64], Tensor]]) -> None:
    """Takes gradients of rows from a backward pass: has each wait in its layer, as `keep` does, and then tells the
    Optimizers of these layers."""
    layers: dict[Callable[[Sequence[TableLayer]], None], list[TableLayer]] = {}
    for layer, keys, rows in given:
        layer.keep(keys, rows)
        layers.setdefault(layer.on_gradients, []).append(layer)
    for tell, some in layers.items():
        tell(some)


def gradients_of(tables: Sequence[Sequence[TableLayer]]) -> list[list[Gradient]]:
    """Hands over all gradients that wait in the layers of each table, as `take_all` does."""
    return [[gradient for layer in layers for gradient in layer.take_all()] for layers in tables]


def forget_gradients(layers: Iterable[TableLayer]) -> None:
    """Drops all gradients that wait in some layers: a step has ended."""
    for layer in layers:
        layer.forget()


def may_share_rows(layer: nn.Module, tables: Sequence[TableLayer]) -> bool:
    """Whether a forward pass now may take rows that another device's model has pulled in this step: it trains them, and
    none of the tables has a cache of its own."""
    cached = any(getattr(table.table, "cache", None) is not None for table in tables)
    return layer.training and torch.is_grad_enabled() and not cached


def no_optimizer(layers: Sequence[TableLayer]) -> None:
    """Does nothing: gradients of an embedding that no Optimizer trains wait in the embedding."""


class Embedding(TableLayer):
    """`torch.nn.Embedding` over a table of the servers: ids are any int64, and a row exists when it is first trained.

    `optimizer` updates the rows at the servers, `init` gives the values of rows never trained (default: torch's normal
    distribution), `dtype` is the servers' storage type, `push` and `pull` are the table's filters, `cache` says which
    rows this worker keeps (docs/guides/caches.md). An id equal to `padding_idx` gives zeros and is not trained. With
    `num_embeddings` ids are 0 … n - 1 only, as torch has them, and `full_state_dict` has a row for each.
    Rows are trained by passes in training mode; after `eval()` or `requires_grad_(False)`, of the layer or a model
    around it, and under `torch.no_grad()` they are only pulled.
    Train it with `elasticps.torch.Optimizer`. The output is on the device of the ids.
    """

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # a compiled model goes on after it
    def forward(self, ids: Tensor) -> Tensor:
        """ids int64 or int32 of any shape -> [..., dim]: float32, or what `half()` or the like made of the model."""
        rows, lookup = self._pull(ids)
        return functional.embedding(lookup.positions, rows).to(self.trains.dtype)


class EmbeddingBag(TableLayer):
    """`torch.nn.EmbeddingBag` over a table of the servers; see `Embedding` for ids, initial values and training."""

    def __init__(
        self,
        ps: Worker,
        name: str,
        dim: int,
        mode: str = "mean",
        *,
        optimizer: ServerOptimizer,
        init: Init | None = None,
        dtype: str = "float32",
        padding_idx: int | None = None,
        num_embeddings: int | None = None,
        max_norm: float | None = None,
        include_last_offset: bool = False,
        push: Sequence[Filter] = (),
        pull: Sequence[Filter] = (),
        cache: Cache | None = None,
    ) -> None:
        if mode not in ("sum", "mean", "max"):
            raise ConfigError(f"EmbeddingBag's mode must be 'sum', 'mean' or 'max', got {mode!r}")
        super().__init__(
            ps, name, dim, optimizer=optimizer, init=init, dtype=dtype, padding_idx=padding_idx,
            num_embeddings=num_embeddings, max_norm=max_norm, push=push, pull=pull, cache=cache,
        )  # fmt: skip
        self.mode = mode
        self.include_last_offset = include_last_offset

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # a compiled model goes on after it
    def forward(self, ids: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """ids [bags, n], or ids [n] with the offset of each bag's start -> [bags, dim], of a type as `Embedding`'s."""
        rows, lookup = self._pull(ids)
        bags = functional.embedding_bag(
            lookup.positions,
            rows,
            offsets,
            mode=self.mode,
            per_sample_weights=None if per_sample_weights is None else per_sample_weights.to(rows.dtype),
            include_last_offset=self.include_last_offset,
            padding_idx=len(lookup.keys) if lookup.padded else None,
        )
        return bags.to(self.trains.dtype)
