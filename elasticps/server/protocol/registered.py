"""Which tables there are, as the coordination store has them: one spec for each id. Heads that make a table each for
itself thereby make the same one, whatever they are told. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from elasticps.errors import SpecError
from elasticps.spec import TableSpec


class Registered:
    """need: somebody speaks of a table that is not known here, read them again. wanted: somebody has, since they were
    read. A server that was never told what is registered takes tables as they come."""

    def __init__(self, need: Callable[[], None]) -> None:
        self.wanted = False
        self._need = need
        self._specs: Mapping[int, TableSpec] | None = None

    def follow(self, specs: Mapping[int, TableSpec]) -> None:
        """These are registered, by id."""
        self._specs, self.wanted = specs, False

    def lacks(self, number: int) -> bool:
        """Whether a table is to be waited for. They are read again then."""
        missing = self._specs is not None and number not in self._specs
        if missing:
            self.wanted = True
            self._need()
        return missing

    def check(self, number: int, spec: TableSpec) -> None:
        """Raises SpecError if the table is registered with another spec."""
        if self._specs is not None and (difference := spec.difference(self._specs[number])):
            raise SpecError(f"table {self._specs[number].name!r} (id {number}) is registered otherwise: {difference}")
