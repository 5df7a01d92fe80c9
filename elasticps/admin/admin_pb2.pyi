from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HoldRequest(_message.Message):
    __slots__ = ("cut", "hold_ms")
    CUT_FIELD_NUMBER: _ClassVar[int]
    HOLD_MS_FIELD_NUMBER: _ClassVar[int]
    cut: int
    hold_ms: int
    def __init__(self, cut: _Optional[int] = ..., hold_ms: _Optional[int] = ...) -> None: ...

class HoldResponse(_message.Message):
    __slots__ = ("held",)
    HELD_FIELD_NUMBER: _ClassVar[int]
    held: bool
    def __init__(self, held: _Optional[bool] = ...) -> None: ...

class HeldRequest(_message.Message):
    __slots__ = ("cut",)
    CUT_FIELD_NUMBER: _ClassVar[int]
    cut: int
    def __init__(self, cut: _Optional[int] = ...) -> None: ...

class HeldResponse(_message.Message):
    __slots__ = ("workers", "clocks", "epochs", "digests")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    CLOCKS_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedScalarFieldContainer[int]
    clocks: _containers.RepeatedScalarFieldContainer[int]
    epochs: _containers.RepeatedScalarFieldContainer[int]
    digests: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, workers: _Optional[_Iterable[int]] = ..., clocks: _Optional[_Iterable[int]] = ..., epochs: _Optional[_Iterable[int]] = ..., digests: _Optional[_Iterable[int]] = ...) -> None: ...

class CutRequest(_message.Message):
    __slots__ = ("cut", "since", "url")
    CUT_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    cut: int
    since: int
    url: str
    def __init__(self, cut: _Optional[int] = ..., since: _Optional[int] = ..., url: _Optional[str] = ...) -> None: ...

class CutResponse(_message.Message):
    __slots__ = ("complete",)
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    complete: bool
    def __init__(self, complete: _Optional[bool] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("cut",)
    CUT_FIELD_NUMBER: _ClassVar[int]
    cut: int
    def __init__(self, cut: _Optional[int] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CutStateRequest(_message.Message):
    __slots__ = ("cut",)
    CUT_FIELD_NUMBER: _ClassVar[int]
    cut: int
    def __init__(self, cut: _Optional[int] = ...) -> None: ...

class KeptShare(_message.Message):
    __slots__ = ("app", "round", "worker")
    APP_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    app: str
    round: int
    worker: int
    def __init__(self, app: _Optional[str] = ..., round: _Optional[int] = ..., worker: _Optional[int] = ...) -> None: ...

class CutTaken(_message.Message):
    __slots__ = ("ranges", "workers", "progress", "closed", "kept")
    class ClosedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    RANGES_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    ranges: _containers.RepeatedScalarFieldContainer[int]
    workers: _containers.RepeatedScalarFieldContainer[int]
    progress: _containers.RepeatedScalarFieldContainer[int]
    closed: _containers.ScalarMap[str, int]
    kept: _containers.RepeatedCompositeFieldContainer[KeptShare]
    def __init__(self, ranges: _Optional[_Iterable[int]] = ..., workers: _Optional[_Iterable[int]] = ..., progress: _Optional[_Iterable[int]] = ..., closed: _Optional[_Mapping[str, int]] = ..., kept: _Optional[_Iterable[_Union[KeptShare, _Mapping]]] = ...) -> None: ...

class WrittenFile(_message.Message):
    __slots__ = ("path", "bytes", "header", "rows", "blake2b", "table", "ranges")
    PATH_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    HEADER_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    BLAKE2B_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    path: str
    bytes: int
    header: int
    rows: int
    blake2b: str
    table: int
    ranges: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, path: _Optional[str] = ..., bytes: _Optional[int] = ..., header: _Optional[int] = ..., rows: _Optional[int] = ..., blake2b: _Optional[str] = ..., table: _Optional[int] = ..., ranges: _Optional[_Iterable[int]] = ...) -> None: ...

class SparseStep(_message.Message):
    __slots__ = ("worker", "clock", "committed", "bits")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    BITS_FIELD_NUMBER: _ClassVar[int]
    worker: int
    clock: int
    committed: int
    bits: bytes
    def __init__(self, worker: _Optional[int] = ..., clock: _Optional[int] = ..., committed: _Optional[int] = ..., bits: _Optional[bytes] = ...) -> None: ...

class CutStateResponse(_message.Message):
    __slots__ = ("incarnation", "epoch", "newest", "taken", "homes", "records")
    class HomesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: str
        def __init__(self, key: _Optional[int] = ..., value: _Optional[str] = ...) -> None: ...
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    HOMES_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    epoch: int
    newest: int
    taken: _containers.RepeatedCompositeFieldContainer[CutTaken]
    homes: _containers.ScalarMap[int, str]
    records: _containers.RepeatedCompositeFieldContainer[SparseStep]
    def __init__(self, incarnation: _Optional[int] = ..., epoch: _Optional[int] = ..., newest: _Optional[int] = ..., taken: _Optional[_Iterable[_Union[CutTaken, _Mapping]]] = ..., homes: _Optional[_Mapping[int, str]] = ..., records: _Optional[_Iterable[_Union[SparseStep, _Mapping]]] = ...) -> None: ...

class CutWrittenRequest(_message.Message):
    __slots__ = ("cut", "wait_ms")
    CUT_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    cut: int
    wait_ms: int
    def __init__(self, cut: _Optional[int] = ..., wait_ms: _Optional[int] = ...) -> None: ...

class CutWrittenResponse(_message.Message):
    __slots__ = ("incarnation", "ranges", "writes", "ranges_done", "files", "failed")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    WRITES_FIELD_NUMBER: _ClassVar[int]
    RANGES_DONE_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    ranges: int
    writes: bool
    ranges_done: int
    files: _containers.RepeatedCompositeFieldContainer[WrittenFile]
    failed: str
    def __init__(self, incarnation: _Optional[int] = ..., ranges: _Optional[int] = ..., writes: _Optional[bool] = ..., ranges_done: _Optional[int] = ..., files: _Optional[_Iterable[_Union[WrittenFile, _Mapping]]] = ..., failed: _Optional[str] = ...) -> None: ...

class RestoreRequest(_message.Message):
    __slots__ = ("act", "url", "cut", "old", "new", "whole", "serial", "anew", "specs", "workers", "clocks", "done")
    class Act(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        LOOK: _ClassVar[RestoreRequest.Act]
        GO: _ClassVar[RestoreRequest.Act]
        END: _ClassVar[RestoreRequest.Act]
    LOOK: RestoreRequest.Act
    GO: RestoreRequest.Act
    END: RestoreRequest.Act
    ACT_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    CUT_FIELD_NUMBER: _ClassVar[int]
    OLD_FIELD_NUMBER: _ClassVar[int]
    NEW_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    SERIAL_FIELD_NUMBER: _ClassVar[int]
    ANEW_FIELD_NUMBER: _ClassVar[int]
    SPECS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    CLOCKS_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    act: RestoreRequest.Act
    url: str
    cut: int
    old: _containers.RepeatedScalarFieldContainer[int]
    new: _containers.RepeatedScalarFieldContainer[int]
    whole: bool
    serial: int
    anew: bool
    specs: _containers.RepeatedScalarFieldContainer[str]
    workers: _containers.RepeatedScalarFieldContainer[int]
    clocks: _containers.RepeatedScalarFieldContainer[int]
    done: bytes
    def __init__(self, act: _Optional[_Union[RestoreRequest.Act, str]] = ..., url: _Optional[str] = ..., cut: _Optional[int] = ..., old: _Optional[_Iterable[int]] = ..., new: _Optional[_Iterable[int]] = ..., whole: _Optional[bool] = ..., serial: _Optional[int] = ..., anew: _Optional[bool] = ..., specs: _Optional[_Iterable[str]] = ..., workers: _Optional[_Iterable[int]] = ..., clocks: _Optional[_Iterable[int]] = ..., done: _Optional[bytes] = ...) -> None: ...

class RestoreResponse(_message.Message):
    __slots__ = ("ranges", "rows", "taken", "failed", "complete", "headed", "workers", "least", "told", "rounds", "records", "progress")
    RANGES_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    HEADED_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    LEAST_FIELD_NUMBER: _ClassVar[int]
    TOLD_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    ranges: _containers.RepeatedScalarFieldContainer[int]
    rows: int
    taken: _containers.RepeatedScalarFieldContainer[int]
    failed: str
    complete: bool
    headed: int
    workers: _containers.RepeatedScalarFieldContainer[int]
    least: _containers.RepeatedScalarFieldContainer[int]
    told: _containers.RepeatedScalarFieldContainer[int]
    rounds: bool
    records: _containers.RepeatedCompositeFieldContainer[SparseStep]
    progress: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ranges: _Optional[_Iterable[int]] = ..., rows: _Optional[int] = ..., taken: _Optional[_Iterable[int]] = ..., failed: _Optional[str] = ..., complete: _Optional[bool] = ..., headed: _Optional[int] = ..., workers: _Optional[_Iterable[int]] = ..., least: _Optional[_Iterable[int]] = ..., told: _Optional[_Iterable[int]] = ..., rounds: _Optional[bool] = ..., records: _Optional[_Iterable[_Union[SparseStep, _Mapping]]] = ..., progress: _Optional[_Iterable[int]] = ...) -> None: ...

class MarkRequest(_message.Message):
    __slots__ = ("mark",)
    MARK_FIELD_NUMBER: _ClassVar[int]
    mark: int
    def __init__(self, mark: _Optional[int] = ...) -> None: ...

class MarkResponse(_message.Message):
    __slots__ = ("complete", "epoch")
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    complete: bool
    epoch: int
    def __init__(self, complete: _Optional[bool] = ..., epoch: _Optional[int] = ...) -> None: ...

class MarkedRequest(_message.Message):
    __slots__ = ("mark",)
    MARK_FIELD_NUMBER: _ClassVar[int]
    mark: int
    def __init__(self, mark: _Optional[int] = ...) -> None: ...

class MarkedRange(_message.Message):
    __slots__ = ("range", "seq", "digest", "workers", "clocks")
    RANGE_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    CLOCKS_FIELD_NUMBER: _ClassVar[int]
    range: int
    seq: int
    digest: bytes
    workers: _containers.RepeatedScalarFieldContainer[int]
    clocks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, range: _Optional[int] = ..., seq: _Optional[int] = ..., digest: _Optional[bytes] = ..., workers: _Optional[_Iterable[int]] = ..., clocks: _Optional[_Iterable[int]] = ...) -> None: ...

class ToldClock(_message.Message):
    __slots__ = ("worker", "clock")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    worker: int
    clock: int
    def __init__(self, worker: _Optional[int] = ..., clock: _Optional[int] = ...) -> None: ...

class MarkedResponse(_message.Message):
    __slots__ = ("ranges", "told", "epoch", "incarnation")
    RANGES_FIELD_NUMBER: _ClassVar[int]
    TOLD_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ranges: _containers.RepeatedCompositeFieldContainer[MarkedRange]
    told: _containers.RepeatedCompositeFieldContainer[ToldClock]
    epoch: int
    incarnation: int
    def __init__(self, ranges: _Optional[_Iterable[_Union[MarkedRange, _Mapping]]] = ..., told: _Optional[_Iterable[_Union[ToldClock, _Mapping]]] = ..., epoch: _Optional[int] = ..., incarnation: _Optional[int] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("id", "pid", "address", "admin", "incarnation", "state", "epoch", "ranges_headed", "ranges_held", "rows", "bytes", "connections", "pushes", "pulls", "rows_pushed", "rows_pulled", "refused", "parked", "tables", "uptime_s", "ranges_joining", "log_bytes", "sent_bytes", "memory_used", "memory_mark", "memory_limit", "cpu_s", "clock", "leader_clock", "readers")
    ID_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ADMIN_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RANGES_HEADED_FIELD_NUMBER: _ClassVar[int]
    RANGES_HELD_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    CONNECTIONS_FIELD_NUMBER: _ClassVar[int]
    PUSHES_FIELD_NUMBER: _ClassVar[int]
    PULLS_FIELD_NUMBER: _ClassVar[int]
    ROWS_PUSHED_FIELD_NUMBER: _ClassVar[int]
    ROWS_PULLED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    PARKED_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    RANGES_JOINING_FIELD_NUMBER: _ClassVar[int]
    LOG_BYTES_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_USED_FIELD_NUMBER: _ClassVar[int]
    MEMORY_MARK_FIELD_NUMBER: _ClassVar[int]
    MEMORY_LIMIT_FIELD_NUMBER: _ClassVar[int]
    CPU_S_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    LEADER_CLOCK_FIELD_NUMBER: _ClassVar[int]
    READERS_FIELD_NUMBER: _ClassVar[int]
    id: str
    pid: int
    address: str
    admin: str
    incarnation: int
    state: str
    epoch: int
    ranges_headed: int
    ranges_held: int
    rows: int
    bytes: int
    connections: int
    pushes: int
    pulls: int
    rows_pushed: int
    rows_pulled: int
    refused: int
    parked: int
    tables: int
    uptime_s: float
    ranges_joining: int
    log_bytes: int
    sent_bytes: int
    memory_used: int
    memory_mark: int
    memory_limit: int
    cpu_s: float
    clock: float
    leader_clock: float
    readers: _containers.RepeatedCompositeFieldContainer[AttachedReader]
    def __init__(self, id: _Optional[str] = ..., pid: _Optional[int] = ..., address: _Optional[str] = ..., admin: _Optional[str] = ..., incarnation: _Optional[int] = ..., state: _Optional[str] = ..., epoch: _Optional[int] = ..., ranges_headed: _Optional[int] = ..., ranges_held: _Optional[int] = ..., rows: _Optional[int] = ..., bytes: _Optional[int] = ..., connections: _Optional[int] = ..., pushes: _Optional[int] = ..., pulls: _Optional[int] = ..., rows_pushed: _Optional[int] = ..., rows_pulled: _Optional[int] = ..., refused: _Optional[int] = ..., parked: _Optional[int] = ..., tables: _Optional[int] = ..., uptime_s: _Optional[float] = ..., ranges_joining: _Optional[int] = ..., log_bytes: _Optional[int] = ..., sent_bytes: _Optional[int] = ..., memory_used: _Optional[int] = ..., memory_mark: _Optional[int] = ..., memory_limit: _Optional[int] = ..., cpu_s: _Optional[float] = ..., clock: _Optional[float] = ..., leader_clock: _Optional[float] = ..., readers: _Optional[_Iterable[_Union[AttachedReader, _Mapping]]] = ...) -> None: ...

class AttachedReader(_message.Message):
    __slots__ = ("name", "app", "age_s", "unread_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    APP_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    UNREAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    app: str
    age_s: float
    unread_bytes: int
    def __init__(self, name: _Optional[str] = ..., app: _Optional[str] = ..., age_s: _Optional[float] = ..., unread_bytes: _Optional[int] = ...) -> None: ...

class ActivityRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ActivityResponse(_message.Message):
    __slots__ = ("incarnation", "received_bytes", "workers", "clocks", "busy_s", "bounds_s", "push", "pull", "uses")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    CLOCKS_FIELD_NUMBER: _ClassVar[int]
    BUSY_S_FIELD_NUMBER: _ClassVar[int]
    BOUNDS_S_FIELD_NUMBER: _ClassVar[int]
    PUSH_FIELD_NUMBER: _ClassVar[int]
    PULL_FIELD_NUMBER: _ClassVar[int]
    USES_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    received_bytes: int
    workers: _containers.RepeatedScalarFieldContainer[int]
    clocks: _containers.RepeatedScalarFieldContainer[int]
    busy_s: float
    bounds_s: _containers.RepeatedScalarFieldContainer[float]
    push: _containers.RepeatedScalarFieldContainer[int]
    pull: _containers.RepeatedScalarFieldContainer[int]
    uses: _containers.RepeatedCompositeFieldContainer[WorkerUse]
    def __init__(self, incarnation: _Optional[int] = ..., received_bytes: _Optional[int] = ..., workers: _Optional[_Iterable[int]] = ..., clocks: _Optional[_Iterable[int]] = ..., busy_s: _Optional[float] = ..., bounds_s: _Optional[_Iterable[float]] = ..., push: _Optional[_Iterable[int]] = ..., pull: _Optional[_Iterable[int]] = ..., uses: _Optional[_Iterable[_Union[WorkerUse, _Mapping]]] = ...) -> None: ...

class WorkerUse(_message.Message):
    __slots__ = ("worker", "clock", "committed", "sent", "received", "wanted", "kept", "shards")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    SENT_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    worker: int
    clock: int
    committed: int
    sent: int
    received: int
    wanted: int
    kept: int
    shards: int
    def __init__(self, worker: _Optional[int] = ..., clock: _Optional[int] = ..., committed: _Optional[int] = ..., sent: _Optional[int] = ..., received: _Optional[int] = ..., wanted: _Optional[int] = ..., kept: _Optional[int] = ..., shards: _Optional[int] = ...) -> None: ...

class HotRequest(_message.Message):
    __slots__ = ("seconds",)
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    seconds: float
    def __init__(self, seconds: _Optional[float] = ...) -> None: ...

class HotTable(_message.Message):
    __slots__ = ("id", "name", "sampled", "lost", "keys", "counts")
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    id: int
    name: str
    sampled: int
    lost: int
    keys: _containers.RepeatedScalarFieldContainer[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, id: _Optional[int] = ..., name: _Optional[str] = ..., sampled: _Optional[int] = ..., lost: _Optional[int] = ..., keys: _Optional[_Iterable[int]] = ..., counts: _Optional[_Iterable[int]] = ...) -> None: ...

class HotResponse(_message.Message):
    __slots__ = ("incarnation", "pulls", "pushes", "sampled", "ranges", "range_counts", "tables")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PULLS_FIELD_NUMBER: _ClassVar[int]
    PUSHES_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    RANGE_COUNTS_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    pulls: int
    pushes: int
    sampled: int
    ranges: _containers.RepeatedScalarFieldContainer[int]
    range_counts: _containers.RepeatedScalarFieldContainer[int]
    tables: _containers.RepeatedCompositeFieldContainer[HotTable]
    def __init__(self, incarnation: _Optional[int] = ..., pulls: _Optional[int] = ..., pushes: _Optional[int] = ..., sampled: _Optional[int] = ..., ranges: _Optional[_Iterable[int]] = ..., range_counts: _Optional[_Iterable[int]] = ..., tables: _Optional[_Iterable[_Union[HotTable, _Mapping]]] = ...) -> None: ...

class TablesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TableStatus(_message.Message):
    __slots__ = ("id", "rows_headed", "rows", "bytes", "spec", "app", "candidates", "admitted", "evicted")
    class EvictedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    ROWS_HEADED_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    APP_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    id: int
    rows_headed: int
    rows: int
    bytes: int
    spec: str
    app: str
    candidates: int
    admitted: int
    evicted: _containers.ScalarMap[str, int]
    def __init__(self, id: _Optional[int] = ..., rows_headed: _Optional[int] = ..., rows: _Optional[int] = ..., bytes: _Optional[int] = ..., spec: _Optional[str] = ..., app: _Optional[str] = ..., candidates: _Optional[int] = ..., admitted: _Optional[int] = ..., evicted: _Optional[_Mapping[str, int]] = ...) -> None: ...

class ClusterRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ClusterResponse(_message.Message):
    __slots__ = ("name", "incarnation", "view", "roster", "newest")
    NAME_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    ROSTER_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    name: str
    incarnation: int
    view: bytes
    roster: bytes
    newest: int
    def __init__(self, name: _Optional[str] = ..., incarnation: _Optional[int] = ..., view: _Optional[bytes] = ..., roster: _Optional[bytes] = ..., newest: _Optional[int] = ...) -> None: ...

class TablesResponse(_message.Message):
    __slots__ = ("tables",)
    TABLES_FIELD_NUMBER: _ClassVar[int]
    tables: _containers.RepeatedCompositeFieldContainer[TableStatus]
    def __init__(self, tables: _Optional[_Iterable[_Union[TableStatus, _Mapping]]] = ...) -> None: ...
