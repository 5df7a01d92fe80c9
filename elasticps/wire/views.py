"""VIEW frames. A view is encoded once, for everybody who is told; and decoded only by who has an older one. Pure."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coordinator.core.view import View
from elasticps.wire.frames import FrameError, Header, Kind, bytes_frame


def view_frame(view: View) -> bytes:
    """The frame that tells a view."""
    return bytes_frame(Kind.VIEW, view.encode(), epoch=view.epoch)


def read_view(header: Header, body: NDArray[np.uint8], above: int) -> View | None:
    """The view in a frame; None, unread, unless its epoch is above `above`. Raises `FrameError` for nonsense."""
    if header.epoch <= above:
        return None
    try:
        view = View.decode(body[: header.items].tobytes())
    except ValueError as error:
        raise FrameError(f"a VIEW cannot be read: {error}") from None
    if view.epoch != header.epoch:
        raise FrameError(f"a VIEW of epoch {header.epoch} holds the view of epoch {view.epoch}")
    return view
