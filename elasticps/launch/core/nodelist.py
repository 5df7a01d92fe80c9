"""Reads SLURM's lists of machines, such as `node[01-03,7],login`. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product

NODES_MAX = 65_536  # of one list: SLURM's own limit for one range
_GROUP = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")


def expand(text: str) -> tuple[str, ...]:
    """Returns the names in a list of machines, in its order.

    In brackets stand numbers and ranges of them, zeros in front count: `n[08-10]` is n08, n09, n10. A name may have
    several brackets: the last one counts fastest. Raises ValueError for what is no such list, and for more than
    `NODES_MAX` machines.
    """
    found: list[str] = []
    for entry in _entries(text):
        parts = _GROUP.split(entry)  # text and the inside of brackets, in turns
        if any(bracket in part for part in parts[::2] for bracket in "[]"):
            raise ValueError(f"{text!r:.200} is no list of machines: its brackets do not fit")
        choices = [[part] if at % 2 == 0 else _numbers(text, part, NODES_MAX - len(found)) for at, part in
                   enumerate(parts)]  # fmt: skip
        for name in product(*choices):
            if len(found) == NODES_MAX:
                raise ValueError(f"{text!r:.200} names more than {NODES_MAX} machines")
            found.append("".join(name))
    return tuple(found)


def _entries(text: str) -> Iterator[str]:
    """Yields the parts between commas that stand in no brackets."""
    depth, begin = 0, 0
    for at, letter in enumerate(f"{text},"):
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth <= 0:
            entry = text[begin:at].strip()
            if not entry or any(sign.isspace() for sign in entry):
                raise ValueError(f"{text!r:.200} is no list of machines: a name is missing, or has a space in it")
            yield entry
            begin = at + 1
    if depth:
        raise ValueError(f"{text!r:.200} is no list of machines: its brackets do not fit")


def _numbers(text: str, inside: str, most: int) -> list[str]:
    found: list[str] = []
    for part in inside.split(","):
        match = _RANGE.fullmatch(part)
        first, last = (match[1], match[2] or match[1]) if match else ("1", "0")
        if int(first) > int(last):
            raise ValueError(f"{text!r:.200} is no list of machines: {part!r:.40} is neither a number nor a range")
        if int(last) - int(first) >= most - len(found):
            raise ValueError(f"{text!r:.200} names more than {NODES_MAX} machines")
        found += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return found
