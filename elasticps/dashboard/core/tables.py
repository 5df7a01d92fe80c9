"""The tables of a cluster: what the store says of each, and what its servers hold of it. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from coordinator.core.keys import RATES, TABLES, table_of
from coordinator.core.records import read

TABLES_MAX = 1000  # shown


class TableStates:
    """The tables by their keys in the store."""

    def __init__(self) -> None:
        self._known: dict[str, dict[str, Any]] = {}
        self._rates: dict[str, tuple[int, Any]] = {}
        self._counts: dict[int, tuple[int, int, int]] = {}  # rows, bytes, servers

    def put(self, key: str, value: bytes) -> bool:
        """Takes a key that was written; returns whether it is about tables."""
        if key.startswith(TABLES):
            if (table := table_of(key, value)) is None:
                self._known.pop(key, None)
                return True
            app = table.name.partition("/")[0]
            self._known[key] = {"id": table.id, "app": app, **_shape(read(key, table.spec.encode(), name=str))}
        elif key.startswith(RATES):
            document = read(key, value, table=int, lr=object)
            self._rates[key] = document["table"], document["lr"]
        else:
            return False
        return True

    def delete(self, key: str) -> bool:
        """Takes a key that was deleted; returns whether it was about tables."""
        return self._known.pop(key, None) is not None or self._rates.pop(key, None) is not None

    def keep(self, keys: Collection[str]) -> None:
        """Forgets all tables but those of these keys."""
        for known in (self._known, self._rates):
            for key in list(known):
                if key not in keys:
                    del known[key]

    def count(self, answers: Mapping[str, list[dict[str, Any]]]) -> None:
        """Takes the tables' sizes (TableStatus) at each server that answers."""
        self._counts = {}
        for answer in answers.values():
            for table in answer:
                rows, nbytes, servers = self._counts.get(table["id"], (0, 0, 0))
                self._counts[table["id"]] = rows + table["rows_headed"], nbytes + table["bytes"], servers + 1

    def document(self) -> list[dict[str, Any]]:
        """The tables as the page gets them; rows are None before a server has answered."""
        rates = dict(self._rates.values())
        found = []
        for table in sorted(self._known.values(), key=lambda t: (t["app"], t["name"]))[:TABLES_MAX]:
            rows, nbytes, servers = self._counts.get(table["id"], (None, None, 0))
            more = {"rows": rows, "bytes": nbytes, "servers": servers, "lr_set": rates.get(table["id"])}
            found.append({**table, **more})
        return found


def _shape(spec: Mapping[str, Any]) -> dict[str, Any]:
    shape = spec.get("shape")
    return {
        "name": str(spec["name"]),
        "shape": f"keys × {spec['dim']}" if shape is None else " × ".join(map(str, shape)) or "scalar",
        "dtype": str(spec["dtype"]),
        "optimizer": {str(k): v for k, v in spec["optimizer"].items() if isinstance(v, (str, int, float, bool))},
        "filters": [f"{way} {each.get('kind')}" for way in ("push", "pull") for each in spec.get(way) or ()],
    }
