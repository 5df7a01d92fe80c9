"""Dense weights of the models: pulled from the servers as a step ends, and put into the parameters when they have come.

The same pull brings the rows that layers expect to need next: one message has the last gradients of a step, and asks
for both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from elasticps.errors import ConfigError
from elasticps.kernels import njit
from elasticps.store.native import carray, pointer
from elasticps.torch.collection import Collection, CollectionTable
from elasticps.torch.embedding import ExpectedRows, TableLayer
from elasticps.torch.host import staged

if TYPE_CHECKING:
    from elasticps.client import DenseTensor
    from elasticps.torch.group import GroupTensor
    from elasticps.torch.worker import Worker

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(eq=False)
class Copy:
    """A dense parameter as the model on one device has it."""

    parameter: nn.Parameter
    _taken: Tensor | None = None  # the servers' values, as the parameter took them last
    _address: int = 0  # where the parameter lies, if it is float32 of the CPU
    _plain: bool = False  # whether its floats lie there one after another

    def take(self, values: Tensor) -> None:
        """Gives the parameter the servers' values, float32, which are kept to compare. Under `no_grad`."""
        parameter = self.parameter
        parameter.copy_(values, non_blocking=True)
        if parameter.dtype is values.dtype and parameter.is_cpu:
            self._taken = values
            if (address := parameter.data_ptr()) != self._address:
                self._address, self._plain = address, parameter.is_contiguous() and values.is_contiguous()
        else:
            self._taken, self._address = parameter.detach().clone(), 0

    def edited(self) -> bool:
        """Whether the parameter has changed here since then. Torch's own count would not see changes of `.data`."""
        if self._taken is None:
            return False
        here, there = self._bits(self._taken)
        if here.is_cpu:  # torch's own would take several threads, and longer
            return not np.array_equal(here.numpy(), there.numpy())
        return not torch.equal(here, there)

    def edited_there(self) -> Tensor | None:
        """The answer of `edited` as a bool of a GPU, without a wait for it; None for a parameter of the CPU."""
        if self._taken is None or self.parameter.is_cpu:
            return None
        here, there = self._bits(self._taken)
        return (here != there).any()

    def _bits(self, taken: Tensor) -> tuple[Tensor, Tensor]:
        """The values now and the values taken, as integers: NaN equals itself then."""
        now = self.parameter.detach()
        bits = _BITS[now.element_size()]
        return now.view(bits), taken.to(now.device, now.dtype).view(bits)

    @property
    def memory(self) -> tuple[int, int, int] | None:
        """A pair for `differ`: the parameter and the values it took last; None if they cannot be compared like that."""
        taken = self._taken
        if taken is None or not self._plain or self.parameter.data_ptr() != self._address:
            return None
        return self._address, taken.data_ptr(), taken.numel()


@dataclass(eq=False)
class DenseParameter:
    """One dense parameter and its tensor at the servers. copies: at least one, in the order of a group's devices."""

    name: str
    copies: list[Copy]
    tensor: DenseTensor | GroupTensor
    group: int  # index of its param group
    left: tuple[int, int] | None = None  # address and version of the gradient that has left in this step

    def __post_init__(self) -> None:
        self.parameter = self.copies[0].parameter

    def take(self, values: Tensor) -> None:
        """Gives all copies the servers' values, float32. Under `no_grad`."""
        there = None
        for copy in self.copies:
            if copy.parameter.is_cpu:
                copy.take(values)
                continue
            if there is None:
                there = staged(values, [each.parameter.device for each in self.copies])
            copy.take(there)

    def gather(self) -> None:
        """Adds the other copies' gradients to the first one's, as backward passes one after another would have; they
        have none afterwards. Under `no_grad`."""
        for copy in self.copies[1:]:
            gradient, copy.parameter.grad = copy.parameter.grad, None
            if gradient is None:
                continue
            here = gradient.detach().to(self.parameter.device)
            if self.parameter.grad is None:
                self.parameter.grad = here
            else:
                self.parameter.grad.add_(here)


def _compare(pairs: Any) -> Any:
    bits = np.int32(0)
    for i in range(pairs.shape[0]):
        one = carray(pointer(pairs[i, 0]), (pairs[i, 2],), np.int32)
        other = carray(pointer(pairs[i, 1]), (pairs[i, 2],), np.int32)
        for j in range(pairs[i, 2]):
            bits |= one[j] ^ other[j]
    return bits != 0


differ: Any = njit("boolean(int64[:, ::1])", nogil=True, cache=True)(_compare)
"""Whether the arrays of any pair differ: int64 [n, 3], two addresses each, and how many words of 4 bytes they have. One
compiled call: a call of numpy's for each would take longer than the comparison of a parameter."""


def first_edited(dense: Iterable[DenseParameter]) -> str:
    """The name of a parameter that was changed here since it took the servers' values; empty if none was."""
    copies = [(each.name, copy) for each in dense if each.parameter.requires_grad for copy in each.copies]
    memory = [copy.memory for _, copy in copies]
    if copies and None not in memory and not differ(np.array(memory, np.int64)):  # nearly always
        return ""
    there = dict[torch.device, list[Tensor]]()
    here = list[tuple[str, Copy]]()
    for name, copy in copies:
        if (edited := copy.edited_there()) is None:
            here.append((name, copy))
        else:
            there.setdefault(edited.device, []).append(edited)
    if any(bool(torch.stack(edited).any()) for edited in there.values()):  # each GPU is waited for once
        here = copies
    return next((name for name, copy in here if copy.edited()), "")


def values_of(parameter: nn.Parameter) -> NDArray[np.float32]:
    """A parameter's values as servers have them; maybe the parameter's own memory."""
    return parameter.detach().float().cpu().contiguous().numpy()


class NextPull(NamedTuple):
    """The pull at the end of a step. keys: None for each tensor, int64 [n] for each table; out: where rows go, float32
    [n, dim] by table; later: rows that need a pull of their own, after the step."""

    dense: list[DenseParameter]
    keys: dict[Any, Any]
    out: dict[Any, NDArray[np.float32]]
    joined: list[ExpectedRows]
    later: list[ExpectedRows]


class Weights:
    """Keeps the models' dense weights those of the servers. dense: all dense parameters; layers: the ones that may
    expect rows for the next batch."""

    def __init__(self, ps: Worker, dense: Sequence[DenseParameter], layers: Sequence[TableLayer | Collection]) -> None:
        self._ps, self._dense, self._layers = ps, dense, layers
        self._coming: tuple[list[DenseParameter], Any] | None = None  # parameters, and the pull of their values

    @property
    def coming(self) -> bool:
        """Whether values are on their way."""
        return self._coming is not None

    def next_pull(self) -> NextPull:
        """Plans a pull of all trained parameters, and of the rows that layers expect; they expect none afterwards."""
        dense = [each for each in self._dense if each.parameter.requires_grad]
        pull = NextPull(dense, {each.tensor: None for each in dense}, {}, [], [])
        for layer in self._layers:
            for rows in layer.take_expected():
                # A table is asked once in a pull; and one with a cache shows the step only when it has left.
                if any(table in pull.keys or getattr(table, "cache", None) is not None for table in rows.keys):
                    pull.later.append(rows)
                    continue
                pull.joined.append(rows)
                pull.keys.update(rows.keys)
                pull.out.update(rows.out)
        return pull

    def sent(self, pull: NextPull, answer: Any) -> None:
        """A planned pull has left, and `answer` waits for it: tells the layers, and asks for the rest of the rows."""
        self._coming = pull.dense, answer
        for rows in pull.joined:
            rows.begun(answer)
        for rows in pull.later:
            rows.begun(self._ps.pull_async(rows.keys, rows.out))

    def refresh(self, pull: NextPull | None = None) -> None:
        """Asks for a planned pull now, of its own; by default for all parameters, also those that are frozen."""
        if pull is None:
            pull = NextPull(list(self._dense), {each.tensor: None for each in self._dense}, {}, [], [])
        self.sent(pull, self._ps.pull_async(pull.keys, pull.out))

    def take(self) -> None:
        """Waits for values that are on their way, and gives them to the parameters. Raises what a pull raises."""
        if self._coming is None:
            return
        dense, answer = self._coming
        try:
            values = answer.result()
            with torch.no_grad():
                for each in dense:
                    each.take(torch.from_numpy(values[each.tensor]))
        finally:
            self._coming = None

    def forget(self) -> None:
        """Drops values that are on their way."""
        self._coming = None

    def check_edits(self) -> None:
        """ConfigError if a parameter was changed here since it took the servers' values. Waits for all GPUs."""
        if edited := first_edited(self._dense):
            raise ConfigError(
                f"parameter {edited!r} was changed in place since the servers' values were taken, which the servers "
                "cannot know and the next values undo: after load_state_dict(), say, call upload(), which gives them "
                "this model's values, or refresh(), which takes theirs"
            )

    def upload(self) -> None:
        """Gives the servers the values of all parameters."""
        for each in self._dense:
            each.tensor.load(values_of(each.parameter))


def layers_of(model: nn.Module) -> list[TableLayer | Collection]:
    """The layers of a model that may expect rows; a collection stands for its tables."""
    return [
        module for module in model.modules()
        if isinstance(module, Collection)
        or (isinstance(module, TableLayer) and not isinstance(module, CollectionTable))
    ]  # fmt: skip
