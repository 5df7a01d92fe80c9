"""Frames in fewer bytes: keys that the server knows already, differences of keys, and compressed bodies.

Keys: a word stands before them and says how they are coded: KEEP or KNOWN, with the index of the list among the
LIST_KEYS keys that the server holds for this connection; DELTA, with the number of bytes that the differences take.
A difference is that of a key to the one before, zigzag, 7 bits a byte, the lower first, at most 8 bytes; sums are
modulo 2^64.

Bodies: compressed by Zstandard as u64 length of the original, the compressed bytes, zeros up to a multiple of 8.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import zstandard

from elasticps.wire.frames import HEADER_BYTES, PACKED, Buffer, FrameError, Header, padded, unpack_header
from elasticps.wire.pool import Bytes

# --- keys -----------------------------------------------------------------------------------------------------------

KEEP, KNOWN, DELTA = 1, 2, 4
LIST_KEYS = 1 << 18  # that a server keeps of one connection: 2 MiB


def says(how: int, place: int = 0, coded: int = 0) -> int:
    """The word that says how keys are coded."""
    return how | place << 8 | coded << 32


# --- bodies ---------------------------------------------------------------------------------------------------------

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
