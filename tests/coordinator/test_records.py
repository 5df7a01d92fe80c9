"""Values that others may write into the store are checked when read."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.core.keys import known_key
from coordinator.core.records import MOST, read
from coordinator.membership import losses_of
from coordinator.memory import MemoryStore

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
)


@given(VALUES, st.sampled_from([int, float, str, bool, list, dict, object]))
def test_fields_have_the_requested_types(value: Any, kind: type) -> None:
    try:
        found = read("k", json.dumps({"a": value}).encode(), a=kind)["a"]
    except ValueError:
        assert not isinstance(value, kind) or kind in (int, float)
        return
    if kind is int:
        assert type(found) is int
        assert 0 <= found <= MOST
    elif kind is float:
        assert type(found) in (int, float)
        float(found)
        assert abs(found) < float("inf")
    else:
        assert isinstance(found, kind)


@given(st.binary(max_size=20))
def test_anything_else_is_a_value_error(value: bytes) -> None:
    with pytest.raises(ValueError, match=r"^k "):
        read("k", value, a=int)


@pytest.mark.parametrize("own", [b"[" * 100_000, b"[]", b'{"committed": "9"}', b'{"committed": -1}'])
async def test_a_damaged_report_of_a_worker_does_not_change_a_loss(own: bytes) -> None:
    store = MemoryStore()
    workers = [{"id": 5, "name": "v", "have": 6, "to": 7}, {"id": 6, "name": "ads/w", "have": 6, "to": 8}]
    found = {"epoch": 3, "ranges": [1], "cut": 2, "url": "file:///x", "rows": 9, "lacking": [], "workers": workers}
    await store.put("losses/000000000003", json.dumps(found).encode())
    await store.put(known_key(3, 5, "v"), own)
    await store.put(known_key(3, 6, "ads/w"), b'{"committed": 9}')
    assert [worker["to"] for worker in (await losses_of(store))[0]["workers"]] == [7, 9]
