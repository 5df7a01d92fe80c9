from __future__ import annotations

from typing import Any

from elasticps.cli.status import _fullness

MIB = 1 << 20


def server(name: str, used: int, mark: int = 800, limit: int = 1000) -> dict[str, Any]:
    return {"id": name, "memory_used": used * MIB, "memory_mark": mark * MIB, "memory_limit": limit * MIB}


def test_status_warns_long_before_a_server_is_full_and_when_it_is() -> None:
    servers = [server("s0", 600), server("s1", 700), server("s2", 900), server("s3", 900, 0, 0)]
    silent = {"id": "s4", "memory_used": None, "memory_mark": None, "memory_limit": None}
    soon, full = [line.plain for line in _fullness([*servers, silent])]
    assert soon == "s1 uses 700.0 MiB, and takes new rows up to 800.0 MiB of its limit of 1000.0 MiB: add servers"
    assert full.startswith("s2 is full: it uses 900.0 MiB")
    assert "pushes that add rows are refused" in full
