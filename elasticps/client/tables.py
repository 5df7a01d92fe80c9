"""Tables and tensors as a training loop holds them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from elasticps.client.inputs import checked_floats, checked_keys, checked_out, checked_read
from elasticps.client.protocol.routing import PushPlan, Routes, plan_push
from elasticps.client.pulls import DenseRead, SparseRead
from elasticps.client.push_batch import Source
from elasticps.client.writes import LentRows, Write
from elasticps.errors import InputError
from elasticps.hashing import table_salt
from elasticps.spec import TableSpec

if TYPE_CHECKING:
    from elasticps.client.client import Client


class _Handle:
    def __init__(self, client: Client, spec: TableSpec, table_id: int, own: TableSpec) -> None:
        self._client = client
        self.spec = spec
        self.id = table_id
        self.salt = table_salt(table_id)
        self._signed_salt = int(self.salt.view(np.int64))
        self.optimizer = own.optimizer  # the caller's own: a schedule is no part of the registered spec

    @property
    def name(self) -> str:
        return self.spec.name

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} of cluster {self._client.cluster!r}>"


class SparseTable(_Handle):
    """int64 key -> row of `dim` floats. A key never pushed has its initial value."""

    def __init__(self, client: Client, spec: TableSpec, table_id: int, own: TableSpec) -> None:
        super().__init__(client, spec, table_id, own)
        self._grads = f"table {self.name!r}: grads"

    @property
    def dim(self) -> int:
        return self.spec.dim

    def pull(self, keys: object, out: NDArray[np.float32] | None = None, *, read: str = "tail") -> NDArray[np.float32]:
        """Rows of `keys`, int64 [n], as float32 [n, dim] in the order of the keys; into `out` if given.

        `read="tail"` gives committed values. `read="any"` spreads the load over all replicas, and may show values that
        are not committed yet; one's own pushes are always seen. Raises `InputError` for unusable arguments, `Timeout`
        when servers do not answer in time.
        """
        pulled = self.pull_async(keys, out, read=read)
        return self._client.pulled(pulled)

    def pull_async(self, keys: object, out: NDArray[np.float32] | None = None, *, read: str = "tail") -> SparseRead:
        """Asks for rows now; `result()` of what is returned waits for them."""
        checked_read(f"table {self.name!r}", read)
        array = checked_keys(self.name, keys)
        shape = (len(array), self.dim)
        rows = np.empty(shape, np.float32) if out is None else checked_out(f"table {self.name!r}", out, shape)
        private = array if isinstance(keys, list | tuple) else array.copy()  # asked for again when servers change
        return self._client.start_read(SparseRead(self._client, self.id, self.salt, self.name, private, rows, read))

    def source(self, value: object, step_values: NDArray[np.float32]) -> Source:
        """What pushing `value`, a pair (keys int64 [n], grads float32 [n, dim]), sends."""
        if not isinstance(value, tuple) or len(value) != 2:
            raise InputError(f"table {self.name!r}: push a pair (keys, grads), got {type(value).__name__}")
        keys = checked_keys(self.name, value[0])
        grads = checked_floats(self._grads, value[1], (len(keys), self.spec.dim))
        return Source(self.id, self._signed_salt, self.spec.dim, -1, keys, grads, step_values)


class DenseTensor(_Handle):
    """A float32 tensor on the servers, cut into blocks that are spread over all of them."""

    def __init__(self, client: Client, spec: TableSpec, table_id: int, own: TableSpec) -> None:
        super().__init__(client, spec, table_id, own)
        self._blocks = np.arange(spec.blocks, dtype=np.int64)
        self._size = math.prod(self.shape)
        self._grads = f"tensor {self.name!r}"
        self._planned: tuple[int, PushPlan] | None = None  # the plan depends on the view only

    @property
    def shape(self) -> tuple[int, ...]:
        assert self.spec.shape is not None
        return self.spec.shape

    def pull(self, out: NDArray[np.float32] | None = None, *, read: str = "tail") -> NDArray[np.float32]:
        """The tensor, float32 of its shape; into `out` if given, which spares the allocation. `read` and errors as for
        `SparseTable.pull`."""
        pulled = self.pull_async(out, read=read)
        return self._client.pulled(pulled)

    def pull_async(self, out: NDArray[np.float32] | None = None, *, read: str = "tail") -> DenseRead:
        """Asks for the tensor now; `result()` of what is returned waits for it."""
        return self._client.start_read(self.prepare(out, read))

    def prepare(self, out: NDArray[np.float32] | None, read: str) -> DenseRead:
        """A read that nobody has been asked for yet."""
        checked_read(f"tensor {self.name!r}", read)
        if out is None:
            out = np.empty(self.shape, np.float32)
        else:
            checked_out(f"tensor {self.name!r}", out, self.shape)
        dim, blocks = self.spec.dim, self.spec.blocks
        return DenseRead(self._client, self.id, self.salt, dim, self.name, out, blocks, read)

    def source(self, value: object, step_values: NDArray[np.float32]) -> Source:
        """What pushing `value`, a gradient float32 of the tensor's shape, sends."""
        flat = self._flat(value)
        return Source(self.id, self._signed_salt, self.spec.dim, len(flat), self._blocks, flat, step_values)

    def lent(self, value: object, routes: Routes, step_values: NDArray[np.float32]) -> Write:
        """The same from the caller's memory: a gradient, or initial values."""
        plan = self._plan(routes)
        return Write(self.id, LentRows(self._flat(value), self.spec.dim, plan), plan.offsets, step_values)

    def _flat(self, value: object) -> NDArray[np.float32]:
        return checked_floats(self._grads, value, self.shape).reshape(self._size)

    def _plan(self, routes: Routes) -> PushPlan:
        if self._planned is None or self._planned[0] != routes.epoch:
            self._planned = routes.epoch, plan_push(self._blocks, self.salt, routes)
        return self._planned[1]


Handle = SparseTable | DenseTensor
