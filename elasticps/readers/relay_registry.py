"""What a reader behind relays has in place of a cluster's registry: a view of one server, the relay that it follows."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np

from coordinator.core.view import ServerInfo, View
from elasticps.client.registrations import Registration
from elasticps.client.runtime import Runtime
from elasticps.errors import Closed, ClusterUnreachable, ConfigError, Error
from elasticps.model.key_share import KeyShare
from elasticps.model.spec import TableSpec
from elasticps.readers.core.absent_tables import AbsentTables
from elasticps.readers.core.relay_choice import RelayState, choose, is_stale
from elasticps.readers.peers import parse_relay
from elasticps.readers.remote import RemoteReader
from elasticps.readers.values import MOST_EVERY_S, ReaderSpec
from elasticps.wire.frames import FrameError, whole

log = logging.getLogger(__name__)

TRY_S = 2.0  # for one of several relays to answer, then the next one is tried


class RelayRegistry:
    """The relays that a URL names, one of which is followed: as long as it answers, then the next that does; or until
    its state is old and another one has a newer state (`core.relay_choice`). Another relay, or one that was started
    again, is another server in the next view, and all of its ranges have begun anew: what the reader has is compared
    with them."""

    authenticated = False  # a relay speaks of no views but its own

    def __init__(self, url: str, spec: ReaderSpec, runtime: Runtime, timeout_s: float) -> None:
        """Raises ConfigError, ClusterUnreachable."""
        self.runtime = runtime
        self._spec = spec
        self._timeout_s = timeout_s
        self._addresses, self.credentials = parse_relay(url, spec.application)
        self.several = len(self._addresses) > 1  # there are others to go to
        self._at = 0  # which is followed
        self._server: ServerInfo | None = None  # that one, of the newest view
        self._epoch = 0
        self._closed = False
        self._welcome: dict[str, Any] = {}  # what it said of itself
        self.absent = AbsentTables()  # that a relay does not name: the first window names all that it has
        self._find(timeout_s, first=True)

    @property
    def cluster(self) -> str:
        """The cluster's name."""
        return str(self._welcome["cluster"])

    def first_view(self, timeout_s: float) -> View:
        """The view of a relay that answers now, the one that is followed if it does."""
        self._find(timeout_s, first=False)
        found, ranges = self._welcome, int(self._welcome["ranges"])
        server = ServerInfo(f"relay-{self._at + 1}", int(found["incarnation"]), self._addresses[self._at])
        if server != self._server:
            self._server, self._epoch = server, self._epoch + 1
        one, nobody = np.zeros((ranges, 1), np.int32), np.full(ranges, -1, np.int32)
        epochs = np.full(ranges, self._epoch, np.int64)
        return View(
            str(found["identity"]), self._epoch, ranges, 1, (server,), one, nobody, epochs, "relay",
            recovery_epoch=epochs,
        )  # fmt: skip

    def _find(self, timeout_s: float, *, first: bool) -> None:
        """Asks relays in turn until one answers that can be followed, from the present one on, and has a new state; if
        all states are old, takes the one that `choose` says. first: the first one that answers and cannot be followed
        is an error; later the next one is tried."""
        count, until_s = len(self._addresses), self.runtime.monotonic() + timeout_s
        try_s = timeout_s if count == 1 else min(TRY_S, timeout_s)
        while True:
            errors, states, welcomes = list[Error](), list[RelayState](), dict[int, dict[str, Any]]()
            for at in ((self._at + i) % count for i in range(count)):
                if self._closed:
                    raise Closed("the reader is closed")
                known = self._welcome or next(iter(welcomes.values()), {})
                try:
                    welcomes[at] = self._ask(self._addresses[at], try_s, known)
                except Error as error:
                    if first and not states and not isinstance(error, ClusterUnreachable):
                        raise
                    log.debug("the relay at %s cannot be followed: %s", self._addresses[at], error)
                    errors.append(error)
                    continue
                states.append(RelayState(at, welcomes[at]["oldest_us"], welcomes[at]["every_ms"] / 1e3))
                if not is_stale(self.runtime.wall(), *states[-1][1:]):
                    break
            if states:
                self._take(choose(states).place, welcomes)
                return
            if self.runtime.monotonic() >= until_s or count == 1:
                raise errors[0] if count == 1 else ClusterUnreachable("; ".join(map(str, errors)))

    def _take(self, at: int, welcomes: dict[int, dict[str, Any]]) -> None:
        """Follows that relay from now on. welcomes: of those that answered, by place."""
        if at != self._at and self._at in welcomes:
            newer_s = (welcomes[at]["oldest_us"] - welcomes[self._at]["oldest_us"]) / 1e6
            log.info(
                "the state of the relay at %s is %.0f s older than that of the one at %s, which is followed now",
                self._addresses[self._at], newer_s, self._addresses[at],
            )  # fmt: skip
        self._welcome, self._at = welcomes[at], at

    def _ask(self, address: str, timeout_s: float, known: dict[str, Any]) -> dict[str, Any]:
        """What the relay there says of itself. known: what another one has said. Raises ConfigError for one that cannot
        feed this reader."""
        with RemoteReader(address, timeout=timeout_s, credentials=self.credentials) as remote:
            found = remote.welcome
        where, theirs, spec = f"the relay at {address}", KeyShare.parse(str(found["share"])), self._spec
        if found.get("app", spec.application) != spec.application:
            raise ConfigError(
                f"{where} has tables of application {found['app']!r}, and this reader is to have those of "
                f"{spec.application!r}: give both the same (--app of `elasticps reader`, application= of eps.reader)"
            )
        if found["dtype"] != spec.dtype:
            theirs_as, ours_as = (
                f"as {dtype}" if dtype else "as the tables have them" for dtype in (found["dtype"], spec.dtype)
            )
            raise ConfigError(
                f"{where} keeps rows {theirs_as}, and this reader is to keep them {ours_as}: give both the same dtype "
                "(--dtype of `elasticps reader`, dtype= of eps.reader)"
            )
        if not theirs.includes(spec.share):
            raise ConfigError(
                f"{where} has share {theirs} of all keys, and not {spec.share}: follow the servers, or a relay that "
                "has all"
            )
        try:
            whole(found.get("oldest_us"), 1 << 62)
            whole(found.get("every_ms"), round(1e3 * MOST_EVERY_S))
        except FrameError as error:
            raise ConfigError(f"{where} does not say how old its rows are: {error}") from None
        if known and found["identity"] != known["identity"]:
            raise ConfigError(f"{where} is of cluster {found['identity']!r}, not {known['identity']!r}")
        return found

    def ask_view(self, on_view: Callable[[View | None], None]) -> None:
        """Asks the relays who answers now, in a thread of its own."""

        def ask() -> None:
            try:
                view = self.first_view(self._timeout_s)
            except Error as error:
                if not self._closed:
                    log.warning("no relay can be followed: %s", error)
                view = None
            on_view(view)

        self.runtime.spawn("elasticps-view", ask)

    def tables(self, app: str, timeout_s: float) -> dict[str, Registration]:
        """The tables that the relay has, by name."""
        specs = [(int(number), TableSpec.from_json(text)) for number, text in self._welcome["tables"]]
        return {spec.name: Registration(number, spec, 0, "", True, 0) for number, spec in specs}

    def applications(self, timeout_s: float) -> set[str]:
        """The applications that have tables there: the relay has one, and may have none of its tables yet."""
        return {self._spec.application} if self._welcome["tables"] else set()

    def close(self) -> None:
        """Ends it."""
        self._closed = True
