"""What a reader behind a relay has in place of a cluster's registry: a view of one server, the relay."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from coordinator.core.view import ServerInfo, View
from elasticps.client.registrations import Registration
from elasticps.client.runtime import Runtime
from elasticps.errors import ConfigError, Error
from elasticps.model.key_share import KeyShare
from elasticps.model.spec import TableSpec
from elasticps.readers.peers import parse_relay
from elasticps.readers.remote import RemoteReader


class RelayRegistry:
    """The relay at `address`. A relay that was started again is another server in the next view, and all of its ranges
    have begun anew."""

    authenticated = False  # a relay speaks of no views but its own

    def __init__(self, url: str, app: str, runtime: Runtime, timeout_s: float) -> None:
        """Raises ConfigError, ClusterUnreachable."""
        self.runtime = runtime
        self._timeout_s = timeout_s
        self._address, self.credentials = parse_relay(url, app)
        self._incarnation, self._epoch = 0, 0
        self._remote = RemoteReader(self._address, timeout=timeout_s, credentials=self.credentials)

    @property
    def cluster(self) -> str:
        """The cluster's name."""
        return str(self._remote.welcome["cluster"])

    def first_view(self, timeout_s: float) -> View:
        """The view of the relay as it is now."""
        self._remote.refresh()
        found = self._remote.welcome
        ranges, incarnation = int(found["ranges"]), int(found["incarnation"])
        if incarnation != self._incarnation:
            self._incarnation, self._epoch = incarnation, self._epoch + 1
        one, nobody = np.zeros((ranges, 1), np.int32), np.full(ranges, -1, np.int32)
        epochs = np.full(ranges, self._epoch, np.int64)
        server = ServerInfo("relay", incarnation, self._address)
        return View(
            str(found["identity"]), self._epoch, ranges, 1, (server,), one, nobody, epochs, "relay",
            recovery_epoch=epochs,
        )  # fmt: skip

    def check_dtype(self, dtype: str | None) -> None:
        """ConfigError unless rows are kept there in this type: a relay sends them as they are."""
        theirs = self._remote.welcome["dtype"]
        if theirs != dtype:
            self.close()
            raise ConfigError(
                f"the relay at {self._address} keeps rows as dtype={theirs!r}, not {dtype!r}: ask for the same"
            )

    def check_share(self, share: KeyShare) -> None:
        """ConfigError unless the relay has all rows of a share."""
        theirs = KeyShare.parse(str(self._remote.welcome["share"]))
        if not theirs.includes(share):
            self.close()
            raise ConfigError(
                f"the relay at {self._address} has share {theirs} of all keys, and not {share}: follow the servers, or "
                "a relay that has all"
            )

    def ask_view(self, on_view: Callable[[View | None], None]) -> None:
        """Asks the relay who it is now, in a thread of its own."""

        def ask() -> None:
            try:
                view = self.first_view(self._timeout_s)
            except Error:
                view = None
            on_view(view)

        self.runtime.spawn("elasticps-view", ask)

    def tables(self, app: str, timeout_s: float) -> dict[str, Registration]:
        """The tables that the relay has, by name."""
        found = self._remote.welcome["tables"]
        specs = [(int(number), TableSpec.from_json(text)) for number, text in found]
        return {spec.name: Registration(number, spec, 0, "", True, 0) for number, spec in specs}

    def close(self) -> None:
        """Ends it."""
        self._remote.close()
