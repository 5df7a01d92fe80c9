"""Ranges without a replica: lost, or waiting for a server."""

from __future__ import annotations

import numpy as np
import pytest

from coordinator.core.data_loss import find_loss, spans
from coordinator.core.view import ServerInfo
from tests.client.views import view

VIEW = view([[0, 1], [1, 2], [2, -1], [2, 0], [0, -1], [1, 2], [1, 2], [1, 2]])
S0, S1, S2 = VIEW.servers


def again(server: ServerInfo) -> ServerInfo:
    return ServerInfo(server.name, server.incarnation + 1, server.address)


def test_no_range_is_lost_while_each_has_a_replica() -> None:
    assert not find_loss(VIEW, [S0, S1, S2])
    assert not find_loss(view([[0, 1], [1, 2]]), [S1])
    assert find_loss(VIEW, [S0, S1, S2]).lines == []


def test_a_range_waits_for_an_absent_server() -> None:
    loss = find_loss(VIEW, [S0, S1])
    assert loss.waiting.tolist() == [2]
    assert not loss.lost.size
    (line,) = loss.lines
    assert line.startswith("1 ranges (2) have no replica that can be reached, and wait for s2: ")
    assert "bring it back" in line


def test_a_server_that_came_back_empty_has_lost_its_unreplicated_ranges() -> None:
    loss = find_loss(VIEW, [again(S0), again(S1), S2])
    assert (loss.lost.tolist(), loss.waiting.tolist()) == ([0, 4], [])
    (line,) = loss.lines
    assert line.startswith("the data of 2 ranges (0, 4) are lost, in all tables: s0 came back as incarnation 2")


def test_a_range_with_an_absent_and_an_empty_replica_waits() -> None:
    loss = find_loss(VIEW, [again(S0), S2])
    assert (loss.lost.tolist(), loss.waiting.tolist()) == ([4], [0])
    assert len(loss.lines) == 2


@pytest.mark.parametrize(
    ("ranges", "text"),
    [
        ([], ""),
        ([3], "3"),
        ([0, 1, 2, 7, 9, 10], "0-2, 7, 9-10"),
        (range(0, 40, 2), "0, 2, 4, 6, 8, 10, 12, 14 and 12 more spans"),
    ],
)
def test_ranges_are_printed_as_spans(ranges: list[int], text: str) -> None:
    assert spans(np.array(ranges, np.int64)) == text
