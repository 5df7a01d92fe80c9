"""A step as filters see it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from elasticps.errors import ServerFull


class Outstanding:
    """Not committed yet, until `end`."""

    def __init__(self) -> None:
        self.done = False
        self._refused: list[int] = []
        self._full: list[int] = []

    def refused_of(self, table: int, why: type[Exception] = Exception) -> NDArray[np.int64]:
        """Keys of a table's rows that were refused with an error of a kind."""
        assert table == 7
        return np.array(self._full if issubclass(why, ServerFull) else self._refused, np.int64)

    def end(self, refused: list[int], full: Sequence[int] = ()) -> None:
        """The step is committed without these rows. full: the rows that servers had no memory for."""
        self.done, self._refused, self._full = True, [*refused, *full], [*full]
