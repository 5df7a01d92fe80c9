"""The error that a failed check raises."""

from __future__ import annotations


class Violation(AssertionError):
    """An invariant does not hold: its name, and where."""

    def __init__(self, invariant: str, text: str) -> None:
        super().__init__(f"{invariant}: {text}")
        self.invariant = invariant
