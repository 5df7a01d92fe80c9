"""Records of this user's local clusters in the file system, by which `status` and `down` find them."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from coordinator.core.names import check_name
from coordinator.core.url import parse
from elasticps.errors import ConfigError, Timeout
from elasticps.local import supervisor
from elasticps.system import temporary

_FILE = supervisor.RECORD
_FORMAT = 1
_PID_MAX = (1 << 31) - 1  # what the kernel's calls take


@dataclass(frozen=True)
class ProcessEntry:
    """One process of a recorded cluster; `role` is "etcd", "coordinator", "server", or "owner" (who started it)."""

    name: str
    role: str
    pid: int
    moment: str

    @property
    def running(self) -> bool:
        return supervisor.is_running(self.pid, self.moment)


@dataclass(frozen=True)
class Record:
    """A cluster as its state file tells it. The owner of a detached cluster has ended, and is not listed.

    Servers may be listed that others than the owner have started: they end with the cluster too.
    """

    name: str
    url: str  # "" while etcd is not there yet
    processes: tuple[ProcessEntry, ...]
    server_options: tuple[str, ...] = ()  # what every server is started with
    environment: Mapping[str, str] = field(default_factory=dict)  # for servers, beside that of who starts them
    born: str = ""  # what no other cluster has, be it one of the same name

    @property
    def owner(self) -> ProcessEntry | None:
        return next((p for p in self.processes if p.role == "owner" and p.running), None)

    @property
    def running(self) -> bool:
        return any(p.running for p in self.processes)

    @property
    def servers(self) -> tuple[ProcessEntry, ...]:
        """The servers that run."""
        return tuple(p for p in self.processes if p.role == "server" and p.running)


def state_root(environment: Mapping[str, str] = os.environ) -> Path:
    """The folder that holds a folder per cluster: in the user's run-time folder if that can be written, else where
    $XDG_STATE_HOME says, else ~/.local/state/elasticps."""
    runtime, given = environment.get("XDG_RUNTIME_DIR", ""), environment.get("XDG_STATE_HOME", "")
    if runtime and os.access(runtime, os.W_OK | os.X_OK):
        return Path(runtime) / "elasticps"
    if given:
        return Path(given).absolute() / "elasticps"
    try:
        return Path.home() / ".local" / "state" / "elasticps"
    except RuntimeError:  # nobody says where home is
        raise ConfigError(
            "there is no home folder for what runs here; name a folder that can be written in XDG_STATE_HOME"
        ) from None


def _say_where(root: Path) -> str:
    """Returns what to do if `root` is unusable. A run-time folder that can be written overrides XDG_STATE_HOME."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    variable = "XDG_RUNTIME_DIR" if runtime and root.parent == Path(runtime) else "XDG_STATE_HOME"
    return f"name a folder that can be written in {variable}"


def folder_of(name: str, root: Path | None = None) -> Path:
    """Returns the folder in which the cluster called `name` keeps its state, data and logs."""
    try:
        return (root or state_root()) / check_name("cluster", name)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def read(folder: Path) -> Record | None:
    """Reads the record in `folder`; None if there is none, ConfigError if it cannot be read."""
    file = folder / _FILE
    try:
        return _record(json.loads(file.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        why = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise ConfigError(
            f"the state file {file} cannot be read: {why}; when nothing of that cluster runs any more, remove {folder}"
        ) from None


def _record(data: Any) -> Record:
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        raise ValueError("it was written by another version of elasticps, or not by elasticps")
    check_name("cluster", data["name"])
    if data["url"] != "":
        parse(str(data["url"]))
    processes = tuple(_entry(**entry) for entry in data["processes"])
    options, environment = tuple(data.get("server_options", ())), dict(data.get("environment", {}))
    return Record(data["name"], data["url"], processes, options, environment, data.get("born", ""))


def _entry(name: Any, role: Any, pid: Any, moment: Any) -> ProcessEntry:
    if not (isinstance(pid, int) and 0 < pid <= _PID_MAX and all(isinstance(x, str) for x in (name, role, moment))):
        raise ValueError(f"there is no process {name!r} with the id {pid!r}")
    return ProcessEntry(name, role, pid, moment)


def write(folder: Path, record: Record) -> None:
    """Replaces the record in `folder` in one step: a reader sees the old or the new one."""
    text = json.dumps({"format": _FORMAT, **asdict(record)}, indent=1) + "\n"
    temporary.replace_file(folder / _FILE, text.encode())


def update(folder: Path, change: Callable[[Record], Record]) -> Record:
    """Changes the record in `folder`; nobody else's change is lost. ConfigError if the cluster has ended."""
    gone = ConfigError(f"the local cluster of {folder} has ended")
    try:
        with locked(folder):
            record = read(folder)
            if record is None:
                raise gone
            record = change(record)
            write(folder, record)
            return record
    except FileNotFoundError:  # its folder was removed meanwhile
        raise gone from None


def records(root: Path | None = None) -> list[Record]:
    """Returns all recorded clusters by name, running or not, without those whose records cannot be read."""
    return survey(root)[0]


def survey(root: Path | None = None) -> tuple[list[Record], list[str]]:
    """All recorded clusters by name, and an error text for each record, or the whole folder, that cannot be read."""
    root = root or state_root()
    found: list[Record] = []
    unreadable: list[str] = []
    try:
        with os.scandir(root) as entries:  # `Path.glob` finds nothing, and says nothing, where it may not look
            folders = sorted(Path(entry.path) for entry in entries if entry.is_dir())
    except FileNotFoundError:
        return [], []
    except OSError as error:
        return [], [f"cannot look for local clusters in {root}: {error.strerror}; {_say_where(root)}"]
    for folder in folders:
        try:
            if (record := read(folder)) is not None:
                found.append(record)
        except ConfigError as error:
            unreadable.append(str(error))
    return found, unreadable


def started_here(url: str, root: Path | None = None) -> Record | None:
    """The recorded local cluster of that URL, None if it is none of them. ValueError for an unusable URL."""
    url_parts = parse(url)
    for record in records(root):
        found = parse(record.url) if record.url else None
        if found and found.cluster == url_parts.cluster and set(found.endpoints) & set(url_parts.endpoints):
            return record
    return None


def begin(folder: Path, name: str) -> Record:
    """Writes into `folder` the record of a new cluster, with this process as its owner."""
    record = Record(name, "", (this_process(),), born=secrets.token_hex(8))
    write(folder, record)
    return record


def claim(folder: Path) -> Record:
    """Makes `folder` for a new cluster that this process owns. ConfigError if one of that name is running; what a
    cluster that died has left there is removed."""
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        (folder.parent / ".lock").open("a").close()
    except OSError as error:
        raise ConfigError(f"cannot write to {folder.parent}: {error.strerror}; {_say_where(folder.parent)}") from None
    with locked(folder.parent):
        if folder.exists():
            old = read(folder)
            if old is not None and old.running:
                raise ConfigError(
                    f"a local cluster called {folder.name!r} is running at {old.url or 'a place not yet known'}; "
                    f"end it with: elasticps down --name {folder.name}"
                )
            remove(folder)
        folder.mkdir(mode=0o700)
        return begin(folder, folder.name)


def this_process() -> ProcessEntry:
    """The entry of the process that runs this."""
    pid = os.getpid()
    return ProcessEntry("owner", "owner", pid, supervisor.started_at(pid) or "")


def end(folder: Path, record: Record, *, kill_after_s: float = 10.0) -> None:
    """Ends the recorded cluster. Its owner does that itself if it is there; else every process that still is the one
    recorded is ended here, etcd last, and the folder removed."""
    if (owner := record.owner) is not None:
        supervisor.send(owner.pid, owner.moment, signal.SIGTERM)
        deadline = time.monotonic() + 3 * kill_after_s
        while owner.running:
            if time.monotonic() > deadline:
                raise Timeout(
                    f"cluster {record.name!r} belongs to process {owner.pid}, which was asked to end and has not; "
                    "end that process, then try again"
                )
            time.sleep(0.02)
    while True:
        for role in (
            "coordinator",
            "server",
            "etcd",
        ):  # the coordinator first: nobody plans for servers that are ending
            supervisor.end_all(
                [(p.pid, p.moment) for p in record.processes if p.role == role], kill_after_s=kill_after_s
            )
        now = _remove_if_ended(folder, record.born)
        if now is None:
            return
        record = now  # somebody was adding servers


def _remove_if_ended(folder: Path, born: str) -> Record | None:
    """Removes the folder if nothing of that cluster runs, and returns None; else returns the record of what runs. None,
    too, if the folder is another cluster's by now."""
    # Both locks: no cluster begins here meanwhile, and nobody adds a server to this one.
    with locked(folder.parent), suppress(FileNotFoundError), locked(folder):
        now = read(folder)
        if now is None or now.born != born:
            return None
        if now.running:
            return now
        remove(folder)
    return None


def remove(folder: Path) -> None:
    """Removes the folder of a cluster that has ended; refuses a folder that is not a cluster's."""
    if not (folder / _FILE).exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty and holds no cluster of elasticps; remove or rename it first")
    shutil.rmtree(folder)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Locks the record in `folder` for changes. FileNotFoundError if there is no such folder."""
    with (folder / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
