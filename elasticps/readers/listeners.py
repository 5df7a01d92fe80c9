"""Who gets each window that a reader applies."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from elasticps.client.runtime import Lock, Runtime
from elasticps.readers.values import AppliedWindow, AsOf, Listener, TableChange


class Listeners:
    """Listeners of one reader. Windows are noted under its lock and told without it, by one thread, in order."""

    def __init__(self, runtime: Runtime, lock: Lock) -> None:
        self._lock = lock  # of the reader
        self._telling = runtime.rlock()  # while listeners are called
        self._all: list[Listener] = []  # who gets windows
        self._new: list[Listener] = []  # who gets a listing first
        self._windows: list[AppliedWindow] = []  # to be told
        self._error: Exception | None = None  # what a listener has raised

    def __bool__(self) -> bool:
        return bool(self._all)

    def add(self, listener: Listener) -> None:
        """Has it get a listing at the next opportunity, then all windows."""
        with self._lock:
            self._new.append(listener)

    def remove(self, listener: Listener) -> None:
        """It gets nothing any more."""
        with self._telling, self._lock:
            self._all = [one for one in self._all if one is not listener]
            self._new = [one for one in self._new if one is not listener]

    def check(self) -> None:
        """Raises what a listener has raised, once."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def note(self, changes: Sequence[TableChange], as_of: AsOf) -> None:
        """A window was applied; under the reader's lock."""
        self._windows.append(AppliedWindow(changes, as_of))

    def tell(self, listing: Callable[[], tuple[list[Callable[[], TableChange]], AsOf]]) -> None:
        """Calls them with what was noted. listing: all rows as they are, for new ones, in parts that are made one by
        one; called under the reader's lock."""
        if not (self._windows or self._new):
            return
        with self._telling:
            with self._lock:
                windows, self._windows = self._windows, []
                new, self._new = self._new, []
                before = list(self._all)
                self._all += new
                rows, as_of = listing() if new else ([], None)
            for window in windows:
                for listener in before:
                    self._call(listener, window)
            for i, part in enumerate(rows):
                assert as_of is not None
                listed = AppliedWindow([part()], as_of, True, i == len(rows) - 1)
                for listener in new:
                    self._call(listener, listed)
            for listener in new if not rows else ():
                assert as_of is not None
                self._call(listener, AppliedWindow([], as_of, True, True))

    def _call(self, listener: Listener, window: AppliedWindow) -> None:
        if listener not in self._all:
            return
        try:
            listener(window)
        except Exception as error:
            self._error = self._error or error
            self._all = [one for one in self._all if one is not listener]
