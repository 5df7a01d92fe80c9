from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LookupRequest(_message.Message):
    __slots__ = ("tables", "hold")
    TABLES_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    tables: _containers.RepeatedCompositeFieldContainer[TableKeys]
    hold: bool
    def __init__(self, tables: _Optional[_Iterable[_Union[TableKeys, _Mapping]]] = ..., hold: _Optional[bool] = ...) -> None: ...

class TableKeys(_message.Message):
    __slots__ = ("table", "keys")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    table: str
    keys: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, table: _Optional[str] = ..., keys: _Optional[_Iterable[int]] = ...) -> None: ...

class LookupResponse(_message.Message):
    __slots__ = ("tables", "shown")
    TABLES_FIELD_NUMBER: _ClassVar[int]
    SHOWN_FIELD_NUMBER: _ClassVar[int]
    tables: _containers.RepeatedCompositeFieldContainer[TableRows]
    shown: ShownState
    def __init__(self, tables: _Optional[_Iterable[_Union[TableRows, _Mapping]]] = ..., shown: _Optional[_Union[ShownState, _Mapping]] = ...) -> None: ...

class TableRows(_message.Message):
    __slots__ = ("table", "dim", "rows", "shape")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    DIM_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    table: str
    dim: int
    rows: bytes
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, table: _Optional[str] = ..., dim: _Optional[int] = ..., rows: _Optional[bytes] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class ShownState(_message.Message):
    __slots__ = ("time_s", "age_s", "steps", "pinned", "epoch")
    class StepsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    TIME_S_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    time_s: float
    age_s: float
    steps: _containers.ScalarMap[int, int]
    pinned: str
    epoch: int
    def __init__(self, time_s: _Optional[float] = ..., age_s: _Optional[float] = ..., steps: _Optional[_Mapping[int, int]] = ..., pinned: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class ReaderStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReaderStatusResponse(_message.Message):
    __slots__ = ("cluster", "application", "tables", "rows", "bytes", "pulls", "pulled", "shown", "age_p50_s", "age_p99_s", "name", "share")
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    APPLICATION_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    PULLS_FIELD_NUMBER: _ClassVar[int]
    PULLED_FIELD_NUMBER: _ClassVar[int]
    SHOWN_FIELD_NUMBER: _ClassVar[int]
    AGE_P50_S_FIELD_NUMBER: _ClassVar[int]
    AGE_P99_S_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    cluster: str
    application: str
    tables: _containers.RepeatedScalarFieldContainer[str]
    rows: int
    bytes: int
    pulls: int
    pulled: int
    shown: ShownState
    age_p50_s: float
    age_p99_s: float
    name: str
    share: str
    def __init__(self, cluster: _Optional[str] = ..., application: _Optional[str] = ..., tables: _Optional[_Iterable[str]] = ..., rows: _Optional[int] = ..., bytes: _Optional[int] = ..., pulls: _Optional[int] = ..., pulled: _Optional[int] = ..., shown: _Optional[_Union[ShownState, _Mapping]] = ..., age_p50_s: _Optional[float] = ..., age_p99_s: _Optional[float] = ..., name: _Optional[str] = ..., share: _Optional[str] = ...) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("checkpoint",)
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    checkpoint: str
    def __init__(self, checkpoint: _Optional[str] = ...) -> None: ...

class PinResponse(_message.Message):
    __slots__ = ("shown",)
    SHOWN_FIELD_NUMBER: _ClassVar[int]
    shown: ShownState
    def __init__(self, shown: _Optional[_Union[ShownState, _Mapping]] = ...) -> None: ...

class FollowRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
