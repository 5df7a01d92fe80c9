"""What the admin service speaks of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from coordinator.core.view import ServerInfo

MAX_URL = 4096


class MarkedRange(NamedTuple):
    """A range at a mark: its sequence number, the digest of its rows, and how far every worker had come in it."""

    seq: int
    digest: bytes
    workers: tuple[int, ...]
    progress: tuple[int, ...]


class WrittenFile(NamedTuple):
    """A file of a checkpoint that is there as a whole: rows of a table, in some ranges. header: bytes of its head, as
    safetensors has it; blake2b: in hexadecimal."""

    path: str
    bytes: int
    header: int
    rows: int
    blake2b: str
    table: int
    ranges: tuple[int, ...]


class Writing(NamedTuple):
    """How far a server has written its ranges of a cut. failed: why it has given up, "" if it has not."""

    ranges_done: int
    files: Sequence[WrittenFile]
    failed: str = ""


class CutTaken(NamedTuple):
    """What there was at a cut, the same in all these ranges. clocks: progress by worker, as in `replication.progress`;
    closed: each application's last round; kept: (application, round, worker) of shares that waited for theirs."""

    ranges: tuple[int, ...]
    clocks: Mapping[int, int]
    closed: Mapping[str, int]
    kept: Sequence[tuple[str, int, int]] = ()


class CutState(NamedTuple):
    """A cut as one server has it, in the ranges that it has logged it in and writes. newest: the highest number that it
    knows of any cut; homes: rounds and shards of the applications that these are the group ranges of, by range."""

    incarnation: int
    epoch: int
    newest: int
    taken: Sequence[CutTaken]
    homes: Mapping[int, Mapping[str, Any]]


class CutWritten(NamedTuple):
    """How far a server is with its part of a cut. ranges: that it has logged it in, and still has; writing: None if it
    knows nothing of it."""

    incarnation: int
    ranges: int
    writing: Writing | None


class CutSubject(Protocol):
    """What takes part in cuts."""

    def hold(self, cut: int, hold_s: float) -> bool:
        """Has all workers hold; False if that is over, or a newer cut is being taken."""

    def held(self, cut: int) -> Mapping[int, int]:
        """The workers that do, and the clocks up to which they have written."""

    def release(self, cut: int) -> None:
        """Has them go on."""

    async def take(self, cut: int, since: int, url: str) -> bool:
        """Logs the cut in the ranges headed here; False: ask again."""

    def state(self, cut: int) -> CutState:
        """What there was at it."""

    async def written(self, cut: int, wait_s: float) -> CutWritten:
        """Has it written, if that has not begun; how far it is, once that is over or after `wait_s`."""


class Wanted(NamedTuple):
    """What is to be brought back from a checkpoint. tables: (id in the checkpoint, id here); whole: clocks, rounds and
    shards too. anew: only ranges that begin anew; specs: then those of all tables, of which the checkpoint may lack
    some, with id 0; floors: by worker, the clocks up to which steps count as done there at least."""

    url: str
    cut: int
    tables: tuple[tuple[int, int], ...]
    whole: bool
    anew: bool = False
    specs: tuple[str, ...] = ()
    floors: tuple[tuple[int, int], ...] = ()


class Restored(NamedTuple):
    """How far it is: ranges that are done, committed; rows since the beginning. taken: ids that cannot be had; failed:
    why it ended, "" if it has not. headed: so many ranges are headed here; workers: those known in all of them; least:
    beside, the least clock in them; told: beside, up to where they know all to be committed; rounds: there are some."""

    ranges: tuple[int, ...]
    rows: int
    taken: tuple[int, ...]
    failed: str
    headed: int = 0
    workers: tuple[int, ...] = ()
    least: tuple[int, ...] = ()
    told: tuple[int, ...] = ()
    rounds: bool = False


class RestoreSubject(Protocol):
    """What brings checkpoints back."""

    def look(self, tables: Iterable[int]) -> Restored:
        """Which of these ids are, or were, tables' here."""

    def go_on(self, serial: int, wanted: Wanted, done: bytes = b"") -> Restored:
        """Begins, or goes on, and says how far it is. serial: of the try; those below what was heard, or that have
        ended, are refused. done: ranges that others have brought back, as bits, the lowest first."""

    async def end(self, serial: int, dropped: Iterable[int]) -> bool:
        """Nothing of it comes from now on; tables are dropped. False: the view has changed, ask again."""


class Subject(Protocol):
    """What these services speak of: a server."""

    @property
    def cuts(self) -> CutSubject: ...

    @property
    def epoch(self) -> int: ...
    @property
    def restoring(self) -> RestoreSubject: ...
    @property
    def me(self) -> ServerInfo: ...
    @property
    def told(self) -> Mapping[int, int]: ...
    def cluster_known(self) -> Mapping[str, Any]:
        """The fields of ClusterResponse in admin.proto."""

    def status(self) -> Mapping[str, Any]:
        """The fields of StatusResponse in admin.proto."""

    def activity(self) -> Mapping[str, Any]:
        """The fields of ActivityResponse in admin.proto."""

    def tables(self) -> Sequence[Mapping[str, Any]]:
        """The fields of TableStatus in admin.proto, for each table."""

    async def hot(self, seconds: float) -> Mapping[str, Any]:
        """The fields of HotResponse in admin.proto, sampled for so long."""

    async def mark(self, mark: int) -> bool:
        """Has every replica of the ranges headed here note their digests; False if the view changed meanwhile."""

    def marked(self, mark: int) -> Mapping[int, MarkedRange]:
        """What this replica found at a mark, by range."""
