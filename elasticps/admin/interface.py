"""What the admin service asks of a server: protocols, and the values that they exchange."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from coordinator.core.view import ServerInfo
from replication.step_records import StepRecord

MAX_URL = 4096


class MarkedRange(NamedTuple):
    """A range at a mark: its sequence number, the digest of its rows, and the progress of every worker in it."""

    seq: int
    digest: bytes
    workers: tuple[int, ...]
    progress: tuple[int, ...]


class WrittenFile(NamedTuple):
    """A complete file of a checkpoint, with rows of one table in some ranges. header: bytes of its head, as safetensors
    has it; blake2b: in hexadecimal."""

    path: str
    bytes: int
    header: int
    rows: int
    blake2b: str
    table: int
    ranges: tuple[int, ...]


class Writing(NamedTuple):
    """How far a server has written its ranges of a cut. failed: why it gave up, or ""."""

    ranges_done: int
    files: Sequence[WrittenFile]
    failed: str = ""


class WorkerHeld(NamedTuple):
    """What a worker reports as it holds: all its steps up to `clock` are committed, and it has pushed none later.
    digest: of its progress in all ranges but those that came back from a checkpoint in a view up to `epoch`."""

    clock: int
    epoch: int
    digest: int


class CutTaken(NamedTuple):
    """The state at a cut of ranges in which it is equal. clocks: progress by worker, as in `replication.progress`;
    closed: the last closed round of each application; waiting_shares: (application, round, worker) of shares whose
    round was still open."""

    ranges: tuple[int, ...]
    clocks: Mapping[int, int]
    closed: Mapping[str, int]
    waiting_shares: Sequence[tuple[str, int, int]] = ()


class CutState(NamedTuple):
    """A cut as one server has it, in the ranges in which it logged the cut and which it writes. newest: the highest
    number of any cut that the server knows; homes: by group range, rounds and shards of its application; records: of
    sparse steps, by worker, of workers that have left and whose home is among the ranges."""

    incarnation: int
    epoch: int
    newest: int
    taken: Sequence[CutTaken]
    homes: Mapping[int, Mapping[str, Any]]
    records: Sequence[tuple[int, StepRecord]] = ()


class CutWritten(NamedTuple):
    """How far a server has written its part of a cut. ranges: in how many ranges it logged the cut, of those it still
    has; writing: None if it knows nothing of the cut."""

    incarnation: int
    ranges: int
    writing: Writing | None


class CutInterface(Protocol):
    """A server's part in consistent cuts."""

    def hold(self, cut: int, hold_s: float) -> bool:
        """Makes all workers hold; False if that time is over, or a newer cut is being taken."""

    def held(self, cut: int) -> Mapping[int, WorkerHeld]:
        """The workers that hold, and what they report."""

    def release(self, cut: int) -> None:
        """Lets workers go on."""

    async def take(self, cut: int, since: int, url: str) -> bool:
        """Logs the cut in the ranges headed here; False: ask again."""

    def state(self, cut: int) -> CutState:
        """Reports the state at the cut."""

    async def written(self, cut: int, wait_s: float) -> CutWritten:
        """Starts to write the cut if that has not begun; reports how far it is, when it is done or after `wait_s`."""


class RestoreSpec(NamedTuple):
    """What is to be restored from a checkpoint.

    tables: (id in the checkpoint, id here). whole: clocks, rounds and shards, too. recovery: only ranges that have
    lost all replicas. specs: then those of all tables; one that the checkpoint lacks has id 0 there. floors: by worker,
    the clock up to which its steps count as done there at least."""

    url: str
    cut: int
    tables: tuple[tuple[int, int], ...]
    whole: bool
    recovery: bool = False
    specs: tuple[str, ...] = ()
    floors: tuple[tuple[int, int], ...] = ()


class RestoreProgress(NamedTuple):
    """How far a restore is on one server.

    ranges: those restored and committed. rows: restored since it began. taken: ids of tables that are in use. failed:
    why it ended, or "". headed: how many ranges are headed here. workers: those known in any of these; least: for
    each, the least clock in them; acknowledged: for each, the clock up to which it knows its steps to be committed.
    rounds: whether there are synchronous rounds. records: of sparse steps, by worker, of workers that have left, and
    whose home is headed here; progress: of each worker that was named, in each of `ranges`, which are then those that
    are headed here."""

    ranges: tuple[int, ...]
    rows: int
    taken: tuple[int, ...]
    failed: str
    headed: int = 0
    workers: tuple[int, ...] = ()
    least: tuple[int, ...] = ()
    acknowledged: tuple[int, ...] = ()
    rounds: bool = False
    records: tuple[tuple[int, StepRecord], ...] = ()
    progress: tuple[int, ...] = ()


class RestoreInterface(Protocol):
    """A server's part in restoring a checkpoint."""

    def look(self, tables: Iterable[int], named: Iterable[int] = ()) -> RestoreProgress:
        """Reports which of these table ids are in use, and how far workers are here; of those named in each range."""

    def go_on(self, serial: int, spec: RestoreSpec, done: bytes = b"") -> RestoreProgress:
        """Starts a restore or continues it, and reports how far it is. serial: number of the attempt; lower ones than
        heard, and those that have ended, are refused. done: ranges that others have restored, as bits, lowest first."""

    async def end(self, serial: int, dropped: Iterable[int]) -> bool:
        """Ends a restore: nothing of it is applied later, and these tables are dropped. False: the view has changed,
        ask again."""


class AdminInterface(Protocol):
    """A server, as the admin service sees it."""

    @property
    def cuts(self) -> CutInterface: ...
    @property
    def restoring(self) -> RestoreInterface: ...
    @property
    def epoch(self) -> int: ...
    @property
    def me(self) -> ServerInfo: ...
    @property
    def acknowledged(self) -> Mapping[int, int]:
        """By worker, the clock up to which it has been told that its steps are committed."""

    def cluster_known(self) -> Mapping[str, Any]:
        """The fields of ClusterResponse in admin.proto."""

    def status(self) -> Mapping[str, Any]:
        """The fields of StatusResponse in admin.proto."""

    def activity(self) -> Mapping[str, Any]:
        """The fields of ActivityResponse in admin.proto."""

    def tables(self) -> Sequence[Mapping[str, Any]]:
        """The fields of TableStatus in admin.proto, for each table."""

    async def hot(self, seconds: float) -> Mapping[str, Any]:
        """The fields of HotResponse in admin.proto, sampled for `seconds`."""

    async def mark(self, mark: int) -> bool:
        """Makes every replica of the ranges headed here note their digests; False if the view changed meanwhile."""

    def marked(self, mark: int) -> Mapping[int, MarkedRange]:
        """What this replica noted at a mark, by range."""
