"""The client of a group of ranks: one worker of the cluster, with one name and one clock."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex, cast

import numpy as np

from elasticps.client.client import of_name
from elasticps.client.core.join import Resume
from elasticps.client.inputs import checked_keys, checked_out, refuse_pickling
from elasticps.errors import ConfigError, InputError
from elasticps.model.policies import SCORES, Admission, Eviction
from elasticps.model.sharding import checked_spec
from elasticps.model.spec import Filter, Init, ServerOptimizer, TableSpec, Zeros
from elasticps.torch.group.layout import CHUNK
from elasticps.torch.group.links import Links, Words
from elasticps.torch.group.ranks import Ranks
from elasticps.torch.group.reads import AlonePull, Floats, GroupPull, WeightsRead, ask_rows
from elasticps.torch.group.shards import GroupShards
from elasticps.torch.group.step import LITTLE, Summing
from elasticps.torch.group.tables import GroupTable, GroupTensor, Handle, pull_many

if TYPE_CHECKING:
    from elasticps.client import Client, Step
    from elasticps.client.pull import ServerPull, TablesPull

Filters = Sequence[Filter]
Rates = float | Mapping[Handle, float] | None
_NEW, _SCORED = 1, 2  # what rank 0 tells of a handle: it is another one than before; its table keeps scores


class GroupStep:
    """One tick of the group's clock on its way to the servers."""

    def __init__(self, ps: GroupClient, step: Step | None) -> None:
        self._ps, self._step = ps, step
        self.ticked = 0  # the clock, once this rank knows it; else 0

    @property
    def clock(self) -> int:
        """The clock that this step ticked to."""
        if not self.ticked:
            self._ps.settle()
        return self.ticked

    def done(self) -> bool:
        """Whether the step is known to be committed here: at rank 0 as a client's step, elsewhere by `ps.committed`."""
        return self._ps.committed >= self.clock if self._step is None else self._step.done()

    def result(self, timeout: float | None = None) -> None:
        """Waits until the step is committed, as a client's step; every rank calls it."""

        def result(client: Client) -> Words:
            assert self._step is not None
            self._step.result(timeout)
            return self._ps.clocks()

        self._ps.hear(self._ps.at_rank_0("result of a step", result))


class GroupClient(Ranks):
    """The client of one rank of a group; made by `LocalGroup.connect`.

    Every rank makes the same calls in the same order, each with its own keys and gradients: `push` sums what all of
    them have and is one step, pulls ask for each row once. What differs is an error, `GroupLost`, at all ranks.
    `client` is the real one, at rank 0, and None elsewhere; `alone` is for what rank 0 does by itself. Not for several
    threads.
    """

    def __init__(
        self, links: Links, client: Client | None, mean: bool, chunk: int = CHUNK, little: int = LITTLE
    ) -> None:
        super().__init__(links, client)
        self._clocks = 0, 0  # the clock, and the clock up to which all is committed
        self._owed: tuple[int, GroupStep] | None = None  # a push whose result rank 0 has not sent
        self._handles: list[Handle] = []
        self._summing = Summing(links, self._handles, mean, chunk, little)
        self._named: dict[str, Handle] = {}
        self._closed = False
        self._pushes = 0

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        refuse_pickling("a rank's client")

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"steps: {self.clock}"
        return f"<GroupClient at rank {self.rank} of {self.size}: {state}>"

    @property
    def collective(self) -> bool:
        """Whether several processes are this worker: yes."""
        return True

    @property
    def clock(self) -> int:
        """Steps pushed, counted from the worker's base clock."""
        self.settle()
        return self._clocks[0]

    @property
    def committed(self) -> int:
        """The clock up to which every step is committed, as far as this rank knows."""
        return self._clocks[1]

    def stats(self) -> dict[str, float]:
        """As `Client.stats`, at rank 0; nothing at others. No rank waits for another."""
        return {} if self.client is None else self.client.stats()

    # -- tables

    def table(
        self, name: str, *, dim: int, optimizer: ServerOptimizer, init: Init | None = None, dtype: str = "float32",
        finite: bool = False, push: Filters = (), pull: Filters = (), admission: Admission | None = None,
        eviction: Eviction | Sequence[Eviction] = (), usage: str = "", **options: Any,
    ) -> GroupTable:  # fmt: skip
        """Opens a sparse table, as `Client.table`."""
        policies: dict[str, Any] = {"admission": admission, "eviction": eviction, "usage": usage}
        TableSpec(  # or raises
            name, dim, optimizer, init or Zeros(), dtype, finite=finite, push=push, pull=pull, **policies
        )

        def opened(client: Client) -> Any:
            return client.table(
                name, dim=dim, optimizer=optimizer, init=init, dtype=dtype, finite=finite, push=push, pull=pull,
                **policies, **options,
            )  # fmt: skip

        def made(number: int, real: Any, scored: bool) -> Handle:
            return GroupTable(self, name, number, optimizer, dim, real, scored=scored)

        handle = self._opened(f"table {name!r} of {dim} floats", name, opened, made)
        return cast(GroupTable, handle)

    def tensor(
        self, name: str, *, init: object, optimizer: ServerOptimizer, dtype: str = "float32", finite: bool = False,
        push: Filters = (), pull: Filters = (), **options: Any,
    ) -> GroupTensor:  # fmt: skip
        """Opens a dense tensor, as `Client.tensor`; if it is new it has the values that rank 0 gives."""
        shape = np.asarray(init, np.float32).shape

        def opened(client: Client) -> Any:
            return client.tensor(
                name, init=init, optimizer=optimizer, dtype=dtype, finite=finite, push=push, pull=pull, **options
            )

        def made(number: int, real: Any, scored: bool) -> Handle:
            return GroupTensor(self, name, number, optimizer, shape, real)

        handle = self._opened(f"tensor {name!r} of shape {shape}", name, opened, made)
        return cast(GroupTensor, handle)

    def tensors(
        self,
        values: Mapping[str, object],
        *,
        optimizer: ServerOptimizer | Callable[[str], ServerOptimizer],
        **options: Any,
    ) -> dict[str, GroupTensor]:
        """Opens many dense tensors at once, as `Client.tensors`."""
        shapes = {name: np.asarray(init, np.float32).shape for name, init in values.items()}
        alike = hashlib.sha256(repr(shapes).encode()).hexdigest()[:16]  # their names may be more than a message takes

        def opened(client: Client) -> list[Any]:
            return list(client.tensors(values, optimizer=optimizer, **options).values())

        def made(name: str, number: int, real: Any, scored: bool) -> Handle:
            return GroupTensor(self, name, number, of_name(optimizer, name), shapes[name], real)

        what = f"{len(shapes)} tensors, with names and shapes of digest {alike}"
        handles = self._all_opened(what, list(values), opened, made)
        return {name: cast(GroupTensor, handle) for name, handle in zip(values, handles, strict=True)}

    def row_counts(self, names: Sequence[str]) -> list[int]:
        """How many rows tables have at the servers, 0 for one that is not there; every rank calls it."""

        def counted(client: Client) -> list[int]:
            tables = client.tables()
            return [tables[name].rows if name in tables else 0 for name in names]

        found: list[int] = self.at_rank_0(f"row counts of {len(names)} tables", counted).tolist()
        return found

    def _opened(
        self, what: str, name: str, opened: Callable[[Client], Any], made: Callable[[int, Any, bool], Handle]
    ) -> Handle:
        (handle,) = self._all_opened(
            what, [name], lambda client: [opened(client)], lambda _, number, real, scored: made(number, real, scored)
        )
        return handle

    def _all_opened(
        self, what: str, names: Sequence[str], opened: Callable[[Client], list[Any]],
        made: Callable[[str, int, Any, bool], Handle],
    ) -> list[Handle]:  # fmt: skip
        reals: list[Any] = [None] * len(names)
        known = [self._named.get(name) for name in names]

        def open_here(client: Client) -> list[int]:
            reals[:] = opened(client)
            pairs = zip(known, reals, strict=True)
            return [
                _NEW * (before is None or before.real is not real) + _SCORED * (real.spec.usage == SCORES)
                for before, real in pairs
            ]

        found = self.at_rank_0(what, open_here).tolist()
        handles = list[Handle]()
        for name, before, flags, real in zip(names, known, found, reals, strict=True):
            handle = before
            if handle is None or flags & _NEW:
                handle = self._named[name] = made(name, len(self._handles), real, bool(flags & _SCORED))
                self._handles.append(handle)
            handles.append(handle)
        return handles

    # -- steps and pulls

    def push(self, values: Mapping[Any, object], *, lr: Rates = None) -> GroupStep:
        """One step of all ranks: sums their gradients, {table: (keys, grads), tensor: grad} as for `Client.push`,
        in the order of the ranks, and pushes the sums; scores beside them likewise. A rank may leave out tables and
        tensors of which it has no gradient. `lr` counts at rank 0. InputError before other ranks are involved; an error
        of rank 0's push is raised by the others with their next step."""
        self._refuse_alone("push")
        for handle in values:
            if self._named.get(getattr(handle, "name", "")) is not handle:
                raise InputError(f"push takes the tables and tensors of this group as keys, got {handle!r}")
        self.settle()
        number, sums = self._summing.sums(values)
        self._pushes += 1
        if self.client is None:
            step = GroupStep(self, None)
            self._owed = number, step
            return step
        with self.links.leading(number):
            rates: Any = {h.real: rate for h, rate in lr.items()} if isinstance(lr, Mapping) else lr
            real: dict[Any, Any] = {handle.real: handle.pushed(summed) for handle, summed in sums.items()}
            step = GroupStep(self, self.client.push(real, lr=rates))
            self._heard_push(self.links.answer(number, np.append(self.clocks(), self._summing.room)))
        step.ticked = self._clocks[0]
        return step

    def push_pull(
        self, values: Mapping[Any, object], keys: Mapping[Any, object], out: Mapping[Any, Floats] | None = None, *,
        step: None = None, lr: Rates = None,
    ) -> tuple[GroupStep, GroupPull | AlonePull]:  # fmt: skip
        """`push(values)`, then `pull_async(keys, out)`. A step of a group is never open."""
        assert step is None
        return self.push(values, lr=lr), self.pull_async(keys, out)

    def step(self, *, lr: Rates = None) -> NoReturn:
        """ConfigError: ranks push a step as a whole, when all of them have all of their gradients."""
        raise ConfigError("ranks of a group push each step as a whole: call push({…}) once for all its gradients")

    def settle(self) -> None:
        """At other ranks than rank 0: waits for the result of the newest push, and raises the error of rank 0."""
        if self._owed is not None:
            (number, step), self._owed = self._owed, None
            self._heard_push(self.links.answer(number))
            step.ticked = self._clocks[0]

    def pull_async(
        self, keys: Mapping[Any, object], out: Mapping[Any, Floats] | None = None, *, read: str = "tail",
        exact: bool = False,
    ) -> GroupPull | AlonePull:  # fmt: skip
        """Asks for rows of tables, {table: keys int64 [n], tensor: None}, as `Client.pull_async`. Every rank asks for
        its own keys of the same tables, and for the same tensors; each row is pulled once for all."""
        client = self.client
        tensors = [handle for handle in keys if not handle.target.dim]
        mine = {table: checked_keys(table.name, some) for table, some in keys.items() if table.target.dim}
        outs = {table: np.empty((len(some), table.dim), np.float32) for table, some in mine.items()}
        for table, rows in (out or {}).items():
            outs[table] = checked_out(f"table {table.name!r}", rows, outs[table].shape)
        if client is not None and self.is_alone:
            real_keys: Any = {handle.real: mine.get(handle) for handle in keys}
            into: Any = {table.real: rows for table, rows in outs.items()}
            return AlonePull(client.pull_async(real_keys, into, read=read, exact=exact), list(keys))

        def pull(tables: Sequence[GroupTable], unions: list[Words], rows: list[Floats]) -> TablesPull[Any]:
            assert client is not None
            real = [self._real(table) for table in tables]
            union_of, into = dict(zip(real, unions, strict=True)), dict(zip(real, rows, strict=True))
            return client.pull_async(union_of, into, read=read, exact=exact)

        weights = dict(zip(tensors, pull_many(self, tensors), strict=True)) if tensors else {}
        ticket = None
        if mine or not tensors:
            operation = f"pull of {len(mine)} tables {read}{' exact' * exact}"
            ticket = ask_rows(self.links, self.slots, operation, mine, outs, None if client is None else pull)
        return GroupPull(self.links, ticket, outs, weights)

    def pull(
        self, keys: Mapping[GroupTable, object], *, read: str = "tail", exact: bool = False
    ) -> Mapping[Any, Floats]:
        """The same at once: of each table float32 [n, dim] in the order of its keys."""
        return self.pull_async(keys, read=read, exact=exact).result()

    def pull_many(self, tensors: Sequence[GroupTensor]) -> Sequence[WeightsRead | ServerPull]:
        """Asks for several tensors, as `Client.pull_many` and as every rank does. What their `result()` gives is memory
        that all ranks see, and stays as it is: copy what is to be changed."""
        return pull_many(self, tensors)

    @staticmethod
    def _real(handle: Handle) -> Any:
        assert handle.real is not None
        return handle.real

    def shards(
        self, num_samples: int, shard_size: int, epochs: int = 1, *, name: str = "train",
        shuffle_seed: int | None = None,
    ) -> GroupShards:  # fmt: skip
        """As `Client.shards`: a shard is what one step of the group trains, and each rank gets its part of it.
        InputError if a shard would leave a rank without any sample."""
        checked_spec(num_samples, shard_size, epochs, shuffle_seed)
        size, last = self.size, num_samples % shard_size or shard_size
        if min(shard_size, last) < size:
            raise InputError(
                f"shards of {shard_size} of {num_samples} samples, the last one of {last}, leave some of {size} ranks "
                "without any: choose another shard_size"
            )
        real: list[Any] = [None]

        def opened() -> None:
            assert self.client is not None
            real[0] = self.client.shards(num_samples, shard_size, epochs, name=name, shuffle_seed=shuffle_seed)

        self.together(f"shards {name!r}", opened)
        return GroupShards(self.links, real[0], lambda: self._pushes)

    # -- the worker

    def resume(self) -> Resume:
        """As `Client.resume`, the same at every rank."""

        def resumed(client: Client) -> list[int]:
            at = client.resume()
            return [at.clock, at.trained, at.begun, at.steps, at.predecessor]

        clock, trained, begun, steps, predecessor = self.at_rank_0("resume", resumed).tolist()
        self._clocks = clock, clock
        return Resume(clock, trained, begun, steps, bool(predecessor))

    def flush(self, timeout: float | None = None) -> None:
        """Waits until every step pushed so far is committed, as `Client.flush`; every rank calls it."""

        def flushed(client: Client) -> Words:
            client.flush(timeout)
            return self.clocks()

        self.hear(self.at_rank_0("flush", flushed))

    def clocks(self) -> Words:
        """At rank 0: the client's clock and committed clock, int64 [2], for the other ranks."""
        assert self.client is not None
        return np.array([self.client.clock, self.client.committed], np.int64)

    def _heard_push(self, words: Words) -> None:
        self.hear(words[:2])
        self._summing.room = int(words[2])

    def hear(self, words: Words) -> None:
        """Takes the clocks that rank 0's `clocks` returned."""
        clock, committed = words.tolist()
        self._clocks = clock, committed

    @contextmanager
    def alone(self) -> Iterator[Client]:
        """At rank 0: what is pulled, loaded or deleted inside goes to the servers at once and has no part of the other
        ranks, who wait with their next call. For evaluation, `elasticps.torch.save` and `load`. ConfigError elsewhere,
        and for a push inside."""
        if self.client is None:
            raise ConfigError(f"alone() is for rank 0, which has the client, and this is rank {self.rank}")
        before, self.is_alone = self.is_alone, True
        try:
            yield self.client
        finally:
            self.is_alone = before

    def _refuse_alone(self, what: str) -> None:
        if self.is_alone:
            raise ConfigError(f"a {what} is one of all ranks: not inside alone()")

    def close(self) -> None:
        """Leaves the group, and at rank 0 the cluster, as `Client.close`. The other ranks get `GroupLost` if they go
        on."""
        if self._closed:
            return
        self._closed = True
        self.links.close()
        if self.client is not None:
            self.client.close()

    def __enter__(self) -> GroupClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None and not self._closed:
                self.flush()
        finally:
            self.close()
