"""Rows of a table that a worker keeps: shown again while they are young, compared with the servers' when they are not.

What the worker pushes is applied to them by the servers' own kernels, so that it sees its own steps at once. For that
it needs what the optimizer keeps of a row: known of one that was never trained, asked for of one that is wanted often.
`core/cache_index.py` says which rows there are; a store's table has their values, by entry.

Two locks: `_lock` for what is kept, which a push takes as well, with the dispatcher's; and one of each batch, for who
asks the servers, which a push never takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import cast

import numpy as np
from numpy.typing import NDArray

from elasticps.client.cache_batches import (
    NOTHING,
    CacheBatch,
    CacheCounts,
    CacheUse,
    Flags,
    Keys,
    Rows,
    SlotQuestion,
    Where,
)
from elasticps.client.core.cache_index import CacheIndex, State
from elasticps.client.filtering import summed
from elasticps.client.pull import ServerPull
from elasticps.client.pull_layouts import Query
from elasticps.client.push_batch import PushSource
from elasticps.client.reads import Reads
from elasticps.errors import Error, SpecError
from elasticps.kernels.hashing import table_salt
from elasticps.model.caching import Cache
from elasticps.model.spec import Assign, TableSpec
from elasticps.store import Table
from elasticps.store.codec import WORDS, Codec, digests

MOST_BATCHES = 256  # on their way
CHANGED_OFTEN = 0.75  # of those that were old so many had changed: rows are asked for instead of their digests
FORGETS = 0.9


class RowCache:
    """Of one table. prepare(keys, any_replica): a read of rows that nobody was asked for yet."""

    def __init__(
        self, options: Cache, spec: TableSpec, table_id: int, reads: Reads, prepare: Callable[[Keys, bool], ServerPull]
    ) -> None:
        self.options = options  # how many rows, how old
        self._reads = reads  # starts pulls, and waits for them
        self._prepare = prepare  # makes a pull
        # The table's name, id and salt.
        self._name, self._id, self._salt = spec.name, table_id, table_salt(table_id)
        self._dim = spec.dim  # floats of a row
        self._lock = reads.lock()  # of the rows here
        plain = replace(spec, push=(), pull=(), finite=False)
        bare = replace(plain, optimizer=Assign())
        try:
            # Rows by entry, and whether own pushes are applied to them.
            self._table, self.applies = Table(plain, table_id, 2), True
        except SpecError:  # an optimizer that is not registered here: what is pushed is pulled again
            self._table, self.applies = Table(bare, table_id, 2), False
        self._initial = Table(bare, table_id, 2)  # stays empty
        self._slot_floats = self._table.slot_floats  # of the optimizer's state of a row
        # Whether weights alone show that a row was trained.
        self._shows_training = spec.optimizer.shows_training and spec.dtype == "float32"
        self._push = Codec(spec.push, spec.dim)  # what push filters make of gradients
        self._compares = not Codec(spec.pull, spec.dim).code  # a rounded row has another digest
        # Which keys have an entry, and what is known of their rows.
        self.index = CacheIndex(options.rows, slots=self._slot_floats > 0)
        self._batches: dict[int, CacheBatch] = {}  # by number, those on their way
        self._slots: list[SlotQuestion] = []  # questions for optimizer state
        self._number = 0  # of the newest batch
        self._changed = np.zeros(2)  # the part of old rows that was, of late: of those wanted seldom, and often
        self._counts = CacheCounts()  # what the cache has done

    @property
    def use(self) -> CacheUse:
        """What it has done."""
        with self._lock:
            return CacheUse(self.index.used, self.index.given_up, **vars(self._counts))

    @property
    def used(self) -> tuple[int, int]:
        """Rows that pulls wanted, and of these hits. Takes no lock: whoever has the dispatcher's may ask."""
        hits = self._counts.hits
        return max(hits, self._counts.asked), hits

    # --- asking ---------------------------------------------------------------------------------------------------

    def start(self, keys: Keys, out: Rows, any_replica: bool) -> CachedPull:
        """Asks for what of keys [n] is not here; `result()` of what is returned fills out float32 [n, dim]."""
        clock = self._reads.clock()
        self.settle(ask=True)
        with self._guarded():
            inverse, values = None, out
            where, repeats = self.index.find(keys)
            if repeats:
                keys, inverse = np.unique(keys, return_inverse=True)
                where, _ = self.index.find(keys)
                values = np.empty((len(keys), self._dim), np.float32)
            batch = self._looked(keys, where, values, any_replica, clock)
        self._ask(batch)
        return CachedPull(self, batch, clock, out, inverse)

    def fetch(self, keys: Keys, steps: int) -> None:
        """Asks for what of keys [n] will not be here, or too old, when this worker has made `steps` more steps. Nobody
        waits for it; what goes wrong is left to whoever pulls."""
        clock = self._reads.clock()
        self.settle(ask=True)
        with self._guarded():
            where, repeats = self.index.find(keys)
            if repeats:
                keys = np.unique(keys)
                where, _ = self.index.find(keys)
            batch = self._looked(keys, where, None, False, clock + steps)
        self._ask(batch)

    def pull_left(self, batch: CacheBatch, left: Where, timeout: float | None) -> None:
        """Asks for rows of the keys at indices `left`, whoever else does, and waits."""
        assert batch.values is not None
        values = np.empty((len(left), self._dim), np.float32)
        given_up = True
        while given_up:  # by another thread, which was to ask for the rest of it
            clock, keys = self._reads.clock(), batch.keys[left]
            with self._guarded():
                again = self._looked(keys, self.index.find(keys)[0], values, batch.any_replica, clock, take=True)
            self._ask(again)
            self.finish(again, timeout)
            given_up = again.given_up
        batch.values[left] = values

    def _looked(
        self, keys: Keys, where: Where, values: Rows | None, any_replica: bool, clock: int, *, take: bool = False
    ) -> CacheBatch:
        """clock: at which rows are to be young enough. take: asks also for what others ask for."""
        k, counts, pulls = self.options.staleness, self._counts, values is not None
        self._number += 1
        states, often, oldest = self.index.judge(where, self._number, clock, k, loose=any_replica, take=take or not k)
        coming = np.flatnonzero(states == State.COMING)
        fetched = (states == State.ABSENT) | (pulls & (states == State.NO_ENTRY))
        compared = self._compares & (states == State.OLD) & (self._changed < CHANGED_OFTEN)[often.astype(np.int64)]
        fetched |= (states == State.OLD) & ~compared
        batch = CacheBatch(
            self._number, keys, where, values, any_replica, self._reads.begun, self._reads.lock(),
            often, np.flatnonzero(fetched), np.flatnonzero(compared), coming,
            tuple({self.index.asker(place) for place in where[coming].tolist()}),
        )  # fmt: skip
        if len(batch.compared):
            self.index.check(where[compared])
            batch.digests = digests(self._rows_at(where[compared]))
        if pulls:
            hits = np.flatnonzero(states == State.HIT)
            self._show(batch, hits)
            counts.hits += len(hits)
            counts.oldest = max(counts.oldest, oldest)
            if not take:
                counts.asked += len(keys)
                counts.whole_bytes += 4 * self._dim * len(keys)
        if len(batch.fetched) or len(batch.compared):
            self._batches[batch.number] = batch
        else:
            batch.over = True
        return batch

    def _ask(self, batch: CacheBatch) -> None:
        if batch.over:
            return
        with batch.lock:
            self._go_on(batch)
        if len(self._batches) > MOST_BATCHES:
            with suppress(Error):  # whoever waits for that is told
                self.finish(next(iter(list(self._batches.values()))), None)

    def _send(self, batch: CacheBatch) -> None:
        """Asks for what it names; under its lock."""
        if len(batch.fetched):
            batch.rows = self._prepare(batch.keys[batch.fetched], batch.any_replica)
        if len(batch.compared):
            out = np.empty((len(batch.compared), WORDS), np.float32)
            batch.check = self._read(batch.keys[batch.compared], out, batch.any_replica, digests=True)
        if self._slot_floats and len(whole := batch.fetched[batch.often[batch.fetched]]):
            slots = np.empty((len(whole), self._slot_floats), np.float32)
            batch.slots = self._read(batch.keys[whole], slots, batch.any_replica, slots=True)
        for read in batch.reads:
            self._reads.start(read, self.options.staleness)
        batch.left = True

    def _read(self, keys: Keys, out: Rows, any_replica: bool, **of: bool) -> ServerPull:
        query = Query(self._id, self._salt, out.shape[1], self._name, any_replica, **of)
        return ServerPull(self._reads.finish, query, keys, out)

    # --- answers --------------------------------------------------------------------------------------------------

    def finish(self, batch: CacheBatch, timeout: float | None) -> None:
        """Waits for what a batch asks for, and keeps it; gives it up if that takes too long."""
        try:
            self._follow(batch, timeout, self._reads.finish)
        except BaseException:
            self._abandon(batch)
            batch.error = None
            raise
        error, batch.error = batch.error, None
        if error is not None:  # told once: whoever wants the rows still asks anew
            raise error
        if self._slots:  # at once: whoever waits for a pull pushes to its rows soon
            self._settle_slots(ask=True)

    def finish_other(self, batch: CacheBatch, timeout: float | None) -> None:
        """The same for a batch that somebody else waits for, or nobody, who is told what goes wrong."""
        with suppress(Error):
            self._follow(batch, timeout, self._reads.wait)

    def _follow(
        self, batch: CacheBatch, timeout: float | None, wait: Callable[[ServerPull, float | None], None]
    ) -> None:
        while not batch.over:
            for read in batch.reads:
                wait(read, timeout)
            with batch.lock:
                with self._guarded():
                    self._keep(batch)
                self._go_on(batch)

    def settle(self, *, ask: bool) -> None:
        """Keeps what has come. ask: and asks for what that shows to be lacking; not while a push waits."""
        for batch in [batch for batch in list(self._batches.values()) if batch.come]:
            try:
                with self._guarded():
                    self._keep(batch)
                if ask and batch.lock.acquire(blocking=False):
                    try:
                        self._go_on(batch)
                    finally:
                        batch.lock.release()
            except Error as error:  # for whoever waits for it, if anybody does
                batch.error = error
                self._abandon(batch)
        if self._slots:
            self._settle_slots(ask=ask)

    def _keep(self, batch: CacheBatch) -> None:
        """Puts what has come where it belongs, once, unless it was given up meanwhile: whoever waited has gone."""
        if batch.over or not batch.come:
            return
        rows, check = batch.rows, batch.check
        if rows is not None:
            self._counts.nbytes += 4 * rows.query.dim * len(rows.keys)
            slots = np.empty((0, self._slot_floats), np.float32) if batch.slots is None else batch.slots.result(0)
            self._counts.nbytes += slots.nbytes
            self._take(batch, rows.result(0), slots, rows.clock)
        if check is not None:
            self._counts.nbytes += 4 * WORDS * len(check.keys)
            self._compare(batch, check.result(0).view(np.uint64)[:, 0], check.clock)
        batch.rows = batch.slots = batch.check = None
        batch.left = False

    def _take(self, batch: CacheBatch, rows: Rows, slots: Rows, clock: int) -> None:
        """Rows [n, dim] have come of the keys that were asked for, and slots of some; with own steps up to `clock`."""
        if batch.values is not None:
            batch.values[batch.fetched] = rows
        keys, where = batch.keys[batch.fetched], batch.where[batch.fetched]
        if clock < batch.upto:  # a step was open: a part of it may be in them, or not
            self.index.abandon(where, batch.number)
            return
        known, same = self.index.known(where), np.zeros(len(where), np.bool_)
        known &= self.index.fetched_by(where, batch.number)
        if known.any():
            same[known] = _equal(self._rows_at(where[known]), rows[known])
            self._tell(same, known, batch.often[batch.fetched])
        whole = batch.often[batch.fetched] & (self._slot_floats > 0)
        has = self._slots_known(keys, rows, where, same)
        keep = self.index.arrived(where, batch.number, clock, has | whole, loose=batch.any_replica)
        if (put := keep & ~same & ~whole).any():
            self._table.put(where[put], rows[put])
        if (put := keep & whole).any():
            self._table.put(where[put], np.concatenate([rows[put], slots[keep[whole]]], axis=1))
        if batch.values is None and (lack := keep & ~has & ~whole).any():
            self._want_slots(keys[lack], where[lack])

    def _slots_known(self, keys: Keys, rows: Rows, where: Where, same: Flags) -> Flags:
        """Rows whose optimizer state is known: untrained, where weights show that, or unchanged since fetched."""
        if not self._slot_floats:
            return np.full(len(keys), True)
        known: Flags = same & self.index.slots_known(where)
        if not self._shows_training:
            return known
        initial = np.empty((len(keys), self._dim), np.float32)
        self._initial.gather(keys, initial)
        return _equal(initial, rows) | known

    def _compare(self, batch: CacheBatch, answered: NDArray[np.uint64], clock: int) -> None:
        """Digests [n] have come of rows that were too old."""
        where = batch.where[batch.compared]
        mine = self.index.fetched_by(where, batch.number)
        same = mine & (answered == batch.digests)
        rest = np.flatnonzero(mine & ~same)
        # With own pushes that the batch had not when it asked.
        same[rest] = answered[rest] == digests(self._rows_at(where[rest]))
        self._tell(same, mine, batch.often[batch.compared])
        self.index.compared(where, batch.number, clock, same, loose=batch.any_replica)
        if batch.values is not None:
            self._show(batch, batch.compared[same])
            self._counts.unchanged += int(np.count_nonzero(same))
        batch.changed = batch.compared[~same & (mine | (batch.values is not None))]

    def _tell(self, same: Flags, known: Flags, often: Flags) -> None:
        """Which of the rows that were known are the same."""
        for kind in (0, 1):
            mine = known & (often == kind)
            if total := int(np.count_nonzero(mine)):
                part = 1 - np.count_nonzero(same & mine) / total
                self._changed[kind] = FORGETS * self._changed[kind] + (1 - FORGETS) * part

    def _go_on(self, batch: CacheBatch) -> None:
        """Asks for what it names, then for what has changed, then ends; under its lock. Whoever comes first asks: a
        batch can be found by other threads before the one that made it has the lock."""
        if batch.left or batch.over:
            return
        if not batch.due and not len(batch.changed):
            batch.over = True
            self._batches.pop(batch.number, None)
            return
        try:
            if not batch.due:
                batch.fetched, batch.compared, batch.changed = batch.changed, NOTHING, NOTHING
                batch.upto = self._reads.begun
            batch.due = False
            self._send(batch)
        except BaseException:
            self._abandon(batch)
            raise

    def _abandon(self, batch: CacheBatch) -> None:
        with self._lock:
            batch.given_up = batch.given_up or not batch.over
            batch.over = True
            self._batches.pop(batch.number, None)
            self.index.abandon(batch.where, batch.number)

    def other(self, number: int) -> CacheBatch | None:
        """A batch that is not over."""
        return self._batches.get(number)

    def show_coming(self, batch: CacheBatch, clock: int) -> Where:
        """Shows what others have brought for it, if that may be shown at `clock`; indices of those keys that lack."""
        with self._guarded():
            where = self.index.look(batch.keys[batch.coming])
            fresh = self.index.fresh(where, clock, self.options.staleness, loose=batch.any_replica)
            batch.where[batch.coming] = where
            self._show(batch, batch.coming[fresh])
        return batch.coming[~fresh]

    def _show(self, batch: CacheBatch, some: Where) -> None:
        """Rows of the keys at these indices are what is kept."""
        assert batch.values is not None
        if len(some) == len(batch.keys):
            self._table.gather(batch.where, batch.values)
        elif len(some):
            batch.values[some] = self._rows_at(batch.where[some])

    def _rows_at(self, where: Where) -> Rows:
        rows = np.empty((len(where), self._dim), np.float32)
        self._table.gather(where, rows)
        return rows

    # --- slots ----------------------------------------------------------------------------------------------------

    def _want_slots(self, keys: Keys, where: Where) -> None:
        """Somebody is to ask for the slots of rows that are kept now."""
        self._number += 1
        self.index.ask_slots(where, self._number)
        out = np.empty((len(keys), self._slot_floats), np.float32)
        self._slots.append(SlotQuestion(self._number, where, self._read(keys, out, False, slots=True)))

    def _settle_slots(self, *, ask: bool) -> None:
        """Slots: keeps what has come; asks for what lacks."""
        with self._guarded():
            for each in [each for each in self._slots if each.begun and each.read.done()]:
                self._slots.remove(each)
                if each.read.error is not None:
                    self.index.abandon(each.where, each.number)
                    continue
                slots = each.read.result(0)
                self._counts.nbytes += slots.nbytes
                keep = self.index.slots_arrived(each.where, each.number)
                if keep.any():
                    where = each.where[keep]
                    self._table.put(where, np.concatenate([self._rows_at(where), slots[keep]], axis=1))
            lacking = [each for each in self._slots if ask and not each.fetched]
            for each in lacking:
                each.fetched = True
        try:
            for each in lacking:
                self._reads.start(each.read, self.options.staleness)
                each.begun = True  # until then it looks done to other threads
        except BaseException:
            self.clear()
            for each in lacking:  # also those that will not leave: nobody wants them now
                each.begun = True
            raise

    # --- what this worker changes -----------------------------------------------------------------------------------

    def pushed(self, source: PushSource) -> None:
        """It has pushed gradients: rows that are kept follow. No server is asked here."""
        self.settle(ask=False)
        keys, grads = source.keys, source.grads
        if self._push.code:
            grads = self._push.decode(grads)
        keys, grads = summed(keys, grads)
        with self._guarded():
            where = self.index.pushed(keys, applies=self.applies)
            if (some := where >= 0).all():
                self._table.apply(where, grads, source.step_values)
            elif some.any():
                self._table.apply(where[some], np.ascontiguousarray(grads[some]), source.step_values)

    def drop(self, keys: Keys) -> None:
        """Rows of keys [n] are not what they were."""
        with self._guarded():
            self.index.drop(keys)

    def clear(self) -> None:
        """No row is: nothing is shown that was pulled before, or was asked for."""
        with self._lock:
            self.index.clear()

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """What is kept, for oneself. An exception in the middle, of a signal handler perhaps, leaves nothing of it."""
        with self._lock:
            try:
                yield
            except Error:  # of a read, before anything was changed
                raise
            except BaseException:
                self.index.clear()
                raise


class CachedPull:
    """A pull of rows that may be here. `result` gives the array asked for: float32 [n, dim], rows in the order of the
    keys. on_rows: hears of them, too."""

    on_rows: Callable[[Rows], None] | None = None

    def __init__(self, cache: RowCache, batch: CacheBatch, clock: int, out: Rows, inverse: Where | None) -> None:
        self._cache = cache
        self._batch = batch
        self._clock = clock
        self._out = out
        self._inverse = inverse
        self._over = False

    def done(self) -> bool:
        """Whether `result` would return, or raise, at once; unless others have brought rows that it cannot show."""
        cache, batch = self._cache, self._batch
        if not self._over:
            cache.settle(ask=True)
        return self._over or (batch.over and all(cache.other(number) is None for number in batch.others))

    def result(self, timeout: float | None = None) -> Rows:
        """Waits for the rows; `Timeout` after `timeout` seconds (default: the client's) without an answer."""
        if self._over:
            return self._out
        cache, batch = self._cache, self._batch
        cache.finish(batch, timeout)
        if batch.given_up:  # by another thread; or by this one, whose first wait took too long
            cache.pull_left(batch, np.arange(len(batch.keys)), timeout)
        elif len(batch.coming):
            for number in batch.others:
                if (other := cache.other(number)) is not None:
                    cache.finish_other(other, timeout)
            if len(left := cache.show_coming(batch, self._clock)):
                cache.pull_left(batch, left, timeout)
        if self._inverse is not None:
            assert batch.values is not None
            self._out[:] = batch.values[self._inverse]
        self._over = True
        if self.on_rows is not None:
            self.on_rows(self._out)
        return self._out


def _equal(one: Rows, other: Rows) -> Flags:
    """Which rows are the same, bit for bit."""
    return cast(Flags, (one.view(np.int32) == other.view(np.int32)).all(axis=1))
