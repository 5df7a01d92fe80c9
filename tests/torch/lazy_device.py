"""A device in the CPU's memory whose streams run when they like, as much out of step as their waits allow.

Copies that begin on a side stream, and what a test gives the compute stream to do, are made when the stream comes
there. A copy that nobody waits for has garbage in it. Memory is a pool for each stream, as CUDA's is: what is given
back is the stream's to use again at once, unless `record_stream` says who else has it still to use.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor

GARBAGE = 1e9
_COPY, _TO = Tensor.copy_, Tensor.to


class LazyStream:
    def __init__(self, streams: list[LazyStream]) -> None:
        self.is_torchs = False  # computes at once what torch tells the CPU
        self.todo: list[Callable[[], None] | LazyEvent] = []
        self.at = 0
        self.free: list[tuple[Any, list[LazyEvent]]] = []  # memory, and what is to be done before it is used again
        streams.append(self)

    def wait_stream(self, other: LazyStream) -> None:
        event = LazyEvent(Random(0), [other])
        event.record(other)
        if self.is_torchs:
            event.synchronize()
        else:
            self.todo.append(event)

    def step(self) -> bool:
        """Does the next thing, if there is one and it has not to wait."""
        if self.at == len(self.todo):
            return False
        next_one = self.todo[self.at]
        if isinstance(next_one, LazyEvent):
            if not next_one.reached:
                return False
        else:
            next_one()
        self.at += 1
        return True


class LazyEvent:
    def __init__(self, random: Random, streams: list[LazyStream]) -> None:
        self._random, self._streams = random, streams
        self._stream: LazyStream | None = None

    def record(self, stream: LazyStream) -> None:
        self._stream, self._number = stream, len(stream.todo)

    @property
    def reached(self) -> bool:
        return self._stream is None or self._stream.at >= self._number

    def query(self) -> bool:
        for _ in range(self._random.randrange(9)):
            self._random.choice(self._streams).step()
        return self.reached

    def synchronize(self) -> None:
        while not self.reached:
            assert any(stream.at < len(stream.todo) for stream in self._streams)
            self._random.choice(self._streams).step()


class LazyDevice:
    """The interface of torch's device modules."""

    def __init__(self, seed: int) -> None:
        self.random, self.streams = Random(seed), list[LazyStream]()
        self.compute = self.current = LazyStream(self.streams)
        self.copies = 0
        self._memory_of: dict[
            int, tuple[LazyStream, list[LazyStream]]
        ] = {}  # by address: whose it is, who else uses it
        self._blocks: list[Any] = []

    # -- as torch.cuda has it

    def Stream(self, device: torch.device) -> LazyStream:
        return LazyStream(self.streams)

    def Event(self) -> LazyEvent:
        return LazyEvent(self.random, self.streams)

    def current_stream(self, device: torch.device) -> LazyStream:
        return self.current

    @contextmanager
    def stream(self, stream: LazyStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    # -- in the place of methods of tensors; on the compute stream they are torch's own

    def copy_(self, here: Tensor, there: Tensor, non_blocking: bool = False) -> Tensor:
        if self.current is self.compute:
            return _COPY(here, there, non_blocking)
        assert non_blocking
        self._copy(here, there)
        return here

    def to(self, source: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.current is self.compute or args == (source.dtype,):
            return _TO(source, *args, **kwargs)
        dtype = args[0] if isinstance(args[0], torch.dtype) else source.dtype
        assert dtype is args[0] or kwargs == {"non_blocking": True}
        made = self.empty(self.current, tuple(source.shape), dtype)
        self._copy(made, source)
        return made

    def record_stream(self, tensor: Tensor, stream: LazyStream) -> None:
        self._memory_of[tensor.data_ptr()][1].append(stream)

    # -- memory

    def empty(self, stream: LazyStream, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        kind = torch.empty(0, dtype=dtype).numpy().dtype
        size = kind.itemsize * int(np.prod(shape))
        for number, (block, events) in enumerate(stream.free):
            if len(block) == size and all(event.reached for event in events):
                del stream.free[number]
                break
        else:
            block = np.full(max(size, 1), 0x7F, np.uint8)[:size]
            self._blocks.append(block)
        owned = np.frombuffer(block, kind).reshape(shape)
        address = block.ctypes.data
        self._memory_of[address] = stream, []
        weakref.finalize(owned, self._give_back, address, block)
        return torch.from_numpy(owned)

    def _give_back(self, address: int, block: Any) -> None:
        stream, users = self._memory_of[address]
        events = [self.Event() for _ in users]
        for event, user in zip(events, users, strict=True):
            event.record(user)
        stream.free.append((block, events))

    def _copy(self, to: Tensor, source: Tensor) -> None:
        """Holds neither: the caller has to, but for memory of torch's own, which torch keeps."""
        self.copies += 1
        held = [each for each in (to, source) if each.data_ptr() not in self._memory_of]
        into, out_of = self.seen(to), self.seen(source)
        if to.data_ptr() not in self._memory_of:
            into[...] = GARBAGE

        def copy() -> None:
            into[...] = out_of
            held.clear()

        self.current.todo.append(copy)

    @staticmethod
    def seen(tensor: Tensor) -> Any:
        """The value at a tensor's memory, without holding the tensor."""
        array = tensor.detach().numpy()
        raw: Any = (ctypes.c_uint8 * array.nbytes).from_address(array.ctypes.data)
        return np.ndarray(array.shape, array.dtype, raw, strides=array.strides)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.random.choice(self.streams).step()

    def finish(self) -> None:
        while any(stream.at < len(stream.todo) for stream in self.streams):
            self.random.choice(self.streams).step()
