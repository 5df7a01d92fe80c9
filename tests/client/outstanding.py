"""A step as filters see it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class Outstanding:
    """Not committed yet, until `end`."""

    def __init__(self) -> None:
        self.done = False
        self._refused: list[int] = []

    def refused_of(self, table: int) -> NDArray[np.int64]:
        """Keys of a table's rows that were refused."""
        assert table == 7
        return np.array(self._refused, np.int64)

    def end(self, refused: list[int]) -> None:
        """It is committed, but for these rows."""
        self.done, self._refused = True, refused
