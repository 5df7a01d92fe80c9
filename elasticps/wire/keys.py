"""Keys in fewer bytes: lists that a server has from this connection already, and differences.

A word stands before them and says how: KEEP or KNOWN, with where the list lies among the LIST_KEYS of the connection;
DELTA, with how many bytes the differences take. These are of each key to the one before, zigzag, 7 bits a byte, the
lower first, at most 8 bytes each; they add up modulo 2^64.
"""

from __future__ import annotations

KEEP, KNOWN, DELTA = 1, 2, 4
LIST_KEYS = 1 << 18  # that a server keeps of one connection: 2 MiB


def says(how: int, place: int = 0, coded: int = 0) -> int:
    """The word."""
    return how | place << 8 | coded << 32
