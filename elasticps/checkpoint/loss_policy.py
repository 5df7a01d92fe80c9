"""The leading coordinator recovers ranges that lost every replica, if the policies of all tables allow it.

Each range has rows of every table, so all must allow it: one table that waits keeps the others waiting. A loss above
the smallest budget of any table, or one that nobody can count, is for a person to decide (`elasticps restore
--ranges`)."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import numpy as np

from coordinator.core import fields
from coordinator.core.data_loss import find_loss, spans
from coordinator.core.errors import CoordinationError
from coordinator.core.keys import HELD_UP, ON_LOSS, RANGE_RECOVERY, RESTORE, VIEW, WAIT, loss_key, view_of
from coordinator.core.records import check, left_out, read
from coordinator.core.store import Entry, Store
from elasticps.checkpoint.range_recovery import OverBudget, RangeRecovery, RecoveryDriver, prepare, record, with_error
from elasticps.checkpoint.restore import driving
from elasticps.errors import Error
from elasticps.system.coordination import read_servers, read_tables, read_view

if TYPE_CHECKING:
    from elasticps.security.credentials import Credentials

log = fields.logger(__name__)

_LOOK_S = 0.5
_AGAIN_S = 2.5  # after what came to nothing


class LossPolicy:
    """Watches for lost ranges and recovers them. url: of checkpoints, "" for where the newest one went."""

    def __init__(self, store: Store, url: str, credentials: Credentials | None) -> None:
        self._store = store
        self._url = url
        self._credentials = credentials
        self._reported: str | None = None  # nothing yet: the one who led before may have

    async def run(self) -> None:
        """Runs as long as this coordinator leads; never returns."""
        while True:
            pause_s = _LOOK_S
            try:
                entry = await self._store.get(RANGE_RECOVERY)
                if entry is not None:
                    await self._go_on(entry)
                else:
                    await self._judge()
            except (Error, CoordinationError) as error:
                await self._held_up(str(error))
                pause_s = _AGAIN_S
            except Exception as error:  # whoever leads goes on leading
                log.exception("cannot bring ranges back")
                await self._held_up(repr(error))
                pause_s = _AGAIN_S
            await asyncio.sleep(pause_s)

    # --- the tables' policy -------------------------------------------------------------------------------------------

    async def _judge(self) -> None:
        store = self._store
        entry = await store.get(VIEW)
        loss = None if entry is None else find_loss(view_of(entry), await read_servers(store))
        if loss is not None and loss.coming.size:  # the store that knew from where was lost: there is no way back
            await self._begin(await prepare(store, loss.coming.tolist(), self._url, None, (), self._credentials))
            return
        ranges = np.empty(0, np.int64) if loss is None else np.union1d(loss.lost, loss.waiting)
        if not ranges.size:
            await self._held_up("")
            return
        policies = await policies_of(store)
        if waiting := sorted(name for name, policy in policies.items() if policy["on_loss"] != RESTORE):
            await self._held_up(f"table {waiting[0]} has on_loss={WAIT!r}" if len(waiting) < len(policies) else "")
            return
        recovery = await prepare(store, ranges.tolist(), self._url, None, (), self._credentials)
        check_budget(recovery, policies)
        await self._begin(recovery)

    async def _begin(self, recovery: RangeRecovery) -> None:
        if await self._store.compare_and_set(RANGE_RECOVERY, recovery.to_json(), expect=0) is not None:
            ranges = np.array(recovery.ranges)
            log.warning("ranges are to be brought back", ranges=spans(ranges), url=recovery.url, cut=recovery.cut)

    async def _held_up(self, why: str) -> None:
        if why == self._reported:
            return
        self._reported = why
        if why:
            log.warning("ranges are not brought back", reason=why)
        try:
            if why:
                await self._store.put(HELD_UP, json.dumps({"reason": why}).encode())
            else:
                await self._store.delete(HELD_UP)
        except CoordinationError as error:
            self._reported = ""
            log.info("cannot say why ranges are not brought back", error=error)

    # --- what has been decided ----------------------------------------------------------------------------------------

    async def _go_on(self, entry: Entry) -> None:
        store, recovery = self._store, RangeRecovery.from_json(entry.value)
        view = await read_view(store)
        if recovery.error:  # it is tried again
            cleared = await store.compare_and_set(
                RANGE_RECOVERY, with_error(recovery, None).to_json(), expect=entry.revision
            )
            if cleared is None:
                return
            entry = Entry(entry.key, entry.value, cleared, entry.create_revision)
        ranges = np.array(recovery.ranges)
        coming = view.heads[ranges] < 0
        if not coming.any():
            loss = find_loss(view, await read_servers(store))
            if not np.isin(ranges, np.union1d(loss.lost, loss.waiting)).any():  # nobody gave them up
                await store.delete(RANGE_RECOVERY, expect=entry.revision)
            return
        try:
            async with driving(store) as (serial, _):
                drive = RecoveryDriver(store, recovery, serial, self._credentials)
                view = await drive.run()
                await drive.end()
        except Error as error:
            await store.compare_and_set(RANGE_RECOVERY, with_error(recovery, error).to_json(), expect=entry.revision)
            raise
        began = ranges[view.recovery_epoch[ranges] > 0]
        epoch = int(view.recovery_epoch[began].max())
        document = record(recovery, began, epoch, drive.rows)
        await store.put(loss_key(epoch), json.dumps(document).encode())
        await store.delete(RANGE_RECOVERY)
        log.warning(
            "ranges were brought back", ranges=spans(began), rows=drive.rows, url=recovery.url, cut=recovery.cut,
            most_lost_steps=recovery.steps,
            workers=", ".join(f"{one.name} {one.have + 1}-{one.to}" for one in recovery.workers if one.steps),
        )  # fmt: skip


async def policies_of(store: Store) -> dict[str, dict[str, Any]]:
    """The loss policy of each registered table, by "application/name"."""
    found = {}
    for entry in (await store.list(ON_LOSS)).entries:
        with left_out():
            document = read(entry.key, entry.value, table=int, on_loss=str)
            if document.get("max_lost_steps") is not None:
                check(entry.key, document, max_lost_steps=int)
            found[entry.key.removeprefix(ON_LOSS), document["table"]] = {"max_lost_steps": None} | document
    unsaid = {"on_loss": WAIT, "max_lost_steps": None}
    return {table.name: found.get((table.name, table.id), unsaid) for table in await read_tables(store)}


def check_budget(recovery: RangeRecovery, policies: dict[str, dict[str, Any]]) -> None:
    """Raises OverBudget if more steps would be lost than some table allows, or nobody can say how many."""
    limits = {name: policy["max_lost_steps"] for name, policy in policies.items()}
    budgets = {name: limit for name, limit in limits.items() if limit is not None}
    if not budgets:
        return
    name = min(budgets, key=lambda each: budgets[each])
    unknown = [one.name for one in recovery.workers if not one.to and one.have]
    if unknown:
        raise OverBudget(
            f"no range is left, so nobody knows how many steps of worker {unknown[0]} would be lost, and table {name} "
            f"allows {budgets[name]}: `elasticps restore --ranges` brings them back"
        )
    if recovery.steps > budgets[name]:
        raise OverBudget(
            f"{recovery.steps} steps would be lost, table {name} allows {budgets[name]}: `elasticps restore --ranges` "
            "brings the ranges back all the same"
        )
