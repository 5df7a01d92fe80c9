"""Talks to servers until so many frames were heard: `python -m tests.fuzz --frames 10_000_000 --seed 0`.

Exit code 1 with the seed of the story in which a promise was broken; `--seed` with that number begins with it.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback

import psutil

from tests.fuzz.core import watched
from tests.fuzz.corpus import record
from tests.fuzz.story import Story

FRAMES = 20_000  # of a story
SETTLED = 20  # stories after which memory must not grow any more,
MOST_GROWTH_BYTES = 256 << 20  # but for this
SAY_S = 10.0


def main() -> int:
    """Every second story is told to compiled code, the others to Python."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    expected = parser.parse_args()
    corpus, tables = record()
    process = psutil.Process(os.getpid())
    began = output = time.monotonic()
    frames = connections = settled = stories = 0
    while frames < expected.frames:
        seed = expected.seed + stories
        try:
            with watched():
                reported = Story(str(seed), corpus, tables, compiled=seed % 2 == 0).tell(FRAMES)
        except KeyboardInterrupt:
            break
        except BaseException:
            traceback.print_exc()
            sys.stderr.write(f"a promise was broken; again: python -m tests.fuzz --frames 1 --seed {seed}\n")
            return 1
        frames, connections, stories = frames + reported.frames, connections + reported.connections, stories + 1
        used = process.memory_info().rss
        settled = used if stories == SETTLED else settled
        if settled and used > settled + MOST_GROWTH_BYTES:
            sys.stderr.write(f"memory has grown from {settled:,} bytes to {used:,} in {stories} stories\n")
            return 1
        if time.monotonic() - output > SAY_S or frames >= expected.frames:
            output = time.monotonic()
            rate = frames / (output - began)
            sys.stdout.write(
                f"{frames:,} frames on {connections:,} connections in {stories} stories, {rate:,.0f} a second, "
                f"{used >> 20} MiB: no promise broken\n"
            )
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
