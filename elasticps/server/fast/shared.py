"""The arrays that compiled code and Python share, found by the field of the header that holds their address."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from elasticps.server.fast import layout as at


class Shared:
    """h: the header, int64 [H_FIELDS]. fields: the same memory; one field is read and written faster so."""

    def __init__(self) -> None:
        self.h = np.zeros(at.H_FIELDS, np.int64)
        self.fields = memoryview(cast(Any, self.h))
        self._arrays: dict[int, NDArray[Any]] = {}  # only their addresses in the header refer to some of them

    def __getitem__(self, field: int) -> NDArray[Any]:
        return self._arrays[field]

    def make(self, field: int, shape: int | tuple[int, ...], dtype: type = np.int64) -> NDArray[Any]:
        """Zeros whose address the header gets."""
        return self.share(field, np.zeros(shape, dtype))

    def share(self, field: int, array: NDArray[Any]) -> NDArray[Any]:
        """Has the header point to an array."""
        self._arrays[field] = array
        self.fields[field] = array.ctypes.data
        return array
