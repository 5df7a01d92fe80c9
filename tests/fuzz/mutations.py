"""Mutations of frames that know the frames' format."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from elasticps.wire.frames import HEADER_BYTES, PACKED, SHORT, Kind
from elasticps.wire.packing import DELTA, KEEP, KNOWN, LIST_KEYS, says

FIELDS = (
    (0, "<I", 2), (4, "<B", 2), (5, "<B", 6), (6, "<H", 12), (8, "<Q", 6), (16, "<Q", 2), (24, "<Q", 12),
    (32, "<Q", 12), (40, "<I", 10), (44, "<H", 8), (46, "<H", 10), (48, "<I", 12), (52, "<I", 12),
    (56, "<I", 8), (60, "<I", 6),
)  # fmt: skip
"""Where a field of the header lies, how it is packed, and how often it is the one."""
_WHICH = [(at, form) for at, form, often in FIELDS for _ in range(often)]
NUMBERS = (
    0, 1, 2, 3, 7, 8, 15, 16, 17, 64, 255, 512, 1024, 1536, 1 << 15, (1 << 16) - 1, 1 << 16, 1 << 20, (1 << 31) - 1,
    1 << 31, (1 << 32) - 1, 1 << 32, (1 << 46) - 1, 1 << 46, 1 << 62, (1 << 62) + 1, (1 << 63) - 1, 1 << 63,
    (1 << 64) - 1, (1 << 64) - 2,
)  # fmt: skip
_FLOATS = (float("nan"), float("inf"), -float("inf"), 3e38, 1e-45, -0.0, 1.0)
_KINDS = [int(kind) for kind in Kind]
_TEXTS = ("", "a", "default", "\ud800", "é" * 300, "x" * 300, "[" * 300, "p0", "s0", "\n", "\u2028", "{}")
_DEEP = "[" * 20_000


def mutate(random: Random, frame: bytearray, others: Sequence[bytes]) -> bytearray:
    """A frame with a mutation. others: frames that other peers might send."""
    return frame if len(frame) < HEADER_BYTES else random.choice(_WAYS)(random, frame, others)


def _field(random: Random, frame: bytearray, others: Sequence[bytes]) -> bytearray:
    at, form = random.choice(_WHICH)
    (before,) = struct.unpack_from(form, frame, at)
    value = random.choice(
        (random.choice(NUMBERS), random.choice(NUMBERS), before + 1, before - 1, random.getrandbits(64))
    )
    if at == 5 and random.random() < 0.8:
        value = random.choice(_KINDS)
    struct.pack_into(form, frame, at, value & ((1 << 8 * struct.calcsize(form)) - 1))
    return frame


def _word(random: Random, frame: bytearray, others: Sequence[bytes]) -> bytearray:
    """A word of the body, more often near its front, where the counts are."""
    words = (len(frame) - HEADER_BYTES) // 4
    if words <= 0:
        return _field(random, frame, others)
    at = HEADER_BYTES + 4 * random.randrange(min(words, random.choice((1, 2, 8, 24, words))))
    if random.random() < 0.15:
        struct.pack_into("<f", frame, at, random.choice(_FLOATS))
        return frame
    (before,) = struct.unpack_from("<I", frame, at)
    value = random.choice((random.choice(NUMBERS), before + 1, before - 1, random.getrandbits(32)))
    if random.random() < 0.3 and at + 8 <= len(frame):
        struct.pack_into("<Q", frame, at, random.choice(NUMBERS))
    else:
        struct.pack_into("<I", frame, at, value & 0xFFFFFFFF)
    return frame


def _length(random: Random, frame: bytearray, others: Sequence[bytes]) -> bytearray:
    """Shorter or longer, and the header says so."""
    body = len(frame) - HEADER_BYTES
    size = random.choice((0, 8, max(0, body - 8), body + 8, random.randrange(0, body + 64) & ~7))
    del frame[HEADER_BYTES + size :]
    frame += bytes(HEADER_BYTES + size - len(frame))
    struct.pack_into("<Q", frame, 8, size)
    return frame


def _flag(random: Random, frame: bytearray, others: Sequence[bytes]) -> bytearray:
    """Says that keys are left out, or that it is compressed."""
    (flags,) = struct.unpack_from("<H", frame, 6)
    struct.pack_into("<H", frame, 6, flags ^ random.choice((SHORT, PACKED)))
    return frame


def _names_a_list(random: Random, frame: bytearray, others: Sequence[bytes]) -> bytearray:
    """Where the word stands before the keys of a pull, or of a push's first block, or somewhere."""
    (flags,) = struct.unpack_from("<H", frame, 6)
    struct.pack_into("<H", frame, 6, flags | SHORT)
    at = HEADER_BYTES + 8 * random.choice((0, 2, 4, 5, 6, random.randrange(40)))
    if at + 8 <= len(frame):
        how = random.choice((KEEP, KNOWN, DELTA, KEEP | DELTA, KNOWN | DELTA, KEEP | KNOWN, 0, 255))
        place = random.choice((0, 0, 7, random.randrange(LIST_KEYS), LIST_KEYS - 1, LIST_KEYS, (1 << 24) - 1))
        coded = random.choice((0, 1, 8, random.randrange(1 << 12), 1 << 20, (1 << 32) - 1))
        struct.pack_into("<Q", frame, at, says(how, place, coded))
    return frame


def _cut(random: Random, frame: bytearray, others: Sequence[bytes]) -> bytearray:
    """Its end is missing: the next frame is taken for it."""
    del frame[random.randrange(1, len(frame)) :]
    return frame


def _bits(random: Random, frame: bytearray, others: Sequence[bytes]) -> bytearray:
    for _ in range(random.choice((1, 1, 2, 8))):
        frame[random.randrange(len(frame))] ^= 1 << random.randrange(8)
    return frame


def _other(random: Random, frame: bytearray, others: Sequence[bytes]) -> bytearray:
    return bytearray(random.choice(others))


def _body_of_another(random: Random, frame: bytearray, others: Sequence[bytes]) -> bytearray:
    frame[HEADER_BYTES:] = random.choice(others)[HEADER_BYTES:]
    struct.pack_into("<Q", frame, 8, len(frame) - HEADER_BYTES)
    return frame


def _document(random: Random, frame: bytearray, others: Sequence[bytes]) -> bytearray:
    at = frame.find(b"{", HEADER_BYTES)
    if at < 0:
        return _word(random, frame, others)
    try:
        document = json.loads(frame[at:])
    except ValueError:
        return _word(random, frame, others)
    if random.random() < 0.02:
        written = _DEEP.encode()
    else:
        written = json.dumps(_changed(random, document)).encode()
    frame[at:] = written
    frame += b" " * (-len(frame) % 8)
    struct.pack_into("<Q", frame, 8, len(frame) - HEADER_BYTES)
    return frame


def _changed(random: Random, value: Any) -> Any:
    """Something else in the place of one of its parts, or of all of it."""
    if isinstance(value, dict) and value and random.random() < 0.9:
        key = random.choice(sorted(value))
        change = random.random()
        if change < 0.1:
            return {k: v for k, v in value.items() if k != key}
        if change < 0.15:
            return value | {random.choice(_TEXTS): value[key]}
        return value | {key: _changed(random, value[key])}
    if isinstance(value, list) and value and random.random() < 0.8:
        i = random.randrange(len(value))
        change = random.random()
        if change < 0.15:
            return value[:i] + value[i + 1 :]
        if change < 0.3:
            return value[: i + 1] + value[i:]
        return [*value[:i], _changed(random, value[i]), *value[i + 1 :]]
    if isinstance(value, str) and value.startswith("{") and random.random() < 0.7:
        try:
            return json.dumps(_changed(random, json.loads(value)))
        except ValueError:
            return ""
    if isinstance(value, int) and random.random() < 0.5:
        return value + random.choice((-1, 1))
    return random.choice(
        (random.choice(NUMBERS), -random.choice(NUMBERS), 1 << 70, None, True, 0.5, float("nan"), 1e300, [], {},
         [value], {"a": value}, random.choice(_TEXTS), [1] * 2000, [[[[]]]])
    )  # fmt: skip


Way = Callable[[Random, bytearray, Sequence[bytes]], bytearray]
_WAYS: tuple[Way, ...] = (
    _field, _field, _field, _field, _word, _word, _word, _length, _cut, _bits, _other, _body_of_another,
    _document, _document, _names_a_list, _flag,
)  # fmt: skip
