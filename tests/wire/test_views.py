"""VIEW frames: only a newer view is read, and what cannot be read is a broken frame."""

from __future__ import annotations

import numpy as np
import pytest

from coordinator.core.view import ServerInfo, View
from elasticps.wire.frames import HEADER_BYTES, FrameError, Header, Kind, read_view, unpack_header, view_frame


def a_view(epoch: int) -> View:
    servers = (ServerInfo("a", 1, "h:1"),)
    none = np.array([-1, -1])
    return View("c", epoch, 2, 1, servers, np.zeros((2, 1), np.int32), none, np.ones(2, np.int64), "a reason")


def taken_apart(frame: bytes) -> tuple[Header, np.ndarray]:
    return unpack_header(frame), np.frombuffer(frame[HEADER_BYTES:], np.uint8)


def test_a_newer_view_is_read() -> None:
    header, body = taken_apart(view_frame(a_view(7)))
    assert (header.kind, header.epoch) == (Kind.VIEW, 7)
    assert read_view(header, body, known=a_view(6)) == a_view(7)


def test_a_known_view_is_not_decoded() -> None:
    header, body = taken_apart(view_frame(a_view(7)))
    assert read_view(header, body, known=a_view(7)) is None
    assert read_view(header, np.zeros_like(body), known=a_view(7)) is None


def test_a_view_that_cannot_be_decoded_is_a_frame_error() -> None:
    header, body = taken_apart(view_frame(a_view(7)))
    with pytest.raises(FrameError, match="cannot be read"):
        read_view(header, np.zeros_like(body), known=a_view(6))
    with pytest.raises(FrameError, match="cannot be read"):
        read_view(header._replace(items=header.items - 1), body, known=a_view(6))
    with pytest.raises(FrameError, match="epoch 9 holds the view of epoch 7"):
        read_view(header._replace(epoch=9), body, known=a_view(6))
