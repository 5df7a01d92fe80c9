from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("id", "pid", "address", "admin", "incarnation", "state", "epoch", "ranges_headed", "ranges_held", "rows", "bytes", "connections", "pushes", "pulls", "tables", "uptime_s")
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
    TABLES_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
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
    tables: int
    uptime_s: float
    def __init__(self, id: _Optional[str] = ..., pid: _Optional[int] = ..., address: _Optional[str] = ..., admin: _Optional[str] = ..., incarnation: _Optional[int] = ..., state: _Optional[str] = ..., epoch: _Optional[int] = ..., ranges_headed: _Optional[int] = ..., ranges_held: _Optional[int] = ..., rows: _Optional[int] = ..., bytes: _Optional[int] = ..., connections: _Optional[int] = ..., pushes: _Optional[int] = ..., pulls: _Optional[int] = ..., tables: _Optional[int] = ..., uptime_s: _Optional[float] = ...) -> None: ...
