"""A reader: rows of a cluster's tables in this process, kept as new as its servers send them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from elasticps.model.spec import TableSpec
from elasticps.readers.values import AsOf, Listener, ReaderSpec, ReaderStats

Rows = NDArray[np.float32]


class Reader:
    """Rows in local memory that follow training. Made by `reader`; threads may share it, and it is a context manager.

    Without `hold` each row is the newest committed one that has come.
    """

    @property
    def cluster(self) -> str:
        """The cluster's name."""
        raise NotImplementedError("readers are being built")

    @property
    def spec(self) -> ReaderSpec:
        """What it follows."""
        raise NotImplementedError("readers are being built")

    @property
    def tables(self) -> dict[str, TableSpec]:
        """The tables that are here, by name."""
        raise NotImplementedError("readers are being built")

    @property
    def age(self) -> float:
        """Seconds since the state that the oldest range shows was read at its server; infinite before the first."""
        raise NotImplementedError("readers are being built")

    @property
    def as_of(self) -> AsOf:
        """How far it has come: vector clock, positions and time of what is shown."""
        raise NotImplementedError("readers are being built")

    def pull(self, keys: Mapping[str, object]) -> dict[str, Rows]:
        """Rows of several tables, {table: keys int64 [n]}: of each float32 [n, dim] in the order of its keys, from this
        process's memory. Keys without a row read as the servers compute them. `keys` of None: all of a tensor, in its
        shape. Raises `UnknownTable`; `Closed` when the reader is."""
        raise NotImplementedError("readers are being built")

    def hold(self, timeout: float = 10.0) -> AsOf:
        """From now on pulls show one moment: for every worker the same steps in all ranges, until `release`. Windows
        are kept meanwhile. `Timeout` says how far ranges are apart if there is no such moment in time."""
        raise NotImplementedError("readers are being built")

    def release(self) -> None:
        """Goes on with the newest; no effect unless it holds."""
        raise NotImplementedError("readers are being built")

    def wait(self, timeout: float = 30.0) -> None:
        """Waits until every range has been read once. `reader` has done so. Raises `Timeout`."""
        raise NotImplementedError("readers are being built")

    def subscribe(self, listener: Listener) -> None:
        """Calls `listener` with all rows that are here, in parts (`listing`), and from then on with each window as it is
        applied: in order, from the reader's thread, which waits for it. A listener that raises gets no more, and `check`
        raises what it raised."""
        raise NotImplementedError("readers are being built")

    def unsubscribe(self, listener: Listener) -> None:
        """Calls it no more; when this returns it is not being called."""
        raise NotImplementedError("readers are being built")

    def check(self) -> None:
        """Raises what has ended the reader, or a listener, if anything has."""
        raise NotImplementedError("readers are being built")

    def stats(self) -> ReaderStats:
        """What it has, and has done."""
        raise NotImplementedError("readers are being built")

    def close(self) -> None:
        """Ends it; what it had can be read no more."""
        raise NotImplementedError("readers are being built")

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def reader(
    url: str | None = None,
    tables: Sequence[str] | None = None,
    *,
    dtype: str | None = None,
    every: float = 0.02,
    application: str = "default",
    name: str = "",
    timeout: float = 30.0,
    buffer_bytes: int = 256 << 20,
) -> Reader:
    """Connects a reader, and returns when it has read every range once.

    `url` is as for `connect`, its TLS options among them (a certificate of role `reader`, worker or operator). `tables`:
    names, None for all of the application. `name`: by which servers log it. All else as in `ReaderSpec`.

    Raises `ConfigError` for unusable arguments, `UnknownTable` for a table that there is not, `ClusterUnreachable` or
    `Timeout`, saying what was tried.
    """
    ReaderSpec(None if tables is None else tuple(tables), dtype, every, application, buffer_bytes)
    raise NotImplementedError("readers are being built")
