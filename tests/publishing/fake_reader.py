"""A reader without a cluster: tables as dictionaries, whose changes go to listeners at once."""

from __future__ import annotations

import threading
import time

import numpy as np

from elasticps.model.spec import Assign, TableSpec
from elasticps.readers.values import AppliedWindow, AsOf, Listener, TableChange

DIM = 3


def row(value: float) -> list[float]:
    return [value, -value, value / 2]


class FakeReader:
    """Has the methods that a publisher asks of a reader."""

    cluster = "fake"

    def __init__(self) -> None:
        self.tables: dict[str, dict[int, float]] = {}
        self.closed = False
        self._lock = threading.RLock()
        self._listeners: list[Listener] = []
        self._step = 0

    @property
    def age(self) -> float:
        return 0.0

    @property
    def as_of(self) -> AsOf:
        return AsOf(time.time(), 1, np.zeros(2, np.int64), {1: np.full(2, self._step)})

    def check(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True

    def subscribe(self, listener: Listener) -> None:
        with self._lock:
            parts = [self._change(name, dict([each]), new=i == 0)
                     for name, rows in self.tables.items() for i, each in enumerate(rows.items())]  # fmt: skip
            parts += [self._change(name, {}, new=True) for name, rows in self.tables.items() if not rows]
            windows = [AppliedWindow([part], self.as_of, True, i == len(parts) - 1) for i, part in enumerate(parts)]
            for window in windows or [AppliedWindow([], self.as_of, True, True)]:
                listener(window)
            self._listeners.append(listener)

    def unsubscribe(self, listener: Listener) -> None:
        with self._lock:
            self._listeners.remove(listener)

    def push(self, table: str, rows: dict[int, float], deleted: tuple[int, ...] = ()) -> None:
        new = table not in self.tables
        for key in deleted:
            self.tables[table].pop(key, None)
        self.tables.setdefault(table, {}).update(rows)
        self._tell(self._change(table, rows, deleted, new=new))

    def drop(self, table: str) -> None:
        del self.tables[table]
        self._tell(self._change(table, {}, dropped=True))

    def _tell(self, change: TableChange) -> None:
        with self._lock:
            self._step += 1
            for listener in list(self._listeners):
                listener(AppliedWindow([change], self.as_of))

    def _change(
        self, table: str, rows: dict[int, float], deleted: tuple[int, ...] = (), new: bool = False,
        dropped: bool = False,
    ) -> TableChange:  # fmt: skip
        keys = np.array(sorted(rows), np.int64)
        values = np.array([row(rows[key]) for key in keys.tolist()], np.float32).reshape(-1, DIM)
        spec = TableSpec(table, DIM, Assign())
        return TableChange(table, spec, new, dropped, np.array(sorted(deleted), np.int64), keys, values)

    def expected(self) -> dict[str, dict[int, list[float]]]:
        return {name: {key: row(value) for key, value in rows.items()} for name, rows in self.tables.items()}
