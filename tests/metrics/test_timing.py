"""Timing of frames leaves their handling unchanged."""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

import numpy as np
import pytest

from elasticps.metrics.timing import BUCKETS_S, SAMPLE, Histogram, Meter
from elasticps.server.network.connection import Connection
from elasticps.wire.frames import Header, Kind

BODY = np.zeros(24, np.uint8)
NOBODY = cast(Connection, None)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_histogram_counts_a_value_at_a_bound_below_it() -> None:
    histogram = Histogram()
    for seconds in (0.0, 50e-6, 51e-6, 1e9):
        histogram.add(seconds)
    found = histogram.cumulative()
    assert [bound for bound, _ in found] == [*map(str, BUCKETS_S), "+Inf"]
    assert [count for _, count in found][:2] == [2, 3]
    assert found[-2:] == [("30.0", 3), ("+Inf", 4)]


def test_one_frame_in_sample_is_timed_for_the_others() -> None:
    clock, calls = Clock(), Counter[str]()

    def handler(connection: Connection, header: Header, body: Any) -> None:
        calls["frames"] += 1
        clock.now += 0.001

    meter = Meter(clock)
    handle = meter.timed("push", handler)
    for _ in range(10 * SAMPLE):
        handle(NOBODY, Header(Kind.PUSH), BODY)
    assert calls["frames"] == 10 * SAMPLE
    assert meter.received_bytes["push"] == 10 * SAMPLE * 24
    assert sum(meter.handling["push"].counts) == 10
    assert meter.busy_s == pytest.approx(clock.now)


def test_a_frame_that_fails_is_measured_and_fails_all_the_same() -> None:
    def handler(connection: Connection, header: Header, body: Any) -> None:
        raise ValueError("no")

    meter = Meter()
    handle = meter.timed("pull", handler)
    for _ in range(SAMPLE):
        with pytest.raises(ValueError, match="no"):
            handle(NOBODY, Header(Kind.PULL), BODY)
    assert sum(meter.handling["pull"].counts) == 1
