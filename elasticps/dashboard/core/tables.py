"""The tables of a cluster: what the store says of each, and what its servers hold of it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coordinator.core.cluster_state import Rate
from coordinator.core.keys import table_of
from coordinator.core.records import read
from coordinator.core.store import Entry

TABLES_MAX = 1000  # shown
# What the page shows of a table, by the field of TableStatus that is added up; "": each server that has it.
_COUNTED = {"rows_headed": "rows", "bytes": "bytes", "candidates": "waiting", "": "servers"}
_UNKNOWN: dict[str, Any] = {"rows": None, "bytes": None, "waiting": None, "servers": 0, "evicted": {}}


class TableStates:
    """The tables of a cluster, as the page shows them."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Entry, dict[str, Any] | None]] = {}  # by key; None: not to be shown
        self._rates: dict[int, object] = {}  # learning rates that were set, by table id
        self._counts: dict[int, dict[str, Any]] = {}  # what servers hold of a table, by id; none before they answer

    def follow(self, tables: Mapping[str, Entry], rates: Mapping[str, Rate]) -> None:
        """Takes the tables and learning rates that the store has now."""
        before = self._known
        self._known = {
            key: before[key] if key in before and before[key][0] is entry else (entry, _described(entry))
            for key, entry in tables.items()
        }
        self._rates = {rate.table: rate.lr for rate in rates.values()}

    def count(self, answers: Mapping[str, list[dict[str, Any]]]) -> None:
        """Takes the tables' sizes (TableStatus) at each server that answers."""
        self._counts = {}
        for answer in answers.values():
            for table in answer:
                found = self._counts.setdefault(table["id"], dict.fromkeys(_COUNTED.values(), 0) | {"evicted": {}})
                for name, shown in _COUNTED.items():
                    found[shown] += table.get(name, 0) if name else 1
                for reason, count in table.get("evicted", {}).items():
                    found["evicted"][reason] = found["evicted"].get(reason, 0) + count

    def document(self) -> list[dict[str, Any]]:
        """The tables as the page gets them; rows are None before a server has answered."""
        found = []
        shown = [table for _, table in self._known.values() if table is not None]
        for table in sorted(shown, key=lambda t: (t["app"], t["name"]))[:TABLES_MAX]:
            more = self._counts.get(table["id"], _UNKNOWN)
            found.append({**table, **more, "lr_set": self._rates.get(table["id"])})
        return found


def _described(entry: Entry) -> dict[str, Any] | None:
    """Describes a table for the page; None if it is being dropped, or if its entry makes no sense."""
    try:
        if (table := table_of(entry.key, entry.value)) is None:
            return None
        app = table.name.partition("/")[0]
        return {"id": table.id, "app": app, **_shape(read(entry.key, table.spec.encode(), name=str))}
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        OverflowError,
        RecursionError,
    ):  # a spec may have anything in any place
        return None


def _shape(spec: Mapping[str, Any]) -> dict[str, Any]:
    shape = spec.get("shape")
    return {
        "name": str(spec["name"]),
        "shape": f"keys × {spec['dim']}" if shape is None else " × ".join(map(str, shape)) or "scalar",
        "dtype": str(spec["dtype"]),
        "optimizer": {str(k): v for k, v in spec["optimizer"].items() if isinstance(v, (str, int, float, bool))},
        "policies": [str(each.get("kind")) for each in (spec.get("admission"), *(spec.get("eviction") or ())) if each],
        "filters": [f"{way} {each.get('kind')}" for way in ("push", "pull") for each in spec.get(way) or ()],
    }
