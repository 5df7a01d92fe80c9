"""Fixtures of all tests: folders, etcd, clusters of real processes, and a check for leftovers."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import psutil
import pytest
from _pytest.nodeid import NodeId
from hypothesis import HealthCheck, settings

from tests import waiting

if TYPE_CHECKING:
    from elasticps.local import LocalCluster

# `make test` tries the same examples every time; `--hypothesis-profile=random` (`make soak`) more, and others in each
# run. How long an example takes says something about the machine, not about the code.
settings.register_profile("fixed", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
_FIXED = settings.get_profile("fixed")
settings.register_profile("random", _FIXED, derandomize=False, max_examples=1000, print_blob=True)
settings.load_profile("fixed")

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # hundreds of processes would each compile two hundred modules

# Threads of OpenMP wait for each other awake: beside other processes a small model's step takes ten times the CPU time.
os.environ.setdefault("OMP_NUM_THREADS", "1")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background: what tests start would ignore Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)

_MARK = "ELASTICPS_TEST_RUN"


_FIRST = [
    "e2e/", "sim/test_stories.py", "sim/test_planted.py", "sim/", "demo/", "torch/test_end_to_end.py", "launch/",
    "chaos/test_runs.py", "local/test_cluster.py", "deploy/test_containers.py", "cli/test_up_down.py",
    "server/test_process.py", "serving/", "publishing/", "ray/", "frameworks/", "fuzz/", "metrics/test_scrape.py",
    "benchmarks/", "test_docs.py",
]  # fmt: skip
"""Files and folders that take long: begun last, they would leave all processes but one idle."""

_MIXED = 3
"""How many of these are mixed: tests of `e2e` wait for processes most of the time, stories for nothing."""

_APART = ("sim/test_stories.py", "sim/test_planted.py")
"""Files whose tests share nothing, and take long: each goes to whichever process is free. So does each test of
`e2e` that has a cluster of its own."""

_SHARED_CLUSTERS = 2
"""How many clusters tests of `e2e` share, each in one process of the run. Three at once, beside clusters of single
tests, made servers of a machine with two cores silent for so long that they were left out."""


def pytest_configure(config: pytest.Config) -> None:
    """Groups are handed out to processes in the order of the tests, and not by how many tests they have."""
    config.option.loadscopereorder = False


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Iterator[None]:
    """Has one process of a run compile the tests where nothing has compiled them yet: begun together, each would spend
    11 s on the same files."""
    with Path(__file__).open() as lock:
        if "PYTEST_XDIST_WORKER" in os.environ and not sys.dont_write_bytecode:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if any(Path(__file__).parent.glob("wire/__pycache__/test_*")):  # of the last folder
                fcntl.flock(lock, fcntl.LOCK_UN)
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begins long tests first, and groups tests that have to run in one process: those of a file, and those that share
    one of the clusters of `e2e`."""

    root = Path(__file__).parent.as_posix() + "/"
    paths = {item: item.path.as_posix().removeprefix(root) for item in items}

    def turn(item: pytest.Item) -> int:
        return next((i for i, start in enumerate(_FIRST) if paths[item].startswith(start)), len(_FIRST))

    items.sort(key=turn)
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    of_turn, begun = Counter(map(turn, items)), Counter[int]()

    def mixed_turn(item: pytest.Item) -> float:
        begun[turn(item)] += 1
        return begun[turn(item)] / of_turn[turn(item)] if turn(item) < _MIXED else turn(item)

    items.sort(key=mixed_turn)
    shared = Counter(path for item, path in paths.items() if _shares_a_cluster(item, path))
    clusters = _spread(shared)
    for item, path in paths.items():
        if _shares_a_cluster(item, path):
            group = f"e2e-{clusters[path]}"
        elif path.startswith(_APART) or (path.startswith("e2e/") and not _shares_a_fixture(item)):
            continue
        else:
            group = path
        # What xdist does for marks of groups; version 3.8 does it where pytest 9.2 no longer looks.
        item._id = NodeId.parse(f"{item.nodeid}@{group}")


def _shares_a_cluster(item: pytest.Item, path: str) -> bool:
    return path.startswith("e2e/") and "cluster" in getattr(item, "fixturenames", ())


def _shares_a_fixture(item: pytest.Item) -> bool:
    """Returns whether the test uses a fixture that its file makes once."""
    info = getattr(item, "_fixtureinfo", None)
    return info is not None and any(found[-1].scope == "module" for found in info.name2fixturedefs.values())


def _spread(tests: Counter[str]) -> dict[str, int]:
    """A cluster for each file, so that each cluster has about as many tests."""
    load = [0] * _SHARED_CLUSTERS
    chosen = {}
    for path, count in sorted(tests.items(), key=lambda file: (-file[1], file[0])):
        chosen[path] = load.index(min(load))
        load[chosen[path]] += count
    return chosen


@pytest.fixture(scope="session", autouse=True)
def kernels_are_compiled() -> None:
    """Before any test: the first of them would wait for a compiler, longer than it waits for an answer."""
    from elasticps.warm import warm

    warm()


def pytest_unconfigure() -> None:
    """gRPC's asyncio side keeps every loop that it has seen and, as the process ends, calls into those that tests have
    closed, which asyncio would log."""
    logging.getLogger("asyncio").disabled = True


@pytest.fixture(autouse=True)
def logs_are_written_where_they_were() -> Iterator[None]:
    """A command that a test runs here sends the whole process's log to its own standard error, which is closed
    afterwards: the next line, if only gRPC's as the process ends, would be an error of logging."""
    root = logging.getLogger()
    level, before = root.level, set(root.handlers)
    yield
    for handler in set(root.handlers) - before:
        root.removeHandler(handler)
    root.setLevel(level)


@pytest.fixture(scope="session", autouse=True)
def no_process_outlives_the_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Gives the run its own temporary and state folders, and fails it if a process or a temporary folder outlives it.

    Every process that descends from this one inherits a mark, so that one that has been cut loose is found as well.
    """
    mark = uuid.uuid4().hex
    folder = tmp_path_factory.mktemp("tmp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(_MARK, mark)
        patch.setenv("TMPDIR", str(folder))
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("run")))
        patch.setenv("ETCD_UNSAFE_NO_FSYNC", "true")  # a disk that others keep busy held it up for seconds
        patch.setattr(tempfile, "tempdir", str(folder))
        yield
        deadline = time.monotonic() + 30
        while (processes := _descendants(mark)) and time.monotonic() < deadline:
            time.sleep(0.05)
        folders = sorted(path.name for path in folder.glob("elasticps-*"))
    if processes or folders:
        pytest.fail(f"left behind: processes {processes}, temporary folders {folders}", pytrace=False)


def _descendants(mark: str) -> list[str]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if process.environ().get(_MARK) != mark:
                continue
            command = " ".join(process.cmdline())
        except (psutil.Error, OSError):
            continue  # it has ended, or is not ours to look at
        if "resource_tracker" not in command:  # Python's own; it ends with us
            found.append(f"{process.pid}: {command}")
    return found


@pytest.fixture(scope="session", autouse=True)
def clusters_share_zygotes(
    no_process_outlives_the_run: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """All clusters that tests start in this process, with one environment, fork from one zygote."""
    from elasticps.local import cluster
    from tests.zygotes import Shared, end

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Shared, "folder", tmp_path_factory.mktemp("zygotes"), raising=False)
        patch.setattr(cluster, "Zygote", Shared)
        yield
    end()


class NewUrl(Protocol):
    """Makes the URL of an unused cluster."""

    def __call__(self, name: str = "test") -> str: ...


class NewCluster(Protocol):
    """Starts a LocalCluster with the arguments given; it ends with the test."""

    def __call__(self, **arguments: Any) -> LocalCluster: ...


@pytest.fixture(scope="session")
def etcd_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """ "host:port" of one etcd that all tests share; use `etcd_url` for a cluster of your own on it."""
    from elasticps.local.etcd import EtcdPlan
    from elasticps.local.process import Process, stop_all

    folder = tmp_path_factory.mktemp("etcd")
    plan = EtcdPlan(folder / "data")
    process = Process.start("etcd", "etcd", plan.command(), folder, plan.environment())
    try:
        process.wait_until(plan.healthy, time.monotonic() + 60)
        yield plan.endpoint
    finally:
        stop_all([process], kill_after_s=5)


@pytest.fixture
def etcd_url(etcd_endpoint: str) -> NewUrl:
    """A factory of URLs of clusters that do not exist yet, all on one etcd."""

    def new(name: str = "test") -> str:
        return f"etcd://{etcd_endpoint}/{name}-{uuid.uuid4().hex[:12]}"

    return new


@pytest.fixture
def local_cluster() -> Iterator[NewCluster]:
    """A factory of clusters of real processes; all of them end with the test."""
    from elasticps.local import LocalCluster

    with ExitStack() as running:
        yield lambda **arguments: running.enter_context(LocalCluster(**arguments))


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool]], None]:
    """Waits until a condition holds; fails the test if it does not within 100 s: a process may have to start first, on
    a machine that is busy."""
    return partial(waiting.eventually, seconds=100.0)


@pytest.fixture
def own() -> Iterator[LocalCluster]:
    """A cluster of three servers that no other test has."""
    from elasticps.local import LocalCluster

    with LocalCluster(servers=3) as cluster:
        yield cluster


@pytest.fixture
def state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own for what `up` records; gone with the test."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "elasticps"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 256 KiB. Skipped where this user may mount none."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this user may mount no disk")
    try:
        yield disk
    finally:  # lazily: a failure's traceback keeps files open
        subprocess.run(["umount", "--lazy", str(disk)], check=True)
