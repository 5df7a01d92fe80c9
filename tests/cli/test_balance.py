from __future__ import annotations

from typing import Any

from elasticps.cli.status import balance


def server(name: str, nbytes: int = 100, **values: Any) -> dict[str, Any]:
    counts = {"rows": 1, "ranges_held": 8, "rows_pulled": 0, "rows_pushed": 0, "pulls": 0, "pushes": 0}
    return {
        "id": name, "incarnation": 1, "bytes": nbytes, "weight": 1.0, "uptime_s": 10.0, "draining": False,
        **counts, **values,
    }  # fmt: skip


def test_the_largest_load_is_compared_with_the_mean() -> None:
    found = balance([server("s0", 100, pulls=30, rows_pushed=5), server("s1", 300, pushes=10, rows_pulled=5)])
    assert found == {"bytes": 1.5, "rows": 1.0, "requests": 1.5}


def test_a_weight_is_a_share() -> None:
    assert balance([server("s0", 100), server("s1", 200, weight=2.0)])["bytes"] == 1.0
    assert balance([server("s0", 100), server("s1", 100, weight=3.0)])["bytes"] == 2.0


def test_draining_empty_and_silent_servers_do_not_count() -> None:
    others = [server("s0"), server("s1")]
    strange = [server("s2", 9, draining=True), server("s3", 9, ranges_held=0), server("s4", 9, rows=None)]
    assert balance([*others, *strange])["bytes"] == 1.0
    assert balance(others[:1]) == {"bytes": None, "rows": None, "requests": None}


def test_requests_are_counted_since_the_last_status_or_per_second_of_uptime() -> None:
    before = [server("s0", pulls=1000), server("s1", pulls=10)]
    now = [server("s0", pulls=1100), server("s1", pulls=110)]
    assert balance(now, before)["requests"] == 1.0
    assert balance(before)["requests"] == 1.98
    recent = [server("s0", pulls=1000), server("s1", pulls=100, uptime_s=1.0)]
    assert balance(recent)["requests"] == 1.0
    again = [server("s0", pulls=1100), server("s1", pulls=100, incarnation=2)]  # its counts began anew
    assert balance(again, before)["requests"] == 1.0
