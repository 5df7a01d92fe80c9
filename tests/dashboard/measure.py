"""What the page costs, and how fast it is: `python -m tests.dashboard.measure [load] [events] [cpu] [frames]`.

load     bytes of the page, and its first paint in Chromium
events   from a word in etcd, or a kill of a server, to the page that shows it
cpu      of the dashboard and of a server with 0, 5 and 100 viewers, from /proc
frames   a second, with 100 servers, 1,024 ranges in 3 replicas and 300 workers; a server dies every few seconds

Each line is a JSON object. All are of real processes on this machine, but `frames`: it is fed from a made-up cluster.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import pairwise
from socket import create_connection, socket
from typing import Any
from urllib.parse import urlsplit

import numpy as np

import elasticps as eps
from benchmarks.machine import cpu_seconds
from coordinator.connect import open_store
from coordinator.core.keys import NEWEST_CHECKPOINT
from coordinator.core.store import Store
from elasticps.local import LocalCluster
from elasticps.system import background
from tests.dashboard.chromium import chromium, open_page, wait
from tests.dashboard.scene import Scene
from tests.dashboard.staged import Staged

SPAN_S = 20.0
SEEN = """() => { window.seen = 0; const watch = new MutationObserver(() => {
  if (!(SHOWN)) return;
  watch.disconnect();
  requestAnimationFrame(() => { window.seen = Date.now() / 1000; });
}); watch.observe(document.body, { subtree: true, childList: true, attributes: true, characterData: true }); }"""
FRAMES = """(seconds) => new Promise((done) => { const times = []; const end = performance.now() + 1000 * seconds;
  const frame = (t) => { times.push(t); if (t < end) requestAnimationFrame(frame); else done(times); };
  requestAnimationFrame(frame); })"""


def tell(**found: Any) -> None:
    """Prints one line."""
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


@contextmanager
def beside(run: Callable[[threading.Event], None]) -> Iterator[None]:
    """`run(ended)` in a thread, until `ended` is set."""
    ended = threading.Event()
    thread = threading.Thread(target=run, args=(ended,))
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def training(url: str) -> Iterator[None]:
    """A worker that pushes and pulls a little."""

    def train(ended: threading.Event) -> None:
        with eps.connect(url, worker="w0") as ps:
            table = ps.table("items", dim=8, optimizer=eps.SGD(lr=0.1))
            keys = np.arange(500)
            while not ended.wait(0.02):
                ps.push({table: (keys, np.ones((500, 8), np.float32))}).result()

    with beside(train):
        yield


@contextmanager
def dashboard_process(url: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Starts a dashboard in a process of its own; yields its address."""
    command = [sys.executable, "-m", "elasticps", "dashboard", "--url", url, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.terminate()


@contextmanager
def viewers(address: str, number: int) -> Iterator[None]:
    """Opens so many streams and reads them in one thread."""
    where = urlsplit(address)
    with ExitStack() as stack:
        socks: list[socket] = []
        for _ in range(number):
            sock = stack.enter_context(create_connection((where.hostname or "", where.port or 0)))
            sock.sendall(f"GET /api/stream HTTP/1.1\r\nHost: {where.netloc}\r\n\r\n".encode())
            sock.setblocking(False)
            socks.append(sock)

        def read(ended: threading.Event) -> None:
            while not ended.wait(0.1):
                for sock in socks:
                    with suppress(BlockingIOError):
                        sock.recv(1 << 20)

        with beside(read):
            yield


def shares(pids: dict[str, int]) -> dict[str, float]:
    """CPU use of processes in the next seconds, in percent of a core."""
    before, began = {name: cpu_seconds([pid]) for name, pid in pids.items()}, time.monotonic()
    time.sleep(SPAN_S)
    span = time.monotonic() - began
    return {name: round(100 * (cpu_seconds([pid]) - before[name]) / span, 2) for name, pid in pids.items()}


def load() -> None:
    """Bytes of the page, and its first paint."""
    with (
        LocalCluster(servers=3, ranges=64) as cluster,
        dashboard_process(cluster.url) as (_, address),
        chromium() as browser,
    ):
        paints, nbytes = [], 0
        for _ in range(5):
            page, _ = open_page(browser, address)
            page.wait_for_selector("#health.good")
            entries = page.evaluate("performance.getEntriesByType('paint').map((e) => e.startTime)")
            paints.append(max(entries))
            nbytes = page.evaluate(
                "[...performance.getEntriesByType('resource'), ...performance.getEntriesByType('navigation')]"
                ".filter((e) => !e.name.includes('/api/')).reduce((sum, e) => sum + e.transferSize, 0)"
            )
            page.context.close()
        tell(what="load", bytes=nbytes, first_paint_ms=[round(t) for t in paints])


def _put(store: Store, value: bytes) -> None:
    background.run(store.put(NEWEST_CHECKPOINT, value))


def events() -> None:
    """Until the page shows what happened."""
    with (
        LocalCluster(servers=3, ranges=64) as cluster,
        training(cluster.url),
        dashboard_process(cluster.url) as (_, address),
        chromium() as browser,
    ):
        page, _ = open_page(browser, address)
        page.wait_for_selector("#health.good")

        def seen(shown: str, act: Callable[[], object]) -> int:
            page.evaluate(SEEN.replace("SHOWN", shown))
            began = time.time()
            act()
            wait(page, "window.seen")
            return round(1e3 * (float(page.evaluate("window.seen")) - began))

        store, noted = background.run(open_store(cluster.url)), []
        for cut in range(1, 12):
            value = json.dumps({"cut": cut, "time": time.time()}).encode()
            put = partial(_put, store, value)
            if cut == 1:
                put()
                page.wait_for_selector("#newest:has-text('made: 1,')")
            else:
                noted.append(seen(f"document.getElementById('newest').textContent.includes('made: {cut},')", put))
        background.run(store.close())
        killed = []
        for name in ("s0", "s1", "s2"):
            killed.append(seen("document.querySelector('#arcs path[data-state=lost]')", partial(cluster.kill, name)))
            cluster.start_server(name)
            page.wait_for_selector("#arcs path[data-state=lost]", state="detached")
            page.wait_for_selector("#health.good")
        tell(what="events", written_to_etcd_ms=noted, server_killed_ms=killed)


def cpu() -> None:
    """Measures the CPU use of the dashboard, and of a server without and with it."""
    with LocalCluster(servers=3, ranges=64) as cluster:
        with training(cluster.url):
            time.sleep(1)
        pids = {process.name: process.pid for process in cluster.servers}
        tell(what="cpu", dashboard=False, viewers=0, percent=shares(pids))
        with dashboard_process(cluster.url) as (process, address):
            for number in (0, 5, 100):
                with viewers(address, number):
                    tell(what="cpu", dashboard=True, viewers=number, percent=shares({**pids, "dashboard": process.pid}))
        tell(what="cpu", dashboard=False, viewers=0, percent=shares(pids))


def frames() -> None:
    """A second, of a large cluster."""
    scene = Scene(servers=100, ranges=1024, replicas=3, workers=300, zones=4, t0=time.time() - 60)
    scene.tick(60)
    staged = Staged(scene)
    staged.start()
    ended = threading.Event()

    def trouble() -> None:
        for i in range(1000):
            if ended.wait(3):
                return
            name = f"s{17 * i % 100}"
            staged.do(lambda s, name=name: s.kill(name))  # type: ignore[misc]
            for _ in range(20):
                if ended.wait(0.1):
                    return
                staged.do(lambda s: s.plan(level=True))
            staged.do(lambda s, name=name, i=i: s.register(name, zone="z1", incarnation=i + 2), lambda s: s.plan())  # type: ignore[misc]

    thread = threading.Thread(target=trouble)
    with chromium() as browser:
        page, wrong = open_page(browser, staged.address)
        page.wait_for_selector("#workers tbody tr:nth-child(300)")
        thread.start()
        try:
            for place in ("#ring", "#now", "#happened", "#workers"):
                page.evaluate("(place) => document.querySelector(place).scrollIntoView()", place)
                if place == "#ring":
                    page.mouse.move(300, 300)
                times = page.evaluate(FRAMES, 10)
                steps = [1e-3 * (b - a) for a, b in pairwise(times)]
                tell(
                    what="frames", shown=place, a_second=round((len(times) - 1) / (1e-3 * (times[-1] - times[0])), 1),
                    p95_ms=round(1e3 * statistics.quantiles(steps, n=20)[-1], 1), longest_ms=round(1e3 * max(steps)),
                )  # fmt: skip
            assert wrong == []
        finally:
            ended.set()
            thread.join()
            staged.stop()


PARTS: dict[str, Callable[[], None]] = {"load": load, "events": events, "cpu": cpu, "frames": frames}

if __name__ == "__main__":
    for part in sys.argv[1:] or PARTS:
        PARTS[part]()
