"""Bodies of frames compressed by Zstandard: u64 how long one is, the compressed bytes, zeros up to a multiple of 8."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import zstandard

from elasticps.wire.frames import HEADER_BYTES, PACKED, Buffer, FrameError, Header, padded, unpack_header
from elasticps.wire.pool import Bytes

WINDOW_BYTES = 1 << 20  # that a decompressor may take beside what it writes; what is packed here takes half
LEVEL = 1  # higher ones take several times as long for a few hundredths


def pack(buffers: Iterable[Buffer]) -> bytes:
    """A body that is given in pieces."""
    body = b"".join(buffers)
    return len(body).to_bytes(8, "little") + padded(zstandard.ZstdCompressor(LEVEL).compress(body))


def unpack(header: Header, body: Buffer, limit: int) -> tuple[bytes, bytes]:
    """Header and body of the frame whose body was packed. FrameError if it was not, or has more than `limit` bytes."""
    size = int.from_bytes(body[:8], "little")
    if len(body) < 8 or size > limit or size & 7:
        raise FrameError(f"a packed body of {size} bytes cannot be")
    try:
        if zstandard.frame_content_size(body[8:]) != size:  # before memory is taken for it
            raise FrameError("a packed body has another size than it says")
        whole = zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES).decompress(body[8:], max_output_size=size)
    except zstandard.ZstdError as error:
        raise FrameError(f"a packed body cannot be read: {error}") from None
    return header._replace(flags=header.flags & ~PACKED, body=size).pack(), whole


def unpack_first(received: Bytes, limit: int) -> list[Bytes]:
    """The same for the first frame of what was received; and the rest."""
    header = unpack_header(received.data, 0, limit)
    end = HEADER_BYTES + header.body
    whole = unpack(header, received[HEADER_BYTES:end].data, limit)
    return [*(np.frombuffer(piece, np.uint8) for piece in whole), received[end:]]
