"""elasticps: an elastic, fault-tolerant parameter server for distributed training."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import coordinator  # noqa: F401  # sets what grpc reads when it is imported
from elasticps.errors import (
    CheckpointError,
    Closed,
    ClusterUnreachable,
    ConfigError,
    DataLost,
    Definite,
    Error,
    GroupLost,
    Indefinite,
    InputError,
    NotFinite,
    OtherShare,
    ServerError,
    ServerFull,
    SpecError,
    Timeout,
    UnknownTable,
    VersionMismatch,
)
from elasticps.model.caching import Cache
from elasticps.model.policies import Capacity, IdleFor, MinCount, MinCountSketch, Probability, SmallNorm
from elasticps.model.spec import (
    ASP,
    BSP,
    FTRL,
    KKT,
    SGD,
    SSP,
    Accumulate,
    Adagrad,
    Adam,
    AdamW,
    Assign,
    BFloat16,
    Constant,
    Custom,
    CustomFilter,
    Float16,
    Int8,
    KeyDeltas,
    KeysOnce,
    Normal,
    RandomK,
    RowAdagrad,
    TableSpec,
    Threshold,
    TopK,
    Uniform,
    Zeros,
    Zstd,
)

if TYPE_CHECKING:
    from elasticps import keys
    from elasticps.client import (
        CacheUse,
        Client,
        DenseTensor,
        KeyUsage,
        Loss,
        OpenStep,
        Resume,
        Shard,
        Shards,
        SparseTable,
        Step,
        TableInfo,
        TableState,
        connect,
        log_stats,
    )
    from elasticps.local import LocalCluster
    from elasticps.model.key_share import share_of
    from elasticps.publishing import publish, read_increments
    from elasticps.readers import AsOf, Reader, RemoteReader, remote_reader
    from elasticps.readers.opening import reader  # and not the module of that name

__version__ = "0.1.0"

__all__ = [
    "ASP",
    "BSP",
    "FTRL",
    "KKT",
    "SGD",
    "SSP",
    "Accumulate",
    "Adagrad",
    "Adam",
    "AdamW",
    "AsOf",
    "Assign",
    "BFloat16",
    "Cache",
    "CacheUse",
    "Capacity",
    "CheckpointError",
    "Client",
    "Closed",
    "ClusterUnreachable",
    "ConfigError",
    "Constant",
    "Custom",
    "CustomFilter",
    "DataLost",
    "Definite",
    "DenseTensor",
    "Error",
    "Float16",
    "GroupLost",
    "IdleFor",
    "Indefinite",
    "InputError",
    "Int8",
    "KeyDeltas",
    "KeyUsage",
    "KeysOnce",
    "LocalCluster",
    "Loss",
    "MinCount",
    "MinCountSketch",
    "Normal",
    "NotFinite",
    "OpenStep",
    "OtherShare",
    "Probability",
    "RandomK",
    "Reader",
    "RemoteReader",
    "Resume",
    "RowAdagrad",
    "ServerError",
    "ServerFull",
    "Shard",
    "Shards",
    "SmallNorm",
    "SparseTable",
    "SpecError",
    "Step",
    "TableInfo",
    "TableSpec",
    "TableState",
    "Threshold",
    "Timeout",
    "TopK",
    "Uniform",
    "UnknownTable",
    "VersionMismatch",
    "Zeros",
    "Zstd",
    "connect",
    "keys",
    "log_stats",
    "publish",
    "read_increments",
    "reader",
    "remote_reader",
    "share_of",
]

_HOMES = {
    "LocalCluster": "elasticps.local",
    "AsOf": "elasticps.readers",
    "Reader": "elasticps.readers",
    "reader": "elasticps.readers",
    "RemoteReader": "elasticps.readers",
    "remote_reader": "elasticps.readers",
    "share_of": "elasticps.model.key_share",
    "publish": "elasticps.publishing",
    "read_increments": "elasticps.publishing",
}

if not TYPE_CHECKING:  # for type checkers a name that is not here stays an error

    def __getattr__(name: str) -> Any:
        """Imports the client when it is first asked for: half a second of kernels and gRPC, which most commands and
        processes do without."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if name == "keys":
            return import_module("elasticps.keys")
        home = import_module(_HOMES.get(name, "elasticps.client"))
        value = globals()[name] = getattr(home, name)
        return value

    def __dir__() -> list[str]:
        return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
