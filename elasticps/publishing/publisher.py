"""Publishes what a reader follows: its windows, and all of its rows again whenever that is needed."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from coordinator.core import fields
from elasticps.errors import Closed, ConfigError, Timeout
from elasticps.model.key_share import KeyShare
from elasticps.publishing.core.batches import PendingChanges, PublishBatch
from elasticps.publishing.core.layout import DTYPES
from elasticps.publishing.core.refusals import Refusals
from elasticps.publishing.opening import target_of
from elasticps.publishing.targets import DEFAULT_PREFIX, PublishedSource, PublishError, PublishTarget, shown

if TYPE_CHECKING:
    from elasticps.readers.values import AppliedWindow, AsOf, Listener

log = fields.logger(__name__)

MOST_PENDING_BYTES = 64 << 20
FIRST_RETRY_S, MOST_RETRY_S = 0.1, 10.0
PACES_S = {"redis": 0.0, "rediss": 0.0, "unix": 0.0, "file": 1.0}  # from one batch to the next, by kind of target
WINDOWS_S = 0.02  # from one window of the reader to the next, at most


class FollowedReader(Protocol):
    """What is asked of a reader."""

    @property
    def age(self) -> float: ...
    @property
    def as_of(self) -> AsOf: ...
    def subscribe(self, listener: Listener) -> None: ...
    def unsubscribe(self, listener: Listener) -> None: ...
    def check(self) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class PublisherStats:
    """What a publisher has done. lag_s: how old is what the target shows, infinite before it has all rows once;
    pending_bytes: of changes that wait for the target; batches, rows, deletions: written; listings: times that all rows
    were written; retries: times that the target did not take something."""

    lag_s: float
    pending_bytes: int
    batches: int
    rows: int
    deletions: int
    listings: int
    retries: int


class Publisher:
    """A running publisher: one thread that writes. Made by `publish`; a context manager.

    The reader waits while too much is pending, and servers wait for the reader: memory stays bounded.
    """

    def __init__(self, reader: FollowedReader, target: PublishTarget, where: str) -> None:
        self.where = where  # the target, as it may be shown
        self._reader = reader
        self._target = target
        self._changed = threading.Condition()  # of what follows
        self._pending = PendingChanges()
        self._closing = False
        self._error: BaseException | None = None  # what has ended it
        self._refusals = Refusals(time.monotonic())  # of the target
        self._shown_s = 0.0  # the time whose state the target shows; 0: none yet
        self._counts = dict.fromkeys(("batches", "rows", "deletions", "listings", "retries"), 0)
        self._thread = threading.Thread(target=self._run, name="elasticps-publish", daemon=True)
        self._thread.start()

    def stats(self) -> PublisherStats:
        """What it has done, and how far it is behind."""
        with self._changed:
            lag_s = max(0.0, time.time() - self._shown_s) if self._shown_s else float("inf")
            return PublisherStats(lag_s, self._pending.nbytes, **self._counts)

    def wait(self, timeout: float = 60.0, refused: float = float("inf")) -> None:
        """Waits until the target has all rows: at most `timeout` seconds, and at most `refused` seconds while the
        target takes none. Raises `Timeout`, or what has ended the publisher."""
        deadline_s = time.monotonic() + timeout
        with self._changed:
            while not self._counts["listings"]:
                self._check()
                now_s, reason = time.monotonic(), self._refusals.reason
                left_s, without_s = deadline_s - now_s, self._refusals.seconds(now_s)
                if left_s <= 0 or without_s >= refused:
                    after_s = timeout if left_s <= 0 else without_s
                    why = (
                        f": {reason.rstrip('.')}; see that it runs, can be reached and has room, or name another"
                        if reason
                        else ""
                    )
                    raise Timeout(f"{self.where} has not got all rows after {after_s:.1f} s{why}")
                self._changed.wait(min(left_s, 1.0, max(refused - without_s, 0.01)))

    def check(self) -> None:
        """Raises what has ended the publisher, if anything has."""
        with self._changed:
            self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closing:
            raise Closed("the publisher is closed")

    def close(self) -> None:
        """Ends it, and the reader. What is pending is not written: the next publisher writes it."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        self._reader.close()
        self._target.close()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- the thread that writes -------------------------------------------------------------------------------------

    def _run(self) -> None:
        retry_s = FIRST_RETRY_S
        try:
            while not self._closing:
                listings = self._counts["listings"]
                try:
                    self._publish()
                except PublishError as error:
                    self._counts["retries"] += 1
                    if self._counts["listings"] > listings:  # it worked for a while
                        retry_s = FIRST_RETRY_S
                    self._refuse(str(error))
                    self._pause(retry_s)
                    retry_s = min(2 * retry_s, MOST_RETRY_S)
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _refuse(self, reason: str) -> None:
        """Notes that the target does not take rows, and says so."""
        with self._changed:
            if self._refusals.note(time.monotonic(), reason):
                log.warning("the target takes no rows, and is tried again", where=self.where, reason=reason)
            self._changed.notify_all()

    def _pause(self, seconds: float) -> None:
        deadline_s = time.monotonic() + seconds
        with self._changed:
            while not self._closing and (left_s := deadline_s - time.monotonic()) > 0:
                self._changed.wait(min(left_s, 1.0))

    def _publish(self) -> None:
        """A listing, and what comes after it, until the next listing is wanted. Raises PublishError."""
        self._target.open()
        subscription = _Subscription(self)
        with self._changed:
            self._pending = PendingChanges()
        self._reader.subscribe(subscription.add)
        try:
            while not self._closing:
                batch = self._next_batch()
                if batch is None:
                    continue
                began_s = time.monotonic()
                self._target.write(batch)
                self._note(batch)
                if self._target.wants_listing and not batch.listing:
                    return
                if not (batch.listing or batch.complete):
                    self._pause(self._target.pace_s - (time.monotonic() - began_s))
        finally:
            subscription.end()
            self._reader.unsubscribe(subscription.add)

    def _next_batch(self) -> PublishBatch | None:
        """What is to be written, when there is something; None now and then."""
        with self._changed:
            batch = self._pending.take()
            if batch is None:
                self._changed.wait(0.25)
                batch = self._pending.take()
            if batch is not None:
                self._changed.notify_all()
        if batch is None:
            self._reader.check()
        return batch

    def _note(self, batch: PublishBatch) -> None:
        with self._changed:
            counts = self._counts
            counts["batches"] += bool(batch.tables)
            counts["rows"] += sum(len(table.keys) for table in batch.tables.values())
            counts["deletions"] += sum(len(table.deleted) for table in batch.tables.values())
            counts["listings"] += batch.complete
            if self._refusals.taken(time.monotonic(), complete=batch.complete):
                log.info("the target has all rows again", where=self.where)
            if not batch.listing:
                self._shown_s = batch.as_of.time_s
            self._changed.notify_all()

    def take(self, window: AppliedWindow, subscription: _Subscription) -> None:
        """Adds a window to what is pending, when there is room; by the reader's thread."""
        with self._changed:
            while self._pending.nbytes > MOST_PENDING_BYTES and not (self._closing or subscription.ended):
                self._changed.wait()
            if not (self._closing or subscription.ended):
                self._pending.add(window)
                self._changed.notify_all()

    def wake(self) -> None:
        """Has whoever waits look again."""
        with self._changed:
            self._changed.notify_all()


class _Subscription:
    """One subscription: a listing and the windows after it. ended: what still comes is not wanted."""

    def __init__(self, publisher: Publisher) -> None:
        self.ended = False
        self._publisher = publisher

    def add(self, window: AppliedWindow) -> None:
        """Takes a window, as a listener."""
        self._publisher.take(window, self)

    def end(self) -> None:
        """Takes no more."""
        self.ended = True
        self._publisher.wake()


def publish(
    url: str | None = None,
    *,
    to: str,
    tables: Sequence[str] | None = None,
    dtype: str = "float32",
    prefix: str = DEFAULT_PREFIX,
    every: float | None = None,
    application: str = "default",
    share: tuple[int, int] | None = None,
    name: str = "",
    timeout: float = 30.0,
) -> Publisher:
    """Publishes tables of a cluster into Redis or a folder, and keeps them as new as its servers send them.

    to: `redis://host:port/database`, `rediss://…` (TLS), or `file:///folder`. tables: names; None: all of the
    application. dtype: float32, float16 or bfloat16. prefix: of all keys in Redis. every: seconds from one batch to the
    next at least; None: as fast as Redis takes them, one second for a folder. share: as for `reader`; each share has a
    place of its own. All else as for `reader`.

    docs/reference/published.md says what is written. Returns when the rows have been read, and a thread writes them:
    `wait` waits for that. Raises as `reader`, and ConfigError for a target that cannot be.
    """
    from elasticps.readers import reader

    if dtype not in DTYPES:
        raise ConfigError(f"dtype= is one of {', '.join(DTYPES)}, got {dtype!r}")
    if every is not None and not 0.001 <= every <= 3600:
        raise ConfigError(f"every= is from 0.001 to 3600 seconds, got {every}")
    pace_s = PACES_S.get(to.partition(":")[0], 0.0) if every is None else every
    chosen = None if tables is None else frozenset(tables)
    of = KeyShare.checked(share)
    windows_s = WINDOWS_S if every is None else min(max(every / 2, 0.001), WINDOWS_S)
    source = PublishedSource("", application, chosen, "" if of.whole else str(of))
    target = target_of(to, source, dtype, prefix, pace_s)  # before anything is read: what cannot be is said at once
    followed = reader(
        url, tables, dtype=None if dtype == "float32" else dtype, every=windows_s, application=application, share=share,
        name=name, timeout=timeout,
    )  # fmt: skip
    source.cluster = followed.cluster
    return Publisher(followed, target, shown(to))
