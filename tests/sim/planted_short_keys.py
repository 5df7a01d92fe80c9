"""Bugs in how frames are made shorter: lists of keys that one side has and the other has not, or no longer."""

from __future__ import annotations

import pytest

from elasticps.client import short_keys
from elasticps.client.short_keys import KeyLists, ShortKeys
from elasticps.server.fast import layout as at
from elasticps.server.fast.buffers import PathConnection
from elasticps.server.fast.path import FastPath


def name_lists_that_went_with_a_connection(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ShortKeys, "connected", lambda self: None)


def name_lists_that_others_were_written_over(patch: pytest.MonkeyPatch) -> None:
    def keep(self: KeyLists, digest: bytes, n: int) -> int:
        place = self._next if self._next + n <= vars(short_keys)["LIST_KEYS"] else 0
        self._next = place + n
        self._offsets[digest] = place
        return place

    patch.setattr(KeyLists, "keep", keep)


def keep_lists_of_all_connections_in_one_place(patch: pytest.MonkeyPatch) -> None:
    def act(self: FastPath, reason: int, connection: PathConnection) -> bool:
        goes_on = do(self, reason, connection)
        if reason == at.LISTS:
            one = vars(self).setdefault("one", self._lists[connection.slot])
            self.connections[connection.slot, at.C_LISTS] = one.ctypes.data
        return goes_on

    do = FastPath._act
    patch.setattr(FastPath, "_act", act)
