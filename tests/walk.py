"""Which functions run, in which order, for one call of user code: a trace that counts calls, files and crossings.

    with LocalCluster(servers=1, replicas=1) as cluster, traced() as trace, connect(cluster.url) as ps:
        walk = trace.fewest(lambda: ps.push({table: (keys, grads)}).result())
        walk.calls, walk.files, walk.crossings

What counts: a *call* is a Python function of the four packages that begins (a generator: each time it goes on; a
compiled function: its call from Python), in any thread that began while `traced` was open, or in the caller's own.
*Files* are the distinct ones of these functions. A *crossing* is a call whose caller, the innermost function of the
four packages that is running in that thread, stands in another file; the way back is not counted again. Other code
(numpy, the standard library) is looked through. A push to one server took 69 calls in 21 files with 40 crossings by
this definition before the client was put in order, and one to three servers with two replicas 105, 21 and 68.

`fewest` runs the call many times and takes the shortest walk: in steady state, without what other threads do now and
then (looking for broken links, keeping a lease).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PACKAGES = ("chaos", "coordinator", "elasticps", "replication")
_FOLDERS = tuple(f"{ROOT / package}/" for package in PACKAGES)


class Call(NamedTuple):
    """A function that begins. depth: how many functions of the packages are running around it, in its thread."""

    thread: int
    depth: int
    file: str  # below the repository's root
    function: str
    crosses: bool


class Walk(NamedTuple):
    """The functions of one call of user code."""

    steps: tuple[Call, ...]

    @property
    def calls(self) -> int:
        """The number of functions that began."""
        return len(self.steps)

    @property
    def files(self) -> int:
        """The number of files of these functions."""
        return len({step.file for step in self.steps})

    @property
    def crossings(self) -> int:
        """The number of calls that go to another file."""
        return sum(step.crosses for step in self.steps)

    def without(self, function: str) -> Walk:
        """The same without the calls of a function and all that they call: what a thread does by itself meanwhile."""
        inside: dict[int, int] = {}  # by thread, the depth of such a call that is running
        left = []
        for step in self.steps:
            if step.depth <= inside.get(step.thread, -1):
                del inside[step.thread]
            if step.thread not in inside:
                if step.function == function:
                    inside[step.thread] = step.depth
                else:
                    left.append(step)
        return Walk(tuple(left))


class Trace:
    """Records calls while a walk is measured."""

    def __init__(self) -> None:
        self._recording = False
        self._steps: list[Call] = []
        self._running: dict[int, list[str]] = {}  # by thread, the files of the functions that are running

    def profile(self, frame: FrameType, event: str, argument: object) -> None:
        """Records calls as a callback of `sys.setprofile`."""
        if not self._recording or event not in ("call", "return"):
            return
        file = frame.f_code.co_filename
        if not file.startswith(_FOLDERS):
            return
        thread = threading.get_ident()
        running = self._running.setdefault(thread, [])
        if event == "return":
            if running:
                running.pop()
            return
        crosses = bool(running) and running[-1] != file
        name = str(Path(file).relative_to(ROOT))
        self._steps.append(Call(thread, len(running), name, frame.f_code.co_qualname, crosses))
        running.append(file)

    def once(self, call: Callable[[], object]) -> Walk:
        """The walk of one run of `call`."""
        self._steps, self._running, self._recording = [], {}, True
        try:
            call()
        finally:
            self._recording = False
        return Walk(tuple(self._steps))

    def fewest(self, call: Callable[[], object], *, warm_up: int = 20, runs: int = 30) -> Walk:
        """The walk with the fewest calls of many runs, after some that are not looked at."""
        for _ in range(warm_up):
            call()
        return min((self.once(call) for _ in range(runs)), key=lambda walk: walk.calls)


@contextmanager
def traced() -> Iterator[Trace]:
    """A trace of this thread, and of all threads that begin meanwhile."""
    trace = Trace()
    threading.setprofile(trace.profile)
    sys.setprofile(trace.profile)
    try:
        yield trace
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def measure(servers: int, replicas: int) -> Iterator[tuple[str, Walk]]:
    """Walks of a push and of a pull of 64 rows, against a cluster of real processes."""
    import numpy as np

    import elasticps as eps
    from elasticps.local import LocalCluster

    keys, grads = np.arange(64), np.ones((64, 8), np.float32)
    with (
        LocalCluster(servers=servers, replicas=replicas) as cluster,
        traced() as trace,
        eps.connect(cluster.url, worker="walker") as ps,
    ):
        table = ps.table("walked", dim=8, optimizer=eps.Adagrad(lr=0.1))
        yield "push", trace.fewest(lambda: ps.push({table: (keys, grads)}).result())
        yield "pull", trace.fewest(lambda: table.pull(keys))


PAGE = ROOT / "docs" / "internals" / "walk.md"
HEAD = """# A push, a pull and a step of torch, function by function

Written by `python -m tests.walk` from a trace of real processes; do not edit. Each line is a function that begins, with
`→` where it stands in another file than its caller. `tests/test_walk.py` fails when a push crosses files more often
than the contract allows, and `tests/torch/test_walk.py` when a step of torch does. Servers answer while the worker
waits in `LinkDriver.wait`: [their half of a push](#the-servers-half-of-a-push) is the last section, written by hand.
"""

BY_HAND = "## The server's half of a push"  # compiled functions leave no trace; this section stays as it is


OF_A_STEP = """
A collection of three tables, and four dense tensors. Only calls that cross files are shown, and those that torch makes.
All tables of a message are checked in one function and laid out together, so most of what is left does not grow with
their number. It is two messages to each server: the pull of the forward pass; and the push, with the pull of the dense
weights. Each passes three files on its way out, and its answer five on the way back.
"""


def section(name: str, servers: int, walk: Walk, about: str = "", *, crossings_only: bool = False) -> str:
    """A walk as Markdown."""
    title = f"## A {name}, {servers} server{'s' * (servers > 1)}"
    figures = f"{walk.calls} calls, {walk.files} files, {walk.crossings} crossings."
    mark = {True: "→ ", False: "  "}
    shown = [step for step in walk.steps if step.crosses or not step.depth or not crossings_only]
    lines = [f"{'  ' * step.depth}{mark[step.crosses]}{step.function}   ({step.file})" for step in shown]
    return "\n".join([title, "", figures, about, "```text", *lines, "```", ""])


def main() -> None:
    """Writes the walks of a push and of a pull: one server, then three with two copies of each range; and of a step of
    torch."""
    from tests.torch.test_walk import walk_of_a_step

    parts = [
        section(name, servers, walk)
        for servers, replicas in ((1, 1), (3, 2))
        for name, walk in measure(servers, replicas)
        if servers == 1 or name == "push"
    ]
    parts.append(section("step of torch", 3, walk_of_a_step(), OF_A_STEP, crossings_only=True))
    by_hand = "".join(PAGE.read_text("utf-8").partition(BY_HAND)[1:])
    PAGE.write_text("\n".join([HEAD, *parts, by_hand]))
    sys.stdout.write("".join(line + "\n" for part in parts for line in part.splitlines() if "crossings" in line))


if __name__ == "__main__":
    main()
